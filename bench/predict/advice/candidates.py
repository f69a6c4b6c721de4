"""Search for candidates for the advice: configurations that fit into memory. They differ in engine, nodes, layout of
the ranks, micro-batch, accumulation and activation checkpointing."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import Device, Parallel, RunSpec
from bench.predict.memory import LARGEST_MICRO_BATCH, MemoryPrediction, predict_memory
from bench.predict.workload import get_network, with_batch

STAGES = (1, 2, 4)
"""Numbers of stages per rank that the search tries if a pipeline has several ranks. If it has one rank, the search
tries a single stage, and one stage per block (layered gradient accumulation)."""
ENOUGH = 2
"""Limit of the search: a model copy may have at most this many times as many ranks as the smallest copy that surely
fits. The limit is useful because in a larger copy, each rank computes a smaller portion and waits longer. Layouts that
the user names are not limited."""
MOST_MICRO_BATCHES = 128
"""Largest number of accumulated micro-batches that the search tries in a step with pipeline stages. A larger global
batch is still reached, since the search also tries larger micro-batches and more model copies. An accumulation that the
user names is not limited."""
MOST_NAMED_MICRO_BATCHES = 2048
"""Like MOST_MICRO_BATCHES, if the user names the numbers of tensor-parallel and of pipeline ranks. More are then
possible, because few configurations are predicted."""
UNLIMITED = 2**62
"""Largest global batch, in samples, if nothing limits it."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Node counts that the search tries by default."""


class LayoutAxes(NamedTuple):
    """Numbers of tensor-parallel ranks, of pipeline ranks and of stages per rank that the search tries. If a field with
    numbers of ranks is None, the search tries powers of two; tensor-parallel ranks then stay within a node. If the
    field with numbers of stages is None, the search tries the numbers in STAGES."""

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None


class Axes(NamedTuple):
    """Values and limits of the search.

    If `micro` is None, micro-batches are powers of two, the numbers halfway between them, and the largest number that
    fits.

    If `accumulation` is None, the limit on the global batch determines the accumulation. With `global_batch`, only the
    accumulation that gives this batch is tried. With `max_global_batch`, powers of two and the largest possible
    accumulation are tried. Without both limits, the accumulation is the number of ranks in a model copy.
    """

    nodes: tuple[int, ...] = NODES
    checkpointing: tuple[bool, ...] = (False, True)
    micro: tuple[int, ...] | None = None
    accumulation: tuple[int, ...] | None = None
    global_batch: int | None = None  # samples per optimizer step, exactly
    max_global_batch: int | None = None  # samples per optimizer step, at most
    pass_samples: int | None = None  # samples of one pass over the training's data; no batch is larger
    layouts: LayoutAxes = LayoutAxes()

    @property
    def most_samples(self) -> int:
        """Largest global batch that the limits allow, in samples."""
        limits = (self.global_batch, self.max_global_batch, self.pass_samples)
        return min([limit for limit in limits if limit], default=UNLIMITED)


class DeviceLimits(NamedTuple):
    """Memory of the device that a configuration must fit into."""

    bytes: int  # memory of one device
    device: Device
    seen: Callable[[RunSpec], bool | None] = lambda spec: None  # True if a measured run fitted; None: never tried


class Candidate(NamedTuple):
    """A configuration with its predicted memory."""

    spec: RunSpec
    memory: MemoryPrediction
    fits: bool | None  # None: uncertain


class Shortage(NamedTuple):
    """A configuration that does not fit into device memory. `bytes` is a lower bound of the missing memory per device,
    computed from the low end of the prediction. If this low end fits, but a measured run ran out of memory, `bytes` is
    0 or negative."""

    spec: RunSpec
    bytes: int


class CandidateSearch(NamedTuple):
    """Result of a search: configurations that fit, configurations that do not fit, and configurations whose ranks
    cannot divide the global batch."""

    candidates: list[Candidate]
    short: list[Shortage]  # one for each combination of engine, node count and checkpointing without a candidate
    undivided: list[RunSpec]  # configurations whose ranks cannot divide the global batch


def list_layouts(spec: RunSpec, axes: LayoutAxes, device: Device) -> list[Parallel]:
    """Return the layouts that the engine of `spec` supports, those with the fewest ranks per model copy first. A layout
    consists of the numbers of tensor-parallel ranks, of pipeline ranks and of stages per rank. `axes` has the values to
    try for each of these numbers. For an engine that supports no layouts, return only the layout of `spec`."""
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
    """Return the layouts with these numbers of tensor-parallel and pipeline ranks that the engine can run.

    By default only two numbers of stages per rank are kept: one stage, and the largest number with which the engine can
    run. The largest number is kept because more stages on a rank shorten the rank's waits.
    """
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
    """Return `spec` with another layout. The accumulation is set to the number of ranks in a model copy, so that every
    layout has the same number of samples per device."""
    placed = spec.model_copy(update={"parallel": layout})
    return with_batch(placed, spec.batch.micro, layout.ranks)


def can_run(spec: RunSpec, device: Device) -> bool:
    """Return True if the engine of a spec can run the spec on this kind of device."""
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
    """Yield the powers of two up to `largest`, from 1."""
    number = 1
    while number <= largest:
        yield number
        number *= 2


def list_micro_batches(largest: int) -> Iterator[int]:
    """Yield the powers of two up to `largest`, and the numbers halfway between them: 1, 2, 3, 4, 6, 8, 12, …."""
    for number in list_doublings(largest):
        yield number
        if number > 1 and number + number // 2 <= largest:
            yield number + number // 2


def search_candidates(bases: Sequence[RunSpec], axes: Axes, room: DeviceLimits) -> CandidateSearch:
    """Return the candidates for all combinations of values of `axes`. `bases` has one spec for each engine, from which
    the candidates are derived."""
    found = CandidateSearch([], [], [])
    for base in bases:
        for nodes in axes.nodes:
            for checkpointing in axes.checkpointing:
                start = base.model_copy(update={"nodes": nodes, "activation_checkpointing": checkpointing})
                _add_along_layouts(start, axes, room, found)
    return found


def _add_along_layouts(start: RunSpec, axes: Axes, room: DeviceLimits, found: CandidateSearch) -> None:
    """Add the candidates that differ from `start` in layout and batch to `found`."""
    smallest = 0  # ranks of the smallest model copy that surely fits
    # with several node counts, fewer layouts are tried to keep the search fast
    times = ENOUGH if len(axes.nodes) == 1 else 1
    for layout in list_layouts(start, axes.layouts, room.device):
        if smallest and layout.ranks > times * smallest and axes.layouts == LayoutAxes():
            break
        before = len(found.candidates)
        _add_along_micro(start.model_copy(update={"parallel": layout}), axes, room, found)
        if any(candidate.fits for candidate in found.candidates[before:]):
            smallest = smallest or layout.ranks


def _add_along_micro(start: RunSpec, axes: Axes, room: DeviceLimits, found: CandidateSearch) -> None:
    """Add the candidates that differ from `start` only in their batch to `found`.

    Memory grows with the micro-batch, so the search ends at the first micro-batch that does not fit. The largest
    micro-batch that surely fits lies between two micro-batches that were tried, and is found by bisection.
    """
    before, smallest, sure, unsure = len(found.candidates), None, 0, 0
    # the largest global batch limits the micro-batch as well
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
    # no micro-batch is added to a user's list
    if not axes.micro and sure + 1 < unsure:
        found.candidates.extend(_find_largest(start, sure, unsure, axes, room))
    if len(found.candidates) > before:
        return
    if smallest:
        found.short.append(Shortage(smallest.spec, smallest.memory.device[0] - room.bytes))
    else:
        found.undivided.append(start)


def _find_largest(start: RunSpec, sure: int, unsure: int, axes: Axes, room: DeviceLimits) -> list[Candidate]:
    """Return the candidates with the largest micro-batch that surely fits. The micro-batch is searched between `sure`,
    which surely fits, and the larger `unsure`, which may not fit. The result is empty if no micro-batch above `sure`
    surely fits. The candidates differ from `start` only in the batch. A micro-batch that allows no valid global batch
    counts as too large."""
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
    """Return the candidates with this micro-batch and an allowed global batch. Without a limit on the global batch,
    accumulation equals the number of ranks in a model copy, so that all layouts have the same number of samples per
    device."""
    samples = micro * start.data_parallel  # samples of all ranks in a micro-step
    most = axes.most_samples // samples
    if axes.accumulation:
        tried = list(axes.accumulation)
    elif axes.global_batch:
        tried = [most]
    else:
        tried = sorted({*list_doublings(most), most}) if axes.max_global_batch else [start.parallel.ranks]
    specs = [
        with_batch(start, micro, number)
        for number in tried
        if 0 < number <= most and axes.global_batch in (None, number * samples)
    ]
    if start.parallel != Parallel():
        # a rank with several stages needs at least two micro-batches
        fewest = 2 if start.parallel.stages_per_rank > 1 else 1
        most = MOST_NAMED_MICRO_BATCHES if axes.layouts.tensor and axes.layouts.pipeline else MOST_MICRO_BATCHES
        most = UNLIMITED if axes.accumulation else most
        specs = [s for s in specs if fewest <= s.accumulation <= most and can_run(s, room.device)]
    found = []
    for spec in specs:
        needed, seen = predict_memory(spec, room.device, room.bytes), room.seen(spec)
        found.append(Candidate(spec, needed, needed.fits(room.bytes) if seen is None else seen))
    return found
