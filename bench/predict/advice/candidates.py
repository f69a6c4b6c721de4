"""Which configurations are tried: engines, nodes, layouts of the ranks that the engine supports, micro-batches,
accumulations and checkpointing that fit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import Batch, Device, Parallel, RunSpec
from bench.predict.memory import LARGEST_MICRO_BATCH, MemoryPrediction, predict_memory
from bench.predict.workload import get_network

STAGES = (1, 2, 4)
"""Stages on a rank that are tried where there are several ranks in a pipeline; where there is one: a stage for each
block, which is layered gradient accumulation."""
ENOUGH = 2
"""Layouts whose copies have more than so many times the ranks of the smallest that fits are not looked at, unless they
are named: they only compute in smaller portions, and wait more."""


MOST_MICRO_BATCHES = 128
"""Of a step that goes through stages: a larger micro-batch, or more copies, come to the same, and are looked at."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Node counts that are looked at where none is given."""


class LayoutAxes(NamedTuple):
    """What is tried. None: powers of two, tensor-parallel ranks inside of a node."""

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None


def list_layouts(spec: RunSpec, axes: LayoutAxes, device: Device) -> list[Parallel]:
    """Return the layouts of `spec` that its engine can do, the smallest copies first; its own alone where the engine
    knows no other."""
    able = engines.facts(spec).layouts
    if not {"tensor", "pipeline"} & able:
        return [spec.parallel]
    tensors = axes.tensor or tuple(list_doublings(spec.devices_per_node)) if "tensor" in able else (1,)
    pipelines = axes.pipeline or tuple(list_doublings(spec.world_size)) if "pipeline" in able else (1,)
    possible = [
        layout
        for tensor in tensors
        for pipeline in pipelines
        if spec.world_size % (tensor * pipeline) == 0 and (tensor > 1 or not spec.parallel.sequence)
        for layout in _list_possible(spec, tensor, pipeline, axes, device)
    ]
    return sorted(possible, key=lambda layout: layout.ranks)


def _list_possible(spec: RunSpec, tensor: int, pipeline: int, axes: LayoutAxes, device: Device) -> list[Parallel]:
    """Return those that can be of as many ranks: with one stage on each, and with as many as are tried, for more of
    them shorten the wait for others."""
    found = [
        spec.parallel.model_copy(update={"tensor": tensor, "pipeline": pipeline, "stages_per_rank": stages})
        for stages in _list_stages(spec, axes, pipeline)
    ]
    possible = [layout for layout in found if can_run(apply_layout(spec, layout), device)]
    if axes.stages_per_rank:
        return possible
    return [layout for layout in possible if layout.stages_per_rank in (1, possible[-1].stages_per_rank)]


def apply_layout(spec: RunSpec, layout: Parallel) -> RunSpec:
    """Return `spec` with a layout, and as many samples for each of its ranks as there are in a micro-batch."""
    placed = spec.model_copy(update={"parallel": layout})
    micro, accumulation = spec.batch.micro, layout.ranks
    batch = Batch(micro=micro, accumulation=accumulation, global_=micro * accumulation * placed.data_parallel)
    return placed.model_copy(update={"batch": batch})


def can_run(spec: RunSpec, device: Device) -> bool:
    """Whether nothing of an engine's rules stands against a spec."""
    plugin = engines.load(spec.engine.backend)
    try:
        plugin.check(plugin.Options.model_validate(spec.engine.options), spec, device)
        engines.check_layout(spec)
        if cut := engines.facts(spec).cut:
            cut(spec, get_network(spec))
    except UserError:
        return False
    return True


def is_worthwhile(spec: RunSpec) -> bool:
    """Whether several micro-batches go through several stages of a rank, and not more than are looked at."""
    layered = spec.parallel.stages_per_rank > 1 and spec.accumulation == 1
    return not layered and spec.accumulation <= MOST_MICRO_BATCHES


def list_doublings(largest: int) -> Iterator[int]:
    number = 1
    while number <= largest:
        yield number
        number *= 2


def _list_stages(spec: RunSpec, axes: LayoutAxes, pipeline: int) -> tuple[int, ...]:
    if axes.stages_per_rank:
        return axes.stages_per_rank
    if pipeline > 1:
        return STAGES
    blocks = sum(stack.layers for stack in get_network(spec).stacks)
    return (1, blocks) if blocks > 1 else (1,)


class Axes(NamedTuple):
    """Limits of the candidates. None: micro-batches are powers of two, the numbers in their middles, and the largest
    that fits; accumulations double up to the largest global batch, and without such a batch there is none."""

    nodes: tuple[int, ...] = NODES
    checkpointing: tuple[bool, ...] = (False, True)
    micro: tuple[int, ...] | None = None
    accumulation: tuple[int, ...] | None = None
    global_batch: int | None = None  # samples per optimizer step, exactly
    max_global_batch: int | None = None  # samples per optimizer step, at most
    layouts: LayoutAxes = LayoutAxes()


class DeviceLimits(NamedTuple):
    """What a point must fit into."""

    bytes: int  # of one device
    device: Device
    seen: Callable[[RunSpec], bool | None] = lambda spec: None  # whether a point was measured to fit; None: not tried


class Candidate(NamedTuple):
    """A point, and what it needs of a device."""

    spec: RunSpec
    memory: MemoryPrediction
    fits: bool | None  # None: perhaps


class Shortage(NamedTuple):
    """A point that does not fit, and by how many bytes at least; 0 or less where a measured run says so."""

    spec: RunSpec
    bytes: int


class CandidateSearch(NamedTuple):
    """What was looked at."""

    candidates: list[Candidate]
    short: list[Shortage]  # of each engine, node count and checkpointing without a candidate
    undivided: list[RunSpec]  # among whose ranks no global batch that is asked for can be divided


def search_candidates(bases: Sequence[RunSpec], axes: Axes, room: DeviceLimits) -> CandidateSearch:
    """Return the candidates along `axes` from `bases`, one for each engine."""
    found = CandidateSearch([], [], [])
    for base in bases:
        for nodes in axes.nodes:
            for checkpointing in axes.checkpointing:
                start = base.model_copy(update={"nodes": nodes, "activation_checkpointing": checkpointing})
                _add_along_layouts(start, axes, room, found)
    return found


def _add_along_layouts(start: RunSpec, axes: Axes, room: DeviceLimits, found: CandidateSearch) -> None:
    """Add the candidates that differ in how ranks share a copy, and in their batch."""
    smallest = 0  # ranks of a copy of which something fits
    times = ENOUGH if len(axes.nodes) == 1 else 1  # to be quick where many node counts are looked at
    for layout in list_layouts(start, axes.layouts, room.device):
        if smallest and layout.ranks > times * smallest and axes.layouts == LayoutAxes():
            break
        before = len(found.candidates)
        _add_along_micro(start.model_copy(update={"parallel": layout}), axes, room, found)
        if len(found.candidates) > before:
            smallest = smallest or layout.ranks


def _add_along_micro(start: RunSpec, axes: Axes, room: DeviceLimits, found: CandidateSearch) -> None:
    """Add the candidates that differ in their batch alone. Memory grows with the micro-batch: the first that does not
    fit is the last to be looked at, and the largest that surely fits lies between two that were."""
    before, smallest, sure, unsure = len(found.candidates), None, 0, 0
    largest = min(LARGEST_MICRO_BATCH, _find_max_samples(axes) // start.data_parallel)
    for micro in axes.micro or list_micro_batches(largest):
        tried = [_build_candidate(spec, room) for spec in _list_along_accumulation(start, micro, axes, room.device)]
        fitting = [candidate for candidate in tried if candidate.fits is not False]
        found.candidates.extend(fitting)
        if tried and all(candidate.fits for candidate in tried):
            sure = micro
        elif tried:
            unsure = unsure or micro
        if tried and not fitting:
            smallest = smallest or tried[0]
            if not axes.micro:
                break
    if not axes.micro and sure + 1 < unsure:
        found.candidates.extend(_find_largest(start, sure, unsure, axes, room))
    if len(found.candidates) > before:
        return
    if smallest:
        found.short.append(Shortage(smallest.spec, smallest.memory.device[0] - room.bytes))
    else:
        found.undivided.append(start)


def _find_largest(start: RunSpec, sure: int, unsure: int, axes: Axes, room: DeviceLimits) -> list[Candidate]:
    """Return the candidates with the largest micro-batch above `sure` and below `unsure` that surely fits, if any. One
    whose global batch is not asked for counts as too large."""
    best: list[Candidate] = []
    while unsure - sure > 1:
        middle = (sure + unsure) // 2
        tried = [_build_candidate(spec, room) for spec in _list_along_accumulation(start, middle, axes, room.device)]
        if tried and all(candidate.fits for candidate in tried):
            best, sure = tried, middle
        else:
            unsure = middle
    return best


def list_micro_batches(largest: int) -> Iterator[int]:
    """Yield the powers of two up to `largest`, and the numbers in the middle between two of them."""
    for number in list_doublings(largest):
        yield number
        if number > 1 and number + number // 2 <= largest:
            yield number + number // 2


def _build_candidate(spec: RunSpec, room: DeviceLimits) -> Candidate:
    needed, seen = predict_memory(spec, room.device, room.bytes), room.seen(spec)
    return Candidate(spec, needed, needed.fits(room.bytes) if seen is None else seen)


def _find_max_samples(axes: Axes) -> int:
    """Return the largest global batch that is asked for."""
    limits = [limit for limit in (axes.global_batch, axes.max_global_batch) if limit]
    return min(limits, default=2**62)


def _list_along_accumulation(start: RunSpec, micro: int, axes: Axes, device: Device) -> list[RunSpec]:
    """Return the points with this micro-batch whose global batch may be. Where nothing is said of it, each rank of a
    copy stands for a micro-batch: so all layouts have as many samples for each device."""
    samples = micro * start.data_parallel  # of all ranks in a micro-step
    max_accumulation = _find_max_samples(axes) // samples
    if axes.accumulation:
        tried = list(axes.accumulation)
    elif axes.global_batch:
        tried = [max_accumulation]
    else:
        tried = (
            sorted({*list_doublings(max_accumulation), max_accumulation})
            if axes.max_global_batch
            else [start.parallel.ranks]
        )
    sizes = [(number, number * samples) for number in tried if 0 < number <= max_accumulation]
    found = [
        start.model_copy(update={"batch": Batch(micro=micro, accumulation=number, global_=total)})
        for number, total in sizes
        if axes.global_batch in (None, total)
    ]
    if start.parallel == Parallel():
        return found
    return [spec for spec in found if is_worthwhile(spec) and can_run(spec, device)]
