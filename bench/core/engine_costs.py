"""What prediction asks of an engine: the memory it needs beside activations, and what it adds to a step.

A rank's activations follow from the family and the batch (bench.predict); everything here is the engine's own to say.
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
"""One value per segment of the model, in the order of forward."""

Terms = dict[str, int]
"""Bytes by name; their sum is what lives at one moment."""

ByteRange = tuple[int, int]
"""Bytes, low and high."""

CUDA_BASE_BYTES = (600_000_000, 2_000_000_000)
"""CUDA context, loaded kernels, cuBLAS workspaces and NCCL's buffers: 0.5 to 2 GB by GPU, torch and number of peers
(ml-engineering, "Anatomy of Model's Memory Usage"), with 0.1 GB of workspaces and buffers at least."""


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """A model as an engine's costs see it. Prediction makes one of each model, so that itself is its key in a cache."""

    tensors: tuple[EqualTensors, ...]
    modules_of: Callable[[], Sequence[WeightModule]]  # many, and needed by few
    units_of: Callable[[], Sequence[Unit]] = tuple  # as modules

    @cached_property
    def modules(self) -> tuple[WeightModule, ...]:
        """The modules in the order of forward."""
        return tuple(self.modules_of())

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What is in no block, then the blocks in the order of forward."""
        return tuple(self.units_of())

    @cached_property
    def elements(self) -> int:
        """Of all parameters."""
        return count_elements(self.tensors)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(size.elements for size in self.tensors)


def count_elements(sizes: Sequence[EqualTensors]) -> int:
    """Return the elements of all tensors together."""
    return sum(size.elements * size.number for size in sizes)


def sum_bytes(terms: Terms) -> int:
    """Return what all terms take together."""
    return sum(terms.values())


class SegmentBytes(NamedTuple):
    """Bytes beside the activations while each segment runs, in one pass."""

    gradients: Array
    buckets: Array
    gathered: Array


class BackwardWork(NamedTuple):
    """What of the segments an engine's backward depends on, on one rank."""

    working: Array  # bytes that a segment's backward needs beside what was saved up to here
    standing: Array  # of them, those that live between two operations as well
    parameters: Array  # elements whose gradients are complete afterwards
    largest: Array  # elements of the largest of them
    transposed: Array  # elements of a gradient that is not added to in its place, as torch's own linear makes it


class EngineMemory(Protocol):
    """An engine's part of the memory of the rank that needs most of it, in bytes. Names of terms: weights, master
    weights, optimizer moments, gradients, buckets, gathered layers, working memory, and what else the engine has."""

    def resident(self) -> Terms:
        """Return what lives between two steps, without gradients of earlier micro-steps and without buckets."""
        ...

    def kept_buckets(self) -> int:
        """Return the bytes of buckets that stay between two steps."""
        ...

    def initialisation(self, thrown_away: int) -> Terms:
        """Return what lives at the peak of building model and engine; `thrown_away` elements are built for nothing."""
        ...

    def forward(self, segments: int) -> SegmentBytes:
        """Return what lives beside the activations of the last micro-step's forward."""
        ...

    def backward(self, work: BackwardWork) -> SegmentBytes:
        """Return what lives beside the activations of its backward, the segments' own gradients included."""
        ...

    def after_backward(self) -> int:
        """Return the bytes of buckets at the end of backward, when the activations are gone."""
        ...

    def update(self) -> Terms:
        """Return what lives at the peak of the optimizer's step, without `kept_buckets`."""
        ...

    def host(self) -> dict[str, ByteRange] | None:
        """Return what one rank keeps in its node's memory in place of its GPU's; None where that is unknown."""
        ...


StepPass = Literal["forward", "backward", "update"]


class Transfer(NamedTuple):
    """Collectives of one kind in one pass; `passes` of them in a step."""

    kind: CollectiveKind
    when: StepPass
    payload_bytes: int  # of one pass, all its calls together, as nccl-tests counts it
    calls: int  # in one pass
    passes: int  # micro-steps in which it happens
    overlaps: bool  # runs while the pass computes; else the pass waits
    ranks: int  # that take part
    alone_bytes: int = 0  # of the first gather or the last reduction, beside which nothing computes; 0: as any other
    nodes: int | None = None  # on which the ranks are; None: they are neighbours, on as few as can be
    at_once: int = 1  # so many of these, each of other ranks of a node, share the links between nodes


class EngineStep(NamedTuple):
    """What an engine adds to the passes of an optimizer step, on one rank."""

    updated: int  # elements that AdamW updates, padding included
    transfers: list[Transfer]  # none where the rank is alone


Counts = tuple[int, ...]
"""One number for each stage of a rank, in the order of forward."""


class StageMoment(NamedTuple):
    """A pass of a stage, or the reduction of its gradients, and what its rank holds beside it. States are counted as
    the sets that go between two stages for one micro-batch."""

    kind: Literal["forward", "backward", "reduce"]
    stage: int
    kept: Counts  # passes without their backward, this one not counted
    waiting: int  # states that came for passes which are still to be made
    gradients: int  # gradients that came, those of this pass among them
    leaving: int  # states and gradients on their way to other ranks
    whole: Counts  # 1: weights are gathered
    unreduced: Counts  # 1: gradients are whole
    reduced: Counts  # 1: this rank's part of the gradients waits for the update


class StageBytes(NamedTuple):
    """What comes and goes for one stage whose parameters are divided among copies, in bytes; 0 where they are not."""

    whole: int = 0  # its weights, while they are gathered
    unreduced: int = 0  # its gradients, from its first backward to their reduction
    reduced: int = 0  # this rank's part of them, from there to the update
    reducing: int = 0  # what the reduction needs beside both


class PlaceCosts(NamedTuple):
    """An engine's part of the costs of the ranks in one place of a pipeline. Terms as `EngineMemory` has them."""

    stages: tuple[int, ...]
    list_moments: Callable[[], tuple[StageMoment, ...]]  # when most lives: long to list, and no part of a step's time
    resident: Terms  # between two steps
    initialisation: Terms  # at the peak of building stages and engine
    update: Terms  # at the peak of the optimizer's step
    by_stage: tuple[StageBytes, ...]
    step: EngineStep  # whose transfers are those of all micro-batches together, so that `passes` is 1


class Play(Protocol):
    """Plays a schedule through."""

    def __call__(
        self, forward_s: Sequence[float], backward_s: Sequence[float], hop: Callable[[int, int], float]
    ) -> tuple[float, ...]:
        """Return by place when its last pass ends, counted from the begin of the first one of all: from the seconds of
        each stage for one micro-batch, and those of a transfer from one place to another, beside which both compute."""
        ...


class PlayedPass(NamedTuple):
    """A forward or backward of a stage for one micro-batch, in seconds from the begin of the first one of all."""

    kind: StepPass
    stage: int
    place: int
    begin_s: float
    end_s: float
    sent_s: float | None  # since when what it takes up is on its way from another place; None: it is there already


class PipelineCosts(NamedTuple):
    """What a model costs whose stages are on several ranks."""

    parts: tuple[Part, ...]  # by stage
    places: tuple[PlaceCosts, ...]
    play: Play
    list_passes: Callable[[Sequence[float], Sequence[float], Callable[[int, int], float]], Sequence[PlayedPass]]
    """Plays a schedule as `play` does, all of it, and says when each pass is made."""
