"""Costs that an engine states for predictions: its memory in addition to activations, and its additions to a step.

A rank's activations follow from the family and the batch (bench.predict). The engine defines everything in this module.
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
"""A value for each segment of the model, shape (segments,), in the order of forward."""

Terms = dict[str, int]
"""Bytes by name; their sum is live at one moment."""

ByteRange = tuple[int, int]
"""Bytes, low and high."""

CUDA_BASE_BYTES = (600_000_000, 2_000_000_000)
"""CUDA context, loaded kernels, cuBLAS workspaces and NCCL's buffers: 0.5 to 2 GB by GPU, torch and number of peers
(ml-engineering, "Anatomy of Model's Memory Usage"), with 0.1 GB of workspaces and buffers at least."""


@dataclass(frozen=True, eq=False)  # compared by identity: prediction builds one per model and uses it as a cache key
class ModelSizes:
    """A model as an engine's costs see it."""

    tensors: tuple[EqualTensors, ...]
    modules_of: Callable[[], Sequence[WeightModule]]  # built on demand: a long list, and few engines need it
    units_of: Callable[[], Sequence[Unit]] = tuple

    @cached_property
    def modules(self) -> tuple[WeightModule, ...]:
        """The modules in the order of forward."""
        return tuple(self.modules_of())

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The parameters outside all blocks, then the blocks in the order of forward."""
        return tuple(self.units_of())

    @cached_property
    def elements(self) -> int:
        """Elements of all parameters."""
        return count_elements(self.tensors)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(size.elements for size in self.tensors)


def count_elements(sizes: Sequence[EqualTensors]) -> int:
    """Return the elements of all tensors together."""
    return sum(size.elements * size.number for size in sizes)


def sum_bytes(terms: Terms) -> int:
    """Return the bytes of all terms together."""
    return sum(terms.values())


class SegmentBytes(NamedTuple):
    """Live bytes in addition to activations while each segment runs, in one pass."""

    gradients: Array
    buckets: Array
    gathered: Array


class BackwardWork(NamedTuple):
    """Properties of the segments' backward passes on one rank that an engine's costs depend on."""

    working: Array  # bytes of working memory, in addition to activations saved up to this segment
    standing: Array  # of these, the bytes that stay live between two operations as well
    parameters: Array  # elements whose gradients are complete afterwards
    largest: Array  # elements of the largest of these parameters
    transposed: Array  # elements of a gradient that is not accumulated in place, as torch's linear computes it


class EngineMemory(Protocol):
    """An engine's part of the memory of the rank with the highest use, in bytes.

    Names of terms: weights, master weights, optimizer moments, gradients, buckets, gathered layers, working memory, and
    the engine's own.
    """

    def resident(self) -> Terms:
        """Return the bytes live between two steps, without gradients of earlier micro-steps and without buckets."""

    def kept_buckets(self) -> int:
        """Return the bytes of buckets that stay between two steps."""

    def initialisation(self, thrown_away: int) -> Terms:
        """Return the bytes live at the peak of building model and engine, with `thrown_away` discarded elements."""

    def forward(self, segments: int) -> SegmentBytes:
        """Return the bytes live in addition to activations in the last micro-step's forward."""

    def backward(self, work: BackwardWork) -> SegmentBytes:
        """Return the bytes live in addition to activations in its backward, gradients of the segments included."""

    def after_backward(self) -> int:
        """Return the bytes of buckets at the end of backward, when no activations are left."""

    def update(self) -> Terms:
        """Return the bytes live at the peak of the optimizer's step, without `kept_buckets`."""

    def host(self) -> dict[str, ByteRange] | None:
        """Return the bytes that one rank keeps in its node's memory instead of its GPU's; None where unknown."""


StepPass = Literal["forward", "backward", "update"]


class Transfer(NamedTuple):
    """Collectives of one kind in one pass, which a step repeats `passes` times."""

    kind: CollectiveKind
    when: StepPass
    payload_bytes: int  # of one pass, all its calls together, as nccl-tests counts it
    calls: int  # in one pass
    passes: int  # micro-steps with these collectives
    overlaps: bool  # with the computation of the pass; otherwise the pass waits
    ranks: int  # number of participants
    alone_bytes: int = 0  # of the first gather or the last reduction, which overlaps no computation; 0: as any other
    nodes: int | None = None  # of the ranks; None: neighbouring ranks, on as few nodes as possible
    at_once: int = 1  # such transfers, each of other ranks of a node, that share the links between nodes


class EngineStep(NamedTuple):
    """An engine's additions to the passes of an optimizer step, on one rank."""

    updated: int  # elements that AdamW updates, padding included
    transfers: list[Transfer]  # empty for a single rank


Counts = tuple[int, ...]
"""A number for each stage of a rank, in the order of forward."""


class StageMoment(NamedTuple):
    """State of a rank during a pass of a stage, or during the reduction of its gradients.

    States (activations between two stages) and their gradients are counted in sets for one micro-batch.
    """

    kind: Literal["forward", "backward", "reduce"]
    stage: int
    kept: Counts  # forwards still without their backward, except this pass
    waiting: int  # received states for later passes
    gradients: int  # received gradients, those of this pass included
    leaving: int  # states and gradients in transfer to other ranks
    whole: Counts  # 1: weights are gathered
    unreduced: Counts  # 1: gradients are whole
    reduced: Counts  # 1: this rank's partition of the gradients waits for the update


class StageBytes(NamedTuple):
    """Temporary bytes of a stage whose parameters are partitioned among data-parallel ranks; otherwise 0."""

    whole: int = 0  # its gathered weights
    unreduced: int = 0  # its gradients, from the first backward to their reduction
    reduced: int = 0  # this rank's partition of them, from the reduction to the update
    reducing: int = 0  # working memory of the reduction in addition to both


class PlaceCosts(NamedTuple):
    """An engine's part of the costs of the ranks in one place of a pipeline. Terms are those of `EngineMemory`."""

    stages: tuple[int, ...]
    list_moments: Callable[[], tuple[StageMoment, ...]]  # of high memory use; slow, and not needed for a step's time
    resident: Terms  # between two steps
    initialisation: Terms  # at the peak of building stages and engine
    update: Terms  # at the peak of the optimizer's step
    by_stage: tuple[StageBytes, ...]
    step: EngineStep  # its transfers are those of all micro-batches together, so that `passes` is 1


class SimulatedPass(NamedTuple):
    """A simulated forward or backward of a stage for one micro-batch. Times count from the start of the first pass."""

    kind: StepPass
    stage: int
    place: int
    begin_s: float
    end_s: float
    sent_s: float | None  # when the transfer of its input from another place began; None: its input is local


StageSeconds = Sequence[float]
"""Seconds of each stage for one micro-batch."""
Hop = Callable[[int, int], float]
"""Function that returns the seconds of a transfer from one place to another, which overlaps computation."""


class PipelineCosts(NamedTuple):
    """Costs of a model whose stages are on several ranks.

    `simulate` and `list_passes` take the seconds of forwards and of backwards by stage, and of transfers.
    """

    parts: tuple[Part, ...]  # by stage
    places: tuple[PlaceCosts, ...]
    simulate: Callable[[StageSeconds, StageSeconds, Hop], tuple[float, ...]]  # the end of the last pass, by place
    list_passes: Callable[[StageSeconds, StageSeconds, Hop], Sequence[SimulatedPass]]  # all passes of the schedule
