"""ZeRO's stage 1 as one flat buffer: gradients are reduced and divided at once, each data-parallel rank updates its
part of the weights, and gathers the others'. Nothing hooks into backward, so it goes with every schedule."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bench.spec import OptimizerSpec
from bench.stacks import pad_elements

SMALLEST = 1e-6
"""What torch.nn.utils.clip_grads_with_norm_ adds to a norm before it divides by it."""


class FlatParameters:
    """Parameters as views of one tensor, their gradients as views of another, both with as many elements for each of
    the ranks that divide them."""

    def __init__(self, parameters: Sequence[Parameter], ranks: int, rank: int) -> None:
        size = pad_elements(sum(parameter.numel() for parameter in parameters), ranks)
        self.weights, self.gradients = (parameters[0].detach().new_zeros(size) for _ in range(2))
        self.own = slice(rank * size // ranks, (rank + 1) * size // ranks)
        self.spans: list[slice] = []
        begin = 0
        for parameter in parameters:
            span = slice(begin, begin + parameter.numel())
            self.weights[span].copy_(parameter.detach().flatten())
            parameter.data = self.weights[span].view_as(parameter)
            parameter.grad = self.gradients[span].view_as(parameter)
            self.spans.append(span)
            begin = span.stop

    def list_own(self, chosen: Collection[int]) -> list[slice]:
        """Return where this rank's part of the chosen parameters is, counted from the beginning of its part."""
        begin = self.own.start
        cut = (
            slice(max(span.start, begin) - begin, min(span.stop, self.own.stop) - begin)
            for index, span in enumerate(self.spans)
            if index in chosen
        )
        return [span for span in cut if span.start < span.stop]


class FlatUpdate:
    """AdamW on this rank's part of all parameters, in fp32: on the weights themselves, below fp32 on a copy."""

    def __init__(
        self, parameters: Sequence[Parameter], counted: Collection[int], optimizer: OptimizerSpec,
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        """`group`: the ranks with copies of these parameters, among which states are divided. `counted`: those that
        count in the norm on this rank, by their place; a parameter on several stages counts on one of them."""
        self._group, self._ranks = group, dist.get_world_size(group)
        self._flat = flat = FlatParameters(parameters, self._ranks, dist.get_rank(group))
        self._counted = flat.list_own(counted)
        self._master = Parameter(flat.weights[flat.own].float())
        self._clipping = optimizer.gradient_clipping
        self._optimizer = torch.optim.AdamW(
            [self._master], lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps,
            weight_decay=optimizer.weight_decay, fused=True if optimizer.implementation == "fused" else None,
        )  # fmt: skip
        self.norm: Tensor | None = None  # of the last step, before clipping; 0-d

    def __call__(self) -> None:
        """Make one step from the gradients, and let go of them. Collective over all ranks."""
        flat = self._flat
        gradient = self._reduce()
        self.norm = self._compute_norm(gradient)
        if self._clipping > 0:
            gradient *= (self._clipping / (self.norm + SMALLEST)).clamp(max=1.0)
        self._master.grad = gradient
        self._optimizer.step()
        self._master.grad = None
        with torch.no_grad():
            own = flat.weights[flat.own].copy_(self._master)
            if self._ranks > 1:
                dist.all_gather_into_tensor(flat.weights, own.clone(), group=self._group)
        flat.gradients.zero_()

    def _reduce(self) -> Tensor:
        """Return this rank's part of the gradients in fp32, their mean over the ranks that have copies."""
        flat = self._flat
        if self._ranks == 1:
            return flat.gradients.float()
        own = torch.empty_like(flat.gradients[flat.own])
        dist.reduce_scatter_tensor(own, flat.gradients, group=self._group)
        return own.float().div_(self._ranks)

    def _compute_norm(self, gradient: Tensor) -> Tensor:
        """Return the global norm: each parameter's part once."""
        parts = [gradient[span] for span in self._counted]
        square = torch.nn.utils.get_total_norm(parts).square() if parts else gradient.new_zeros(())
        dist.all_reduce(square)
        return square.sqrt()
