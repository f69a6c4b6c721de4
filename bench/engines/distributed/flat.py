"""Parameters as one flat tensor, of which each data-parallel rank updates a part in fp32.

ZeRO's stage 1 keeps weights and gradients whole: gradients are reduced and divided at once, and updated parts gathered.
Its stage 3 keeps a rank's part alone, and makes a stage's weights whole while it computes. Nothing hooks into backward,
so both go with every schedule.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bench.core.engine_facts import SUMMED_STEPS
from bench.core.network import pad_elements
from bench.core.spec import OptimizerSpec
from bench.engines.distributed.ranks import sum_squares
from bench.engines.distributed.slices import TensorRanks, UnslicedGradients

SMALLEST = 1e-6
"""What torch.nn.utils.clip_grads_with_norm_ adds to a norm before it divides by it."""


class FlatLayout(NamedTuple):
    """Where parameters are in one tensor with as many elements for each of the ranks that divide it."""

    spans: tuple[slice, ...]  # of the parameters
    own: slice  # of this rank
    size: int

    @classmethod
    def of(cls, parameters: Sequence[Parameter], ranks: int, rank: int) -> "FlatLayout":
        spans, begin = list[slice](), 0
        for parameter in parameters:
            spans.append(slice(begin, begin + parameter.numel()))
            begin = spans[-1].stop
        size = pad_elements(begin, ranks)
        return cls(tuple(spans), slice(rank * size // ranks, (rank + 1) * size // ranks), size)

    def list_own(self, chosen: Collection[int]) -> list[slice]:
        """Return where this rank's part of the chosen parameters is, counted from the beginning of its part."""
        begin = self.own.start
        cut = (
            slice(max(span.start, begin) - begin, min(span.stop, self.own.stop) - begin)
            for index, span in enumerate(self.spans)
            if index in chosen
        )
        return [span for span in cut if span.start < span.stop]


class DividedParameters(Protocol):
    """Parameters of which this rank updates a part."""

    master: Parameter  # its part of the weights, in fp32
    counted: list[slice]  # of that part, what counts in the norm on this rank

    def take_gradient(self) -> Tensor:
        """Return its part of the gradients in fp32, their mean over the ranks that have copies. Collective."""
        ...

    def publish(self) -> None:
        """Bring the updated part to the weights. Collective."""
        ...


class WholeParameters:
    """Parameters that stay whole on each of the ranks that divide their update."""

    def __init__(
        self, parameters: Sequence[Parameter], counted: Collection[int], group: dist.ProcessGroup,
        among: TensorRanks | None = None, holders: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """`group`: the ranks with copies of these parameters. `counted`: those that count in the norm on this rank, by
        their place; a parameter on several stages counts on one of them. `among`: who shares each matrix. `holders`:
        the ranks of one copy whose stages have the same parameters, and none besides; each has the gradient of what it
        did with them."""
        self._unsliced = UnslicedGradients(parameters, among)
        self._group, self._ranks, self._holders = group, dist.get_world_size(group), holders
        layout = FlatLayout.of(parameters, self._ranks, dist.get_rank(group))
        self._weights, self._gradients = (parameters[0].detach().new_zeros(layout.size) for _ in range(2))
        for parameter, span in zip(parameters, layout.spans, strict=True):
            self._weights[span].copy_(parameter.detach().flatten())
            parameter.data = self._weights[span].view_as(parameter)
            parameter.grad = self._gradients[span].view_as(parameter)
        self._own, self.counted = layout.own, layout.list_own(counted)
        self.master = Parameter(self._weights[layout.own].float())

    def take_gradient(self) -> Tensor:
        self._unsliced.reduce()
        own = self._gradients
        if self._ranks > 1:
            own = torch.empty_like(self._gradients[self._own])
            dist.reduce_scatter_tensor(own, self._gradients, group=self._group)
        if self._holders is not None:  # last of all: every one of them has the same sum then, to the bit
            dist.all_reduce(own, group=self._holders)
        return own.float().div_(self._ranks)

    def publish(self) -> None:
        with torch.no_grad():
            own = self._weights[self._own].copy_(self.master)
            if self._ranks > 1:
                dist.all_gather_into_tensor(self._weights, own.clone(), group=self._group)
        self._gradients.zero_()


class GatheredParameters:
    """Parameters of one stage that are whole while it computes: between `gather` and `release`; its gradients are from
    the first backward of a step to `reduce`."""

    def __init__(
        self, parameters: Sequence[Parameter], counted: Collection[int], group: dist.ProcessGroup,
        among: TensorRanks | None = None,
    ) -> None:  # fmt: skip
        """See `WholeParameters`."""
        self._unsliced = UnslicedGradients(parameters, among)
        self._group, self._ranks, self._parameters = group, dist.get_world_size(group), list(parameters)
        self._layout = layout = FlatLayout.of(parameters, self._ranks, dist.get_rank(group))
        self._whole = parameters[0].detach().new_zeros(layout.size)
        for parameter, span in zip(parameters, layout.spans, strict=True):
            self._whole[span].copy_(parameter.detach().flatten())
            parameter.data = self._whole[span].view_as(parameter)
        self.counted = layout.list_own(counted)
        self.master = Parameter(self._whole[layout.own].float().clone())
        self._coming: dist.Work | None = None
        self._gradients: Tensor | None = None
        self._own_gradient: Tensor | None = None
        self.release()

    def gather(self) -> None:
        """Begin to make the weights whole. Collective."""
        own = self.master.detach().to(self._whole.dtype)
        self._whole.untyped_storage().resize_(self._layout.size * self._whole.itemsize)
        self._coming = dist.all_gather_into_tensor(self._whole, own, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait until they are."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def release(self) -> None:
        """Give up what other ranks have. Graphs that saved a weight find it again after the next `gather`."""
        self.wait()  # a stage that was gathered in vain is not there
        self._whole.untyped_storage().resize_(0)

    def expect_gradients(self) -> None:
        """Have room for gradients, before a backward adds to them."""
        if self._gradients is None:
            self._gradients = self._whole.new_zeros(self._layout.size)
            for parameter, span in zip(self._parameters, self._layout.spans, strict=True):
                parameter.grad = self._gradients[span].view(parameter.shape)

    def reduce(self) -> None:
        """Keep this rank's part of the gradients' mean. Collective."""
        assert self._gradients is not None, "there was a backward"
        self._unsliced.reduce()
        own = self._gradients.new_empty(self._layout.own.stop - self._layout.own.start)
        dist.reduce_scatter_tensor(own, self._gradients, group=self._group)
        self._own_gradient, self._gradients = own.float().div_(self._ranks), None
        for parameter in self._parameters:
            parameter.grad = None

    def take_gradient(self) -> Tensor:
        assert self._own_gradient is not None, "every stage was reduced"
        gradient, self._own_gradient = self._own_gradient, None
        return gradient

    def publish(self) -> None:
        """Weights are made of the masters when they are gathered."""


class DividedUpdate:
    """AdamW on this rank's part of all parameters, in fp32: on the weights themselves, below fp32 on a copy."""

    def __init__(self, parts: Sequence[DividedParameters], optimizer: OptimizerSpec) -> None:
        self._parts = list(parts)
        self._clipping = optimizer.gradient_clipping
        self._optimizer = torch.optim.AdamW(
            [part.master for part in parts], lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps,
            weight_decay=optimizer.weight_decay, fused=True if optimizer.implementation == "fused" else None,
        )  # fmt: skip
        self.norm: Tensor | None = None  # of the last step, before clipping; 0-d
        self._steps = 0

    def __call__(self) -> None:
        """Make one step from the gradients, and let go of them. Collective over all ranks."""
        for part in self._parts:
            part.master.grad = part.take_gradient()
        self.norm, summed = self._compute_norms()
        if self._clipping > 0:
            factor = (self._clipping / (self.norm + SMALLEST)).clamp(max=1.0)
            for part in self._parts:
                assert part.master.grad is not None
                part.master.grad *= factor
        self._optimizer.step()
        for part in self._parts:
            part.master.grad = None
            part.publish()
        self.norm = summed
        self._steps += 1

    def _compute_norms(self) -> tuple[Tensor, Tensor]:
        """Return the global norm, each parameter's part counted once: by which gradients are clipped, and by which a
        run is verified in its first steps."""
        found = [
            part.master.grad[span] for part in self._parts for span in part.counted if part.master.grad is not None
        ]
        like = self._parts[0].master
        square = torch.nn.utils.get_total_norm(found).square() if found else like.new_zeros(())
        dist.all_reduce(square)
        if self._steps >= SUMMED_STEPS:
            return square.sqrt(), square.sqrt()
        summed = sum_squares(found).to(like.device)
        dist.all_reduce(summed)
        return square.sqrt(), summed.sqrt()
