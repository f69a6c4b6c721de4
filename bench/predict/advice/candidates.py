"""Configurations to compare: engines, nodes, layouts of the ranks that the engine supports, micro-batches,
accumulations and checkpointing, as far as they fit into memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import Batch, Device, Parallel, RunSpec
from bench.predict.memory import LARGEST_MICRO_BATCH, MemoryPrediction, predict_memory
from bench.predict.workload import get_network

STAGES = (1, 2, 4)
"""Stages per rank that are tried for pipelines of several ranks. With one rank it is one stage for each block, which is
layered gradient accumulation."""
ENOUGH = 2
"""Layouts whose copies have more than this multiple of the ranks of the smallest copy that fits are not searched,
unless the user names them: they only compute smaller portions, and wait more."""
MOST_MICRO_BATCHES = 128
"""Largest accumulation of a step with pipeline stages. Larger micro-batches, or more copies, have the same effect, and
are searched."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Node counts of the search by default."""


class LayoutAxes(NamedTuple):
    """Layouts to search. None: powers of two, with tensor-parallel ranks inside a node."""

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None


class Axes(NamedTuple):
    """Limits of the search. None: micro-batches are powers of two, the numbers halfway between them, and the largest
    that fits; accumulations double up to the largest global batch, and without such a limit there is none."""

    nodes: tuple[int, ...] = NODES
    checkpointing: tuple[bool, ...] = (False, True)
    micro: tuple[int, ...] | None = None
    accumulation: tuple[int, ...] | None = None
    global_batch: int | None = None  # samples per optimizer step, exactly
    max_global_batch: int | None = None  # samples per optimizer step, at most
    layouts: LayoutAxes = LayoutAxes()

    @property
    def most_samples(self) -> int:
        """Largest global batch that the limits allow."""
        return min([limit for limit in (self.global_batch, self.max_global_batch) if limit], default=2**62)


class DeviceLimits(NamedTuple):
    """The memory that a point must fit into."""

    bytes: int  # of one device
    device: Device
    seen: Callable[[RunSpec], bool | None] = lambda spec: None  # whether a measured run fitted; None: never tried


class Candidate(NamedTuple):
    """A point and its predicted memory."""

    spec: RunSpec
    memory: MemoryPrediction
    fits: bool | None  # None: perhaps


class Shortage(NamedTuple):
    """A point that does not fit, and the least bytes that are lacking; 0 or less if a measured run showed it."""

    spec: RunSpec
    bytes: int


class CandidateSearch(NamedTuple):
    """Result of a search."""

    candidates: list[Candidate]
    short: list[Shortage]  # of each engine, node count and checkpointing without a candidate
    undivided: list[RunSpec]  # points whose ranks cannot divide the global batch


def list_layouts(spec: RunSpec, axes: LayoutAxes, device: Device) -> list[Parallel]:
    """Return the layouts of `spec` that its engine supports, the smallest copies first; only its own layout for an
    engine without layouts."""
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
    """Return the possible layouts of so many ranks: with one stage on each rank, and with the most that are tried,
    since more stages on a rank shorten its waits."""
    stages_tried = axes.stages_per_rank
    if stages_tried is None:
        blocks = sum(stack.layers for stack in get_network(spec).stacks)
        stages_tried = STAGES if pipeline > 1 else (1, blocks) if blocks > 1 else (1,)
    layouts = [
        spec.parallel.model_copy(update={"tensor": tensor, "pipeline": pipeline, "stages_per_rank": stages})
        for stages in stages_tried
    ]
    possible = [layout for layout in layouts if can_run(apply_layout(spec, layout), device)]
    if axes.stages_per_rank:
        return possible
    return [layout for layout in possible if layout.stages_per_rank in (1, possible[-1].stages_per_rank)]


def apply_layout(spec: RunSpec, layout: Parallel) -> RunSpec:
    """Return `spec` with a layout, and with as many micro-batches in a step as a copy has ranks: so every layout has
    the same samples per device."""
    placed = spec.model_copy(update={"parallel": layout})
    return _with_batch(placed, spec.batch.micro, layout.ranks)


def _with_batch(spec: RunSpec, micro: int, accumulation: int) -> RunSpec:
    total = micro * accumulation * spec.data_parallel
    return spec.model_copy(update={"batch": Batch(micro=micro, accumulation=accumulation, global_=total)})


def can_run(spec: RunSpec, device: Device) -> bool:
    """Return whether a spec breaks no rule of its engine."""
    plugin = engines.load(spec.engine.backend)
    try:
        plugin.check(plugin.Options.model_validate(spec.engine.options), spec, device)
        engines.check_layout(spec)
        if cut := engines.facts(spec).cut:
            cut(spec, get_network(spec))
    except UserError:
        return False
    return True


def list_doublings(largest: int) -> Iterator[int]:
    """Yield the powers of two up to `largest`."""
    number = 1
    while number <= largest:
        yield number
        number *= 2


def list_micro_batches(largest: int) -> Iterator[int]:
    """Yield the powers of two up to `largest`, and the numbers halfway between them."""
    for number in list_doublings(largest):
        yield number
        if number > 1 and number + number // 2 <= largest:
            yield number + number // 2


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
    """Add the candidates that differ in layout and batch."""
    smallest = 0  # ranks of the smallest copy that fits
    times = ENOUGH if len(axes.nodes) == 1 else 1  # with many node counts the search has to be quick
    for layout in list_layouts(start, axes.layouts, room.device):
        if smallest and layout.ranks > times * smallest and axes.layouts == LayoutAxes():
            break
        before = len(found.candidates)
        _add_along_micro(start.model_copy(update={"parallel": layout}), axes, room, found)
        if len(found.candidates) > before:
            smallest = smallest or layout.ranks


def _add_along_micro(start: RunSpec, axes: Axes, room: DeviceLimits, found: CandidateSearch) -> None:
    """Add the candidates that differ only in their batch. Memory grows with the micro-batch: the search ends at the
    first that does not fit, and the largest that surely fits lies between two that were tried."""
    before, smallest, sure, unsure = len(found.candidates), None, 0, 0
    # the largest global batch bounds the micro-batch as well
    largest = min(LARGEST_MICRO_BATCH, axes.most_samples // start.data_parallel)
    for micro in axes.micro or list_micro_batches(largest):
        tried = _list_with_micro(start, micro, axes, room)
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
    # a user's list of micro-batches is kept as it is
    if not axes.micro and sure + 1 < unsure:
        found.candidates.extend(_find_largest(start, sure, unsure, axes, room))
    if len(found.candidates) > before:
        return
    if smallest:
        found.short.append(Shortage(smallest.spec, smallest.memory.device[0] - room.bytes))
    else:
        found.undivided.append(start)


def _find_largest(start: RunSpec, sure: int, unsure: int, axes: Axes, room: DeviceLimits) -> list[Candidate]:
    """Return the candidates with the largest micro-batch between `sure` and `unsure` that surely fits, if any. A
    micro-batch without an allowed global batch counts as too large."""
    best: list[Candidate] = []
    while unsure - sure > 1:
        middle = (sure + unsure) // 2
        tried = _list_with_micro(start, middle, axes, room)
        if tried and all(candidate.fits for candidate in tried):
            best, sure = tried, middle
        else:
            unsure = middle
    return best


def _list_with_micro(start: RunSpec, micro: int, axes: Axes, room: DeviceLimits) -> list[Candidate]:
    """Return the points with this micro-batch and an allowed global batch. Without a limit, accumulation equals the
    ranks of a copy: so all layouts have the same samples per device."""
    samples = micro * start.data_parallel  # of all ranks in a micro-step
    most = axes.most_samples // samples
    if axes.accumulation:
        tried = list(axes.accumulation)
    elif axes.global_batch:
        tried = [most]
    else:
        tried = sorted({*list_doublings(most), most}) if axes.max_global_batch else [start.parallel.ranks]
    specs = [
        _with_batch(start, micro, number)
        for number in tried
        if 0 < number <= most and axes.global_batch in (None, number * samples)
    ]
    if start.parallel != Parallel():
        # several micro-batches pass through the stages of a rank, and not more than are searched
        fewest = 2 if start.parallel.stages_per_rank > 1 else 1
        specs = [s for s in specs if fewest <= s.accumulation <= MOST_MICRO_BATCHES and can_run(s, room.device)]
    found = []
    for spec in specs:
        needed, seen = predict_memory(spec, room.device, room.bytes), room.seen(spec)
        found.append(Candidate(spec, needed, needed.fits(room.bytes) if seen is None else seen))
    return found
