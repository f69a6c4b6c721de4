"""Parameters in one flat tensor. Each data-parallel rank updates its own partition of the tensor in fp32.

`WholeParameters` work as in ZeRO stage 1: weights and gradients stay whole. Gradients are reduce-scattered once per
step, and updated partitions are gathered. `GatheredParameters` work as in ZeRO stage 3: each rank keeps only its
partition, and a stage's weights are whole while the stage computes. Neither class uses hooks in backward, so both
classes work with every pipeline schedule.
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
from bench.engines.distributed.slices import TensorRanks, UnslicedGradients
from bench.engines.precision.update import build_optimizer, find_clipping_factor, sum_squares


class FlatLayout(NamedTuple):
    """Positions of parameters in a flat tensor, which is padded so that all ranks have equal partitions."""

    spans: tuple[slice, ...]  # position of each parameter
    own: slice  # position of this rank's partition
    size: int  # elements, padding included

    @classmethod
    def of(cls, parameters: Sequence[Parameter], ranks: int, rank: int) -> "FlatLayout":
        # parameters are consecutive; padding is at the end
        spans, begin = list[slice](), 0
        for parameter in parameters:
            spans.append(slice(begin, begin + parameter.numel()))
            begin = spans[-1].stop
        size = pad_elements(begin, ranks)
        return cls(tuple(spans), slice(rank * size // ranks, (rank + 1) * size // ranks), size)

    def list_own(self, chosen: Collection[int]) -> list[slice]:
        """Return the slices of this rank's partition that hold elements of chosen parameters. Indices of a slice count
        from the start of the partition. `chosen` has the indices of the parameters."""
        begin = self.own.start
        cut = (
            slice(max(span.start, begin) - begin, min(span.stop, self.own.stop) - begin)
            for index, span in enumerate(self.spans)
            if index in chosen
        )
        return [span for span in cut if span.start < span.stop]

    def move(self, parameters: Sequence[Parameter]) -> Tensor:
        """Return a new flat tensor with the values of `parameters`. The parameters become views of it."""
        flat = parameters[0].detach().new_zeros(self.size)
        for parameter, span in zip(parameters, self.spans, strict=True):
            flat[span].copy_(parameter.detach().flatten())
            parameter.data = flat[span].view_as(parameter)
        return flat


class DividedParameters(Protocol):
    """Interface for parameters of which this rank updates one partition."""

    master: Parameter  # this rank's partition of the weights, in fp32
    counted: list[slice]  # slices of the partition that this rank counts in the gradient norm

    def take_gradient(self) -> Tensor:
        """Return this rank's partition of the gradients in fp32, averaged over the ranks with copies of the parameters.
        Collective."""

    def publish(self) -> None:
        """Write this rank's updated partition back to the weights. Collective."""


class WholeParameters:
    """Parameters that stay whole on every rank, while each rank updates one partition (as in ZeRO stage 1)."""

    def __init__(
        self, parameters: Sequence[Parameter], counted: Collection[int], group: dist.ProcessGroup,
        among: TensorRanks | None = None, holders: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Arguments:

        `group` has the ranks with copies of these parameters. `counted` has the indices of the parameters that count in
        the gradient norm on this rank. If several stages share a parameter, only one of their ranks counts it. `among`
        is the group of tensor-parallel ranks, each with its own slice of every matrix; None if matrices are whole.

        `holders` are the ranks of one model copy that all have these parameters, such as both ranks with a tied
        embedding. `holders` is None if no other rank has the parameters. Each holder computes the gradients of its own
        stages only, so the gradients of all holders are summed.
        """
        self._unsliced = UnslicedGradients(parameters, among)
        self._group, self._ranks, self._holders = group, dist.get_world_size(group), holders
        layout = FlatLayout.of(parameters, self._ranks, dist.get_rank(group))
        # gradients are views too: one collective reduces all of them, and backward adds in place
        self._gradients = parameters[0].detach().new_zeros(layout.size)
        self._weights = layout.move(parameters)
        for parameter, span in zip(parameters, layout.spans, strict=True):
            parameter.grad = self._gradients[span].view_as(parameter)
        self._own, self.counted = layout.own, layout.list_own(counted)
        self.master = Parameter(self._weights[layout.own].float())

    def take_gradient(self) -> Tensor:
        self._unsliced.reduce()
        own = self._gradients
        if self._ranks > 1:
            own = torch.empty_like(self._gradients[self._own])
            dist.reduce_scatter_tensor(own, self._gradients, group=self._group)
        if self._holders is not None:  # last, so that the sum is bitwise equal on all holders
            dist.all_reduce(own, group=self._holders)
        # divided in fp32, because a division in low precision would round once more
        return own.float().div_(self._ranks)

    def publish(self) -> None:
        with torch.no_grad():
            own = self._weights[self._own].copy_(self.master)
            if self._ranks > 1:
                # a copy is sent, since the partition is a view of the gather's output
                dist.all_gather_into_tensor(self._weights, own.clone(), group=self._group)
        self._gradients.zero_()


class GatheredParameters:
    """Parameters of one stage that are whole only between `gather` and `release` (as in ZeRO stage 3). Their whole
    gradients exist from the first backward of a step to `reduce`."""

    def __init__(
        self, parameters: Sequence[Parameter], counted: Collection[int], group: dist.ProcessGroup,
        among: TensorRanks | None = None,
    ) -> None:  # fmt: skip
        """See `WholeParameters` for the arguments."""
        self._unsliced = UnslicedGradients(parameters, among)
        self._group, self._ranks, self._parameters = group, dist.get_world_size(group), list(parameters)
        self._layout = FlatLayout.of(parameters, self._ranks, dist.get_rank(group))
        self._whole = self._layout.move(parameters)
        self.counted = self._layout.list_own(counted)
        self.master = Parameter(self._whole[self._layout.own].float().clone())
        self._coming: dist.Work | None = None
        self._gradients: Tensor | None = None
        self._own_gradient: Tensor | None = None
        self.release()

    def gather(self) -> None:
        """Start the all-gather that makes the weights whole. Collective."""
        own = self.master.detach().to(self._whole.dtype)
        # only the storage is allocated again; the tensor and the parameters (its views) were never replaced
        self._whole.untyped_storage().resize_(self._layout.size * self._whole.itemsize)
        self._coming = dist.all_gather_into_tensor(self._whole, own, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait until the all-gather has made the weights whole."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def release(self) -> None:
        """Free the memory of the whole weights. Autograd graphs that saved a weight stay valid: only the storage is
        emptied, and the next `gather` fills the same tensor again."""
        self.wait()  # if no pass has waited for the last gather
        self._whole.untyped_storage().resize_(0)

    def expect_gradients(self) -> None:
        """Allocate whole gradients, to which backward adds. Do nothing if they exist."""
        if self._gradients is None:
            self._gradients = self._whole.new_zeros(self._layout.size)
            for parameter, span in zip(self._parameters, self._layout.spans, strict=True):
                parameter.grad = self._gradients[span].view(parameter.shape)

    def reduce(self) -> None:
        """Reduce the gradients, and keep this rank's partition of their mean over data-parallel copies. Collective."""
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
        """Do nothing: the next `gather` computes the weights from the updated master weights."""


class DividedUpdate:
    """AdamW update in fp32 of this rank's partitions of all parameters."""

    def __init__(self, parts: Sequence[DividedParameters], optimizer: OptimizerSpec) -> None:
        self._parts = list(parts)
        self._clipping = optimizer.gradient_clipping
        self._optimizer = build_optimizer([part.master for part in parts], optimizer)
        self.norm: Tensor | None = None  # of the last step's gradients before clipping; 0-d
        self._steps = 0

    def __call__(self) -> None:
        """Make one optimizer step from the gradients, and free them. Collective over all ranks."""
        # all gradients are taken first, because the norm is over all parameters
        for part in self._parts:
            part.master.grad = part.take_gradient()
        norm, self.norm = self._compute_norms()
        if self._clipping > 0:
            factor = find_clipping_factor(norm, self._clipping)
            for part in self._parts:
                assert part.master.grad is not None
                part.master.grad *= factor
        self._optimizer.step()
        for part in self._parts:
            part.master.grad = None  # freed before the gathers in `publish`, which need memory
            part.publish()
        self._steps += 1

    def _compute_norms(self) -> tuple[Tensor, Tensor]:
        """Return two global gradient norms, 0-d: the norm for clipping, and a more exact norm for verification. A
        parameter that several ranks hold counts once. The more exact norm is computed only in the first SUMMED_STEPS
        steps; afterwards, the second result is the norm for clipping too."""
        found = [
            part.master.grad[span] for part in self._parts for span in part.counted if part.master.grad is not None
        ]
        like = self._parts[0].master
        # a rank may count no parameter, but must still take part in the collective
        square = torch.nn.utils.get_total_norm(found).square() if found else like.new_zeros(())
        dist.all_reduce(square)
        if self._steps >= SUMMED_STEPS:
            return square.sqrt(), square.sqrt()
        summed = sum_squares(found).to(like.device)
        dist.all_reduce(summed)
        return square.sqrt(), summed.sqrt()
