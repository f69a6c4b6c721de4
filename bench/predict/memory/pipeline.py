"""Memory of the ranks of a pipeline, place by place: at each moment of the very schedule that runs, what the stages'
passes keep, what waits between stages, and what the engine has beside both."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.engine_costs import PipelineCosts, PlaceCosts, StageMoment, Terms
from bench.predict.memory.activations import INDEX
from bench.predict.memory.stages import (
    PassPeak,
    StagePass,
    TensorSlices,
    count_passed_bytes,
    count_state_bytes,
    measure_stage,
)
from bench.predict.parts import list_alike
from bench.predict.workload import Workload
from bench.spec import RunSpec
from bench.stacks import Stacks


class PlacePhases(NamedTuple):
    """What lives on the ranks of one place: bytes by term at the peak of each phase, and between two steps."""

    initialisation: Terms
    forward: Terms
    backward: Terms
    update: Terms
    resident: Terms


def list_place_phases(spec: RunSpec, network: Stacks, load: Workload, costs: PipelineCosts) -> list[PlacePhases]:
    """Return the memory of every place."""
    slices = TensorSlices(spec.parallel.tensor, spec.parallel.sequence)
    states = count_state_bytes(network, load, slices)
    # inputs and labels of all micro-batches, which every rank takes as it needs them
    tokens = sum(length for _, length in load.lengths) * (1 + (len(load.lengths) == 1))
    samples = INDEX * load.micro * spec.accumulation * tokens
    alike = list_alike(network, costs.parts)
    measured = {number: measure_stage(network, load, costs.parts[number], slices) for number in dict.fromkeys(alike)}
    stages = [measured[number] for number in alike]
    if len(costs.places) == 1:  # what a stage hands on as it came is the same tensor
        stages = [
            one._replace(takes=one.takes - count_passed_bytes(network, load, before, slices)) if number else one
            for number, (one, before) in enumerate(zip(stages, (costs.parts[0], *costs.parts), strict=False))
        ]
    return [_find_phases(place, [stages[number] for number in place.stages], states, samples) for place in costs.places]


def _find_phases(place: PlaceCosts, passes: list[StagePass], states: int, samples: int) -> PlacePhases:
    """Return the phases of a place, forward and backward each at the moment when most lives."""
    moments = place.list_moments()
    counts = _count_what_lives(moments, place.stages)
    totals = counts.of_each @ np.array(_list_sizes(place, passes, states), np.float64)
    forward_terms, backward_terms = (
        _build_terms(place, passes, moments[at[int(np.argmax(totals[at]))]], states) | {"micro-batches": samples}
        for at in (counts.forwards, counts.others)
    )
    return PlacePhases(place.initialisation, forward_terms, backward_terms, place.update, place.resident)


class MomentCounts(NamedTuple):
    """How many of what lives at each moment of a place."""

    of_each: NDArray[np.float64]  # a row for each moment, a column for each of `_list_sizes`
    forwards: NDArray[np.int64]  # rows of forwards
    others: NDArray[np.int64]


@functools.lru_cache(maxsize=4096)  # points of a sweep that differ in their model or micro-batch share it
def _count_what_lives(moments: tuple[StageMoment, ...], stages: tuple[int, ...]) -> MomentCounts:
    made = [(kind, stage) for kind in ("forward", "backward", "reduce") for stage in stages]
    rows = [
        (one.waiting + one.gradients + one.leaving, *one.kept, *one.whole, *one.unreduced, *one.reduced,
         *((one.kind, one.stage) == other for other in made))
        for one in moments
    ]  # fmt: skip
    forward = np.array([one.kind == "forward" for one in moments])
    return MomentCounts(np.array(rows, np.float64), np.flatnonzero(forward), np.flatnonzero(~forward))


def _list_sizes(place: PlaceCosts, passes: list[StagePass], states: int) -> list[int]:
    """Return the bytes of one of each that lives at a moment beside what does between steps: with their numbers the sum
    of `_build_terms`, for many moments."""
    return [
        states,
        *(one.kept + one.takes for one in passes),
        *(one.whole for one in place.by_stage),
        *(one.unreduced for one in place.by_stage),
        *(one.reduced for one in place.by_stage),
        *(one.takes + one.forward.total for one in passes),
        *(one.takes + one.backward.total for one in passes),
        *(one.reducing for one in place.by_stage),
    ]


def _build_terms(place: PlaceCosts, passes: list[StagePass], moment: StageMoment, states: int) -> Terms:
    at = place.stages.index(moment.stage)
    own, taken = _choose_peak(passes[at], moment), passes[at].takes * (moment.kind != "reduce")
    kept = sum(count * one.kept for count, one in zip(moment.kept, passes, strict=True))
    came = sum(count * one.takes for count, one in zip(moment.kept, passes, strict=True))
    wait = states * (moment.waiting + moment.gradients + moment.leaving)
    gathered, gradients = _sum_divided(place, moment)
    reducing = place.by_stage[at].reducing if moment.kind == "reduce" else 0
    standing = place.resident
    return standing | {
        "gradients": standing.get("gradients", 0) + gradients + own.gradients,
        "gathered layers": gathered,
        "activations": kept + own.activations,
        "states between stages": came + taken + wait,
        "logits and loss": own.logits,
        "working memory": own.working + reducing,
    }


def _choose_peak(one: StagePass, moment: StageMoment) -> PassPeak:
    """Return what a pass needs at a moment; a reduction has none."""
    if moment.kind == "reduce":
        return PassPeak(0, 0, 0)
    return one.forward if moment.kind == "forward" else one.backward


def _sum_divided(place: PlaceCosts, moment: StageMoment) -> tuple[int, int]:
    """Return the bytes of gathered weights, and of gradients whole or reduced."""
    if not any(one.whole for one in place.by_stage):
        return 0, 0
    each = list(zip(place.by_stage, moment.whole, moment.unreduced, moment.reduced, strict=True))
    gathered = sum(one.whole * whole for one, whole, _, _ in each)
    return gathered, sum(one.unreduced * there + one.reduced * done for one, _, there, done in each)
