"""Costs that an engine defines for predictions: the memory that it needs in addition to activations, and the
collectives that it runs in a step.

The memory of activations does not depend on the engine. The package bench.predict computes it from the model family and
the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.core.machine import CollectiveKind
from bench.core.network import EqualTensors, Part, Unit, WeightModule

Array = NDArray[np.int64]
"""Array of shape (segments,): a value for each segment of the model, in forward order. Segments are embeddings,
sub-layers of blocks, final norms, the head and the loss."""

Terms = dict[str, int]
"""Bytes of memory by the name of their use, such as weights or gradients. All of them are in memory at the same time,
so the total is their sum."""

ByteRange = tuple[int, int]
"""Lower and upper bound of a number of bytes."""

CUDA_BASE_BYTES = (600_000_000, 2_000_000_000)
"""Lower and upper bound of the device memory in bytes that CUDA uses besides tensors.

It consists of the CUDA context, loaded kernels, cuBLAS workspaces and NCCL's buffers. Its size is 0.5 to 2 GB,
depending on GPU, torch version and number of peers (ml-engineering, "Anatomy of Model's Memory Usage"). The lower bound
adds 0.1 GB for workspaces and buffers.
"""


CUBLAS_BYTES = 2 * 32 * 2**20
"""Bytes of the workspaces of cuBLAS, which are a part of CUDA_BASE_BYTES. Forward and backward pass have handles of
their own, with 32 MiB each. It is torch's default since Hopper, and an upper bound for older GPUs."""


@dataclass(frozen=True, eq=False)  # compared by identity: prediction builds one per model and uses it as a cache key
class ModelSizes:
    """Sizes of a model's parameters, from which an engine computes its costs."""

    tensors: tuple[EqualTensors, ...]  # trained: they have gradients and an optimizer's state
    modules_of: Callable[[], Sequence[WeightModule]]  # built on demand: a long list, and few engines need it
    units_of: Callable[[], Sequence[Unit]] = tuple
    frozen: tuple[EqualTensors, ...] = ()  # not trained, so without gradients and without updates

    @cached_property
    def modules(self) -> tuple[WeightModule, ...]:
        """Modules of the model in forward order."""
        return tuple(self.modules_of())

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """FSDP units of the model: the unit of all parameters outside blocks, then each block in forward order."""
        return tuple(self.units_of())

    @cached_property
    def elements(self) -> int:
        """Number of elements of the trained parameters."""
        return count_elements(self.tensors)

    @cached_property
    def largest(self) -> int:
        """Number of elements of the largest trained parameter."""
        return max(size.elements for size in self.tensors)

    @property
    def all_tensors(self) -> tuple[EqualTensors, ...]:
        """All parameters: the trained ones, then the frozen ones."""
        return self.tensors + self.frozen

    @cached_property
    def largest_of_all(self) -> int:
        """Number of elements of the largest parameter, trained or frozen."""
        return max(size.elements for size in self.all_tensors)

    @property
    def quantised(self) -> bool:
        """True if some frozen parameters are quantised."""
        return any(size.packed for size in self.frozen)

    def count_frozen_bytes(self, width: int) -> int:
        """Return the bytes of the frozen parameters. Parameters that are not quantised have `width` bytes per
        element."""
        return sum(size.number * (size.packed or width * size.elements) for size in self.frozen)


def count_elements(sizes: Sequence[EqualTensors]) -> int:
    """Return the number of elements of all tensors."""
    return sum(size.elements * size.number for size in sizes)


def sum_bytes(terms: Terms) -> int:
    """Return the total bytes of all terms."""
    return sum(terms.values())


class SegmentBytes(NamedTuple):
    """Bytes in memory during each segment (such as a sub-layer) of one forward or backward pass. Activations are
    excluded. Each field is one use of the memory."""

    gradients: Array
    buckets: Array
    gathered: Array


class BackwardWork(NamedTuple):
    """Working memory and gradients of one rank's backward pass, for each segment of the model (such as a sub-layer).
    From these values, an engine computes the memory that it needs in addition to activations."""

    working: Array  # bytes of working memory, besides the activations saved by this and earlier segments
    standing: Array  # part of `working` that stays live between two operations
    parameters: Array  # elements of the parameters with complete gradients after this segment
    largest: Array  # elements of the largest of these parameters
    transposed: Array  # elements of an extra tensor for a gradient that torch's linear layer leaves transposed


class EngineMemory(Protocol):
    """Memory in bytes that an engine needs in addition to activations, on the rank with the highest peak.

    `Terms` names the uses of this memory: weights, master weights, optimizer moments, gradients, buckets, gathered
    layers, working memory, and further uses that the engine defines.
    """

    def resident(self) -> Terms:
        """Return the bytes in memory between two optimizer steps. Buckets and gradients accumulated by earlier
        micro-steps are excluded."""

    def kept_buckets(self) -> int:
        """Return the bytes of communication buckets that stay allocated between two steps."""

    def initialisation(self, discarded: int) -> Terms:
        """Return the bytes in memory at the peak while model and engine are built. Building allocates and frees
        `discarded` elements that the finished model does not have."""

    def forward(self, segments: int) -> SegmentBytes:
        """Return the bytes in memory during the forward pass of the last micro-step, for each segment of the model
        (such as a sub-layer). Activations are excluded. `segments` is the number of segments."""

    def backward(self, work: BackwardWork) -> SegmentBytes:
        """Return the bytes in memory during the backward pass of the last micro-step, for each segment of the model
        (such as a sub-layer). Activations are excluded. Gradients of the segment's parameters are included."""

    def after_backward(self) -> int:
        """Return the bytes of communication buckets at the end of the backward pass, when all activations are freed."""

    def update(self) -> Terms:
        """Return the bytes in memory at the peak of the optimizer's update, without the bytes of `kept_buckets`."""

    def host(self) -> dict[str, ByteRange] | None:
        """Return the bytes that one rank keeps in host memory instead of GPU memory (offload); None if unknown. Keys
        are the uses of this memory. Values are lower and upper bounds."""


StepPass = Literal["forward", "backward", "update"]


class Transfer(NamedTuple):
    """Collectives of one kind in one pass. The pass is a forward pass, a backward pass or an update. A step runs the
    pass `passes` times, for example once per micro-step, and each pass runs these collectives."""

    kind: CollectiveKind
    when: StepPass
    payload_bytes: int  # of all calls in one pass, counted as in nccl-tests
    calls: int  # number of collectives in one pass
    passes: int  # number of micro-steps with these collectives
    overlaps: bool  # True: they run during the computation of the pass; False: the pass waits for them
    ranks: int  # number of participating ranks
    alone_bytes: int = 0  # bytes of the first gather or last reduction, which overlaps nothing; 0: mean of all calls
    nodes: int | None = None  # number of nodes of the ranks; None: neighbouring ranks, on as few nodes as possible
    at_once: int = 1  # simultaneous transfers, this one included, that share the link of a node


class EngineStep(NamedTuple):
    """Work that an engine adds to one optimizer step of one rank: elements to update, and collectives."""

    updated: int  # elements that AdamW updates on this rank, padding included
    transfers: list[Transfer]  # empty for a single rank


Counts = tuple[int, ...]
"""An integer for each pipeline stage of a rank, in forward order."""


class StageMoment(NamedTuple):
    """Contents of a pipeline rank's memory at one moment: during a forward or backward pass of a stage, or during the
    reduction of the stage's gradients.

    Hidden states ("states") are the activations passed from one stage to the next. The fields for states and for their
    gradients count micro-batches: the value 2 means the states of two micro-batches.
    """

    kind: Literal["forward", "backward", "reduce"]
    stage: int
    kept: Counts  # micro-batches whose activations wait for their backward pass, this pass excluded
    waiting: int  # states received for later passes
    gradients: int  # gradients received, including those of this pass
    leaving: int  # states and gradients in transfer to other ranks
    whole: Counts  # 1: the stage's weights are gathered; 0: they are partitioned
    unreduced: Counts  # 1: the stage's gradients are not reduced yet
    reduced: Counts  # 1: this rank's partition of the gradients waits for the update


class StageBytes(NamedTuple):
    """Temporary memory in bytes of a pipeline stage whose parameters are partitioned among data-parallel ranks; 0 for
    other stages."""

    whole: int = 0  # gathered weights
    unreduced: int = 0  # gradients, from the first backward to their reduction
    reduced: int = 0  # this rank's partition of the gradients, from the reduction to the update
    reducing: int = 0  # working memory of the reduction, besides the gradients and this partition


class PlaceCosts(NamedTuple):
    """Costs of an engine for the ranks at one position of a pipeline. The fields `resident`, `initialisation` and
    `update` are the results of the methods of `EngineMemory` with the same names."""

    stages: tuple[int, ...]
    # Points in time with high memory use. This is a function, since it is slow and step times do not need it.
    list_moments: Callable[[], tuple[StageMoment, ...]]
    resident: Terms  # between two steps
    initialisation: Terms  # at the peak of building stages and engine
    update: Terms  # at the peak of the optimizer's step
    by_stage: tuple[StageBytes, ...]
    step: EngineStep  # each transfer covers all micro-batches, so its `passes` is 1


class SimulatedPass(NamedTuple):
    """A simulated forward or backward pass of a pipeline stage for one micro-batch. Times are seconds from the start of
    the first pass."""

    kind: StepPass
    stage: int
    place: int
    begin_s: float
    end_s: float
    sent_s: float | None  # start of the transfer of its input from another rank; None: the input is local


StageSeconds = Sequence[float]
"""Seconds that a pass takes for one micro-batch, by pipeline stage."""
Hop = Callable[[int, int], float]
"""Function that returns the seconds of a transfer between two pipeline positions. The transfer overlaps computation."""


class PipelineCosts(NamedTuple):
    """Costs of a pipeline: a model whose stages are on several ranks.

    The fields `simulate` and `list_passes` are functions. `simulate` returns the time in seconds when the last pass at
    each pipeline position ends. `list_passes` returns all passes with their times. Both have three arguments: the
    forward seconds of each stage, the backward seconds of each stage, and a function that returns the seconds of a
    transfer.
    """

    parts: tuple[Part, ...]  # by stage
    places: tuple[PlaceCosts, ...]
    simulate: Callable[[StageSeconds, StageSeconds, Hop], tuple[float, ...]]  # end of the last pass at each position
    list_passes: Callable[[StageSeconds, StageSeconds, Hop], Sequence[SimulatedPass]]  # all passes of the schedule
