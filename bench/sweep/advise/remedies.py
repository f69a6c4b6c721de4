"""Find changes that make a point (configuration) fit into memory. For each change, the memory of the changed point is
predicted."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import engines, launchers
from bench.config import compose
from bench.config.decode import Request, check_rank
from bench.core.errors import UserError
from bench.core.files import find_group_files
from bench.core.formatting import describe_adapter, describe_choice, format_count
from bench.core.spec import Device, Parallel, RunSpec
from bench.core.study import Pair
from bench.predict.advice.candidates import UNLIMITED, Axes, CandidateSearch, DeviceLimits, Shortage
from bench.predict.memory import find_largest_micro_batch, format_gigabytes, predict_host_memory, predict_memory
from bench.sweep.advise.questions import AdviceQuery

Change = tuple[Pair, ...]
FUSED: Change = (("optimizer.implementation", "fused"),)
_OPTIMIZER: Change = (("engine.offload_optimizer.device", "cpu"), ("optimizer.implementation", "native"))
OFFLOAD: tuple[Change, ...] = (_OPTIMIZER, (*_OPTIMIZER, ("engine.offload_param.device", "cpu")))
"""Changes that move model states to the host's memory. Step times are not predicted for points with these changes."""
_CHECKPOINTED: Change = (("activation_checkpointing", True),)
_MOST_NODES = 1024
"""Largest node count that is tried for a point that does not fit."""
NO_REMEDY = f"nothing that was tried: micro-batch 1, checkpointing, {_MOST_NODES:,} nodes, other engines, offload"
_SMALLER = "more nodes, a smaller model, or shorter sequences"
_SEARCHED = ("nodes", "parallel", "batch", "activation_checkpointing")


class Rejected(NamedTuple):
    """A candidate, or a group of candidates, that a search has excluded, and the reason."""

    what: str
    why: str


SEVERAL_NODES = "several nodes"
"""Value of `Rejected.what` that stands for all node counts above 1."""
Remedy = Callable[[Sequence[Shortage]], str]
"""Function that returns a text with a change that makes one of several points fit. The text is empty if no change
does."""


# -- remedies for a predicted point


def list_remedies(request: Request, overrides: Sequence[Pair], config_dir: Path | None, device: Device) -> list[str]:
    """Return texts with changes after which a point fits, or may fit, into memory. Without a change, the point does not
    fit.

    These kinds of change are tried: a smaller micro-batch, checkpointing, more nodes, an engine that divides more of
    the model states among ranks, a fused optimizer, and offload to the host. Each text has the smallest sufficient
    change of one kind. If no single change is sufficient, combinations are tried.

    `overrides` are the overrides that define the point. A call takes up to a hundred predictions of memory.
    """
    spec, room = request.spec, request.machine.memory_bytes
    if room is None:
        return []
    compose_changed = functools.partial(_compose_changed, overrides, config_dir, device)

    def find_smallest(kinds: Iterable[Sequence[Change]]) -> Iterator[str]:
        for changes in kinds:
            for change in changes:
                changed = compose_changed(change)
                if changed and (fits := _describe_fit(changed, change, device)):
                    yield f"{_format_change(change)} {fits}"
                    break

    micro = find_largest_micro_batch(spec, room, device)
    smaller = [f"batch.micro={micro.surely or micro.perhaps} {'fits' if micro.surely else 'may fit'}"]
    counts = itertools.takewhile(lambda nodes: nodes <= _MOST_NODES, (spec.nodes << n for n in itertools.count(1)))
    nodes: list[Change] = [(("nodes", count),) for count in counts]
    dividing = _list_engines(spec, compose_changed)
    found = [*smaller * bool(micro.perhaps), *find_smallest([[_CHECKPOINTED], nodes, dividing, [FUSED], OFFLOAD])]
    if found:
        return found
    engines_tried: list[Change] = [(), *dividing]
    # no single change is enough: try combinations with the least memory that a batch can have
    least: Change = (*_CHECKPOINTED, ("batch.micro", 1))
    kinds = (
        [(*engine, *least) for engine in engines_tried],
        [(*engine, *least, *count) for count in nodes for engine in engines_tried],
        [(*engine, *least, *offload) for offload in OFFLOAD for engine in engines_tried],
    )
    return list(find_smallest(kinds))


def _list_engines(spec: RunSpec, compose_changed: Callable[[Change], Request | None]) -> list[Change]:
    """Return changes that each select an engine without a pipeline. An engine is included if, on each rank, its model
    states take at most as many bytes as with the engine of `spec`. All engines are included if the engine of `spec` has
    a pipeline. `compose_changed` returns the request with a change applied.

    Engines of the same backend come first. Within a backend, engines with more bytes per rank come first, since they
    communicate less.
    """

    def count_bytes(one: RunSpec) -> int | None:
        division = engines.facts(one).division
        # for an arbitrary number of parameters
        return division.state_bytes(10**9, one.precision, one.optimizer.name) if division else None

    own, found = count_bytes(spec), []
    # engines without pipelines refuse a layout, so it is set back to the default
    layout = spec.parallel.model_dump()
    reset = [(f"parallel.{name}", value) for name, value in Parallel() if layout[name] != value]
    for name in find_group_files("engine"):
        change = (("engine", name), *reset)
        changed = compose_changed(change)
        size = count_bytes(changed.spec) if changed else None
        if changed and size is not None and (own is None or size <= own):
            found.append((changed.spec.engine.backend != spec.engine.backend, -size, change))
    return [change for _, _, change in sorted(found)]


def _compose_changed(
    overrides: Sequence[Pair], config_dir: Path | None, device: Device, change: Change
) -> Request | None:
    """Return the request that results from applying `change` to these overrides. None if the changed configuration
    breaks a rule, or if its engine refuses it.

    If the change selects another engine, overrides of the old engine's options are dropped.
    """
    changed = {key for key, _ in change}
    kept = [(key, value) for key, value in overrides if not {key, key.partition(".")[0]} & changed]
    return _compose_allowed([*kept, *change], config_dir, device)


def _compose_allowed(
    pairs: Sequence[Pair], config_dir: Path | None, device: Device, update: dict[str, Any] | None = None
) -> Request | None:
    """Return the request composed from overrides. `update` has new values for fields of the request's spec, by field
    name. None if the result breaks a rule, or if its engine refuses it."""
    try:
        request = compose.compose_request(pairs, config_dir)
        request = request._replace(spec=request.spec.model_copy(update=update))
        check_rank(request, device)
    except UserError:
        return None
    return request


# -- remedies for `zeroscale advise`


def find_remedy(
    query: AdviceQuery, config_dir: Path | None, room: DeviceLimits, short: Sequence[Shortage],
    changes: Sequence[Change],
) -> str:  # fmt: skip
    """Return a text with the first of `changes` after which a point in `short` fits or may fit. Return an empty text if
    there is no such change. `short` has points that need more memory than a device has, each with the number of bytes
    that the device lacks.

    Changes to keys that the user has set are not tried. In the returned text, "it" stands for the point for which the
    device lacks the fewest bytes. Any other point is named.
    """
    given = {key for key, _ in query.overrides}
    lacking = sorted((one for one in short if one.bytes > 0), key=lambda one: one.bytes)
    for change in changes:
        if given & {key for key, _ in change}:
            continue
        for shortage in lacking:
            changed = _compose_searched(query, config_dir, room.device, shortage.spec, change)
            if changed and (fits := _describe_fit(changed, change, room.device)):
                described = f"{shortage.spec.engine.name}, {describe_choice(shortage.spec)},"
                return f"{_format_change(change)}, with which {'it' if shortage is lacking[0] else described} {fits}"
    return ""


def _compose_searched(
    query: AdviceQuery, config_dir: Path | None, device: Device, short: RunSpec, change: Change
) -> Request | None:
    """Return the request that results from applying `change` to `short`, the spec of a searched configuration that does
    not fit. None if the changed configuration breaks a rule, or if its engine refuses it."""
    pairs = list_pairs(query, short.engine.name, short.adapter.name)
    return _compose_allowed([*pairs, *change], config_dir, device, {name: getattr(short, name) for name in _SEARCHED})


def list_pairs(query: AdviceQuery, engine: str, adapter: str) -> list[Pair]:
    """Return the overrides with which a query's configurations with this engine and adapter are composed."""
    shared = [pair for pair in query.overrides if adapter != "none" or not pair[0].startswith("adapter.")]
    # a launcher with a queue checks no local devices; micro-batch 1 is only the start of the search
    pairs = [("launcher", launchers.find_cluster()), ("batch.micro", 1), *shared, ("engine", engine)]
    return pairs + [("adapter", adapter)] * (adapter != "none")


def _describe_fit(request: Request, change: Change, device: Device) -> str:
    """Return "fits" or "may fit" for a point, from its predicted memory; empty if it does not fit.

    If model states are offloaded, they must also fit into the host's memory. If the size of the host's memory is
    unknown, the result is at best "may fit".
    """
    spec, room, there = request.spec, request.machine.memory_bytes, request.machine.host_memory_bytes
    assert room is not None
    needed = [predict_memory(spec, device, room).fits(room)]
    offloaded = any(key.startswith("engine.offload") for key, _ in change)
    if offloaded:
        on_host = predict_host_memory(spec, device, room)
        needed.append(on_host.fits(there) if on_host and there else None)
    if False in needed:
        return ""
    return f"{'may fit' if None in needed else 'fits'}{' (its time is not predicted)' * offloaded}"


def _format_change(change: Change) -> str:
    return " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change)


def list_rejected(found: CandidateSearch, axes: Axes, remedy: Remedy) -> list[Rejected]:
    """Return lines about excluded configurations: one line for each engine for which no point fits, one for each node
    count for which no point fits, and one for each number of ranks that cannot divide the batch. If several adapters
    are searched, each combination of engine and adapter counts as an engine."""
    tried = [*(candidate.spec for candidate in found.candidates), *(short.spec for short in found.short)]
    several = len({spec.adapter.name for spec in tried}) > 1

    def name(spec: RunSpec) -> str:
        adapter = spec.adapter.name if describe_adapter(spec) else "full training"
        return f"{spec.engine.name}, {adapter}" if several else spec.engine.name

    engines = {name(candidate.spec) for candidate in found.candidates}
    nodes = {candidate.spec.nodes for candidate in found.candidates}
    named: dict[str, list[Shortage]] = {}
    for short in found.short:
        if name(short.spec) not in engines:
            named.setdefault(name(short.spec), []).append(short)
    for short in found.short:
        if short.spec.nodes not in nodes:
            named.setdefault(format_count(short.spec.nodes, "node"), []).append(short)
    rejected = []
    for what, shortages in named.items():
        suggestion = f"; try {helps}" if (helps := remedy(shortages)) else ""
        rejected.append(Rejected(what, f"does not fit: {_format_least_shortage(shortages)}{suggestion}"))
    undivided = sorted({spec.data_parallel for spec in found.undivided if spec.nodes not in nodes})
    return rejected + [Rejected(format_count(ranks, "rank"), _explain_undivided(axes)) for ranks in undivided]


def _explain_undivided(axes: Axes) -> str:
    """Return the reason why all configurations with a certain number of ranks are excluded: no allowed global batch can
    be divided among these ranks. `axes` has the limits of the search."""
    if axes.most_samples == axes.pass_samples != axes.global_batch:
        return f"the training has only {format_count(axes.pass_samples, 'sample')} for their micro-batches"
    limit = "" if axes.most_samples == UNLIMITED else f"{axes.most_samples} "
    return f"{limit}samples per step cannot be divided among them with these micro-batches"


def build_nothing_fits_error(found: CandidateSearch, rejected: Sequence[Rejected], remedy: Remedy) -> UserError:
    """Return the error for a search that found no candidate."""
    if found.short:
        ways = [f"try {helps}"] if (helps := remedy(found.short)) else []
        assumed = [item.why for item in rejected if item.what == SEVERAL_NODES]
        remedies = "; ".join([*ways, _SMALLER, *assumed])
        return UserError("no configuration fits", _format_least_shortage(found.short), remedies)
    last = rejected[-1] if rejected else Rejected("batch", "leaves nothing to try")  # engines are listed first
    return UserError(last.what, last.why, "set another batch, or other nodes")


def _format_least_shortage(short: Iterable[Shortage]) -> str:
    """Return a text about the point that exceeds a device's memory by the fewest bytes. The text names the point and
    the excess in GB."""
    nearest = min(short, key=lambda shortage: shortage.bytes)
    what = f"{nearest.spec.engine.name}, {describe_choice(nearest.spec)}"
    if nearest.bytes <= 0:
        return f"{what} ran out of memory when it was measured"
    return f"{what} needs at least {format_gigabytes(nearest.bytes)} GB more than a device has"
