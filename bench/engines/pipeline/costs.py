"""Costs of a pipeline next to its passes, rank by rank: memory of `bench.engines.distributed.flat`, and bytes moved
between copies.

Imports no torch. Formulas follow what flat tensors and AdamW allocate; nothing here is fitted to a measurement.
"""

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from bench.core.engine_costs import (
    EngineStep,
    PipelineCosts,
    PlaceCosts,
    SimulatedPass,
    StageBytes,
    StageMoment,
    StepPass,
    Terms,
    Transfer,
    sum_bytes,
)
from bench.core.errors import UserError
from bench.core.machine import CollectiveKind
from bench.core.network import EqualTensors, Part, Stacks, count_part_elements, list_tensors, pad_elements
from bench.core.spec import FULL, WIDTH, Device, OptimizerSpec, RunSpec
from bench.engines.distributed.schedule import (
    Order,
    PipelineSize,
    ScheduleName,
    add_gathers,
    build_computation,
    build_schedule,
    find_obstacle,
)
from bench.engines.distributed.simulation import Hop, LinkedPass, link_passes, list_moments, play_passes
from bench.engines.pipeline.options import decode_options, size_of
from bench.engines.precision import count_adamw_bytes

NORM_BYTES = 4
"""The gradient's squared norm in fp32."""
SETTLED, REPEATED = 3, 3
"""Groups of micro-batches, one for each rank, after which a schedule repeats itself, and those that are taken to be
like all behind them. Of 300 random ones steps were exact where stages are alike, and within 1 % of the whole schedule
where one takes up to three times as long as another."""
FILLED = 3
"""Groups after which no rank keeps more, where backwards begin as early as they can."""
DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules.parts)."""


class PipelineRun(NamedTuple):
    """What of a pipeline's run decides its costs beside its passes."""

    schedule: ScheduleName
    size: PipelineSize
    ahead: int | None  # stages whose weights are gathered while another one computes; None: none are divided
    copies: int
    tensor: int
    sequence: bool
    width: int  # bytes per element of weights and gradients
    optimizer: OptimizerSpec
    device: Device
    gloo: bool  # gloo gathers and reduces: it works on a copy of the larger tensor
    devices_per_node: int
    world_size: int


def build_run(spec: RunSpec, device: Device, *, rehearsed: bool) -> PipelineRun:
    """Return what decides the costs of `spec`. Collectives that are only `rehearsed` need no memory of their own."""
    options, copies = decode_options(spec), spec.data_parallel
    return PipelineRun(
        schedule=options.schedule,
        size=size_of(spec),
        ahead=options.gather_ahead if options.sharding == "zero3" and copies > 1 else None,
        copies=copies,
        tensor=spec.parallel.tensor,
        sequence=spec.parallel.sequence,
        width=WIDTH[spec.precision],
        optimizer=spec.optimizer,
        device=device,
        gloo=device == "cpu" and not rehearsed and copies > 1,
        devices_per_node=spec.devices_per_node,
        world_size=spec.world_size,
    )


class FlatTensors(NamedTuple):
    """The parameters of the ranks in one place: elements of the flat tensors, with as many for each copy."""

    kept: tuple[int, ...]  # whole on every copy: of this place alone, then of each set of places that have the same
    gathered: tuple[int, ...]  # by stage; 0 where nothing of it is divided
    copies: int

    @property
    def own(self) -> list[int]:
        """Elements that one rank updates, by tensor."""
        return [size // self.copies for size in (*self.gathered, *self.kept) if size]


class GatheredStages(NamedTuple):
    """Whose weights are gathered in a step, by place among the rank's stages, in this order."""

    early: tuple[int, ...]  # before the rank's first backward
    late: tuple[int, ...]
    ahead: bool  # while another stage computes


def list_gathers(run: PipelineRun, flat: FlatTensors, stages: GatheredStages) -> list[Transfer]:
    """Return the gathers of weights that copies divide, and the reductions of their gradients, for which the rank
    waits. On a CPU nothing overlaps."""
    width, found = run.width, list[Transfer]()
    passes: tuple[tuple[StepPass, tuple[int, ...]], ...] = (("forward", stages.early), ("backward", stages.late))
    for when, gathered in passes:
        sizes = [width * flat.gathered[place] for place in gathered if flat.gathered[place]]
        if sizes:
            beside = stages.ahead and run.device == "cuda"
            first = sizes[0] if when == "forward" else 0
            found.append(_build(run, "all_gather", when, sum(sizes), len(sizes), beside, first))
    if reduced := [width * size for size in flat.gathered if size]:
        found.append(_build(run, "reduce_scatter", "backward", sum(reduced), len(reduced), False))
    return found


def list_reductions(run: PipelineRun, flat: FlatTensors) -> list[Transfer]:
    """Return what is moved behind the last pass: gradients of what every copy has whole, their norm over all ranks, the
    updated weights."""
    kept = [run.width * size for size in flat.kept if size]
    found = [Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, run.world_size)]
    if flat.copies > 1 and kept:
        found.append(_build(run, "reduce_scatter", "backward", sum(kept), len(kept), False))
        found.append(_build(run, "all_gather", "update", sum(kept), len(kept), False))
    return found


def list_sums(run: PipelineRun, flat: FlatTensors, sets: Sequence[Collection[int]]) -> list[Transfer]:
    """Return the sums of gradients of what ranks in several places of a pipeline have, each of the part that a copy
    updates; `sets` has the places of each of the tensors that several have."""
    apart, found = run.copies * run.tensor, list[Transfer]()
    together = min(apart, run.devices_per_node)
    for size, places in zip(flat.kept[1:], sets, strict=True):
        payload = run.width * size // flat.copies
        nodes = len({place * apart // run.devices_per_node for place in places})
        found.append(
            Transfer("all_reduce", "backward", payload, 1, 1, False, len(places), nodes=nodes, at_once=together)
        )
    return found


def list_unsliced(run: PipelineRun, elements: Sequence[int]) -> list[Transfer]:
    """Return the sums over tensor-parallel ranks of gradients of what each has whole, where each has seen some of the
    tokens: one for each flat tensor, of so many elements."""
    if not run.sequence:
        return []
    payloads = [run.width * size for size in elements if size]
    ranks = run.tensor
    return [Transfer("all_reduce", "backward", sum(payloads), len(payloads), 1, False, ranks)] if payloads else []


def _build(
    run: PipelineRun, kind: CollectiveKind, when: StepPass, payload: int, calls: int, overlaps: bool, alone: int = 0
) -> Transfer:
    """A collective of the copies of a place: every `parallel.tensor`-th of neighbouring ranks, whose other slices move
    theirs at the same time."""
    copies, tensor = run.copies, run.tensor
    nodes = min(copies, -(-copies * tensor // run.devices_per_node))
    together = min(tensor, run.devices_per_node)
    return Transfer(kind, when, payload, calls, 1, overlaps, copies, alone, nodes=nodes, at_once=together)


def predict_pipeline(
    spec: RunSpec, network: Stacks, parts: tuple[Part, ...], device: Device, rehearsed: bool
) -> PipelineCosts:
    """Return the costs of every place of a pipeline whose stages are these parts."""
    return _predict(build_run(spec, device, rehearsed=rehearsed), network, parts)


@functools.lru_cache(maxsize=4096)  # points of a sweep that differ in their micro-batch or checkpointing share it
def _predict(run: PipelineRun, network: Stacks, parts: tuple[Part, ...]) -> PipelineCosts:
    places = tuple(_build_place(run, network, parts, rank) for rank in range(run.size.ranks))
    schedule = run.schedule, run.size
    return PipelineCosts(
        parts, places, functools.partial(play_schedule, *schedule), functools.partial(list_passes, *schedule)
    )


def _shorten(size: PipelineSize, groups: int) -> tuple[PipelineSize, int]:
    """Return a pipeline of so many groups of micro-batches, one for each rank, and the others; and how many groups are
    left out."""
    left_out = max(0, size.micro_batches // size.ranks - groups)
    return size._replace(micro_batches=size.micro_batches - left_out * size.ranks), left_out


@functools.lru_cache(maxsize=256)
def _link(schedule: ScheduleName, size: PipelineSize) -> tuple[LinkedPass, ...]:
    return link_passes(build_computation(schedule, size), size)


def play_schedule(
    schedule: ScheduleName, size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> tuple[float, ...]:
    """Return by place when its last pass ends. A long schedule is played with two numbers of micro-batches; each group
    beyond takes as long as one between."""
    many, left_out = _shorten(size, SETTLED + REPEATED)
    ends_s = _play_all(schedule, many, forward_s, backward_s, hop)
    if not left_out:
        return ends_s
    fewer = many._replace(micro_batches=many.micro_batches - REPEATED * many.ranks)
    before_s = _play_all(schedule, fewer, forward_s, backward_s, hop)
    groups = left_out / REPEATED
    return tuple(end_s + groups * (end_s - other_s) for end_s, other_s in zip(ends_s, before_s, strict=True))


def _play_all(
    schedule: ScheduleName, size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> tuple[float, ...]:
    passes = _link(schedule, size)
    ends_s = dict.fromkeys(range(size.ranks), 0.0)
    for one, end_s in zip(passes, play_passes(passes, size, forward_s, backward_s, hop), strict=True):
        ends_s[one.rank] = end_s  # a rank's passes are in their order
    return tuple(ends_s.values())


def list_passes(
    schedule: ScheduleName, size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> list[SimulatedPass]:
    """Return when each pass of a schedule is made, those of a place in their order."""
    passes = _link(schedule, size)
    ends_s = play_passes(passes, size, forward_s, backward_s, hop)
    found = []
    for (action, rank, source), end_s in zip(passes, ends_s, strict=True):
        kind: StepPass = "forward" if action.kind == "forward" else "backward"
        seconds = (forward_s if kind == "forward" else backward_s)[action.stage]
        sent_s = None if source is None or passes[source].rank == rank else ends_s[source]
        found.append(SimulatedPass(kind, action.stage, rank, end_s - seconds, end_s, sent_s))
    return found


@functools.lru_cache(maxsize=256)  # points of a sweep that differ in their model or batch share it
def build_orders(schedule: ScheduleName, size: PipelineSize, ahead: int | None) -> tuple[Order, ...]:
    """Return what every rank does in a step; `ahead`: of the stages whose weights are gathered, None where none are.
    UserError for a schedule that is not there."""
    if obstacle := find_obstacle(schedule, size):
        raise UserError(f"engine.schedule={schedule}", *obstacle)
    orders = build_schedule(schedule, size)
    return orders if ahead is None else tuple(add_gathers(order, ahead) for order in orders)


@functools.lru_cache(maxsize=256)
def _list_all_moments(
    schedule: ScheduleName, size: PipelineSize, ahead: int | None
) -> tuple[tuple[StageMoment, ...], ...]:
    orders = build_orders(schedule, size, ahead)
    return tuple(list_moments(order, size, rank) for rank, order in enumerate(orders))


def _size_moments(run: PipelineRun) -> PipelineSize:
    """Return the pipeline in which as much lives as in this one: where backwards begin early, no pass is kept longer
    for micro-batches that are behind it."""
    if run.schedule not in ("1f1b", "interleaved"):
        return run.size
    return run.size._replace(micro_batches=min(run.size.micro_batches, FILLED * run.size.ranks))


def _lay_out(run: PipelineRun, network: Stacks, parts: Sequence[Part], stages: Sequence[int]) -> FlatTensors:
    """Return the flat tensors of a place. What several stages of the model have is not gathered with one of them, and
    what several places have is in a tensor of its own."""
    copies, tensor = run.copies, run.tensor
    alone = count_part_elements(network, [parts[stage] for stage in stages], tensor)
    gathered = [0] * len(stages)
    if run.ahead is not None:
        shared = _list_shared(network, parts)
        for place, stage in enumerate(stages):
            gathered[place] = count_part_elements(network, [parts[stage]], tensor) - sum(
                elements // tensor for elements, holders in shared if stage in holders
            )
    several = list(_count_by_places(run, network, parts, stages).values())
    kept = (alone - sum(gathered) - sum(several), *several)
    pad = functools.partial(pad_elements, ranks=copies)
    return FlatTensors(tuple(map(pad, kept)), tuple(map(pad, gathered)), copies)


def _count_by_places(
    run: PipelineRun, network: Stacks, parts: Sequence[Part], stages: Collection[int]
) -> dict[tuple[int, ...], int]:
    """Return the elements that a place has together with others, by the places that have them, sorted."""
    found: dict[tuple[int, ...], int] = {}
    for elements, holders in _list_shared(network, parts):
        places = tuple(sorted({stage % run.size.ranks for stage in holders}))
        if len(places) > 1 and not holders.isdisjoint(stages):
            found[places] = found.get(places, 0) + elements // run.tensor
    return dict(sorted(found.items()))


def _count_unsliced(run: PipelineRun, network: Stacks, parts: Sequence[Part], stages: Sequence[int]) -> list[int]:
    """Return by flat tensor the elements that tensor-parallel ranks have whole: norms and learned positions."""
    tensor, mine = run.tensor, [parts[stage] for stage in stages]
    groups = [mine] if run.ahead is None else [[part] for part in mine]
    if tensor == 1:
        return []
    return [
        (tensor * count_part_elements(network, group, tensor) - count_part_elements(network, group)) // (tensor - 1)
        for group in groups
    ]


def _list_shared(network: Stacks, parts: Sequence[Part]) -> list[tuple[int, set[int]]]:
    """Return the elements of each parameter that several stages have, and which do: a tied embedding, and tables of
    position biases."""
    last, layers = len(parts) - 1, [stack.layers for stack in network.stacks]
    found = [(network.table, {0, last})] if network.tied else []
    for place, stack in enumerate(network.stacks):
        rows, columns = stack.bias_table or (0, 0)
        holders = {number for number, part in enumerate(parts) if part.blocks(layers)[place]}
        found += [(rows * columns, holders)] if rows else []
    return [(elements, holders) for elements, holders in found if len(holders) > 1]


def _build_place(run: PipelineRun, network: Stacks, parts: Sequence[Part], rank: int) -> PlaceCosts:
    stages = tuple(run.size.stages_of(rank))
    flat = _lay_out(run, network, parts, stages)
    resident = _count_resident(flat, run.width)
    gathered = _list_gathered(run.schedule, run.size, run.ahead, rank)
    transfers = [
        *list_gathers(run, flat, gathered),
        *list_sums(run, flat, list(_count_by_places(run, network, parts, stages))),
        *list_unsliced(run, _count_unsliced(run, network, parts, stages)),
        *list_reductions(run, flat),
    ]
    return PlaceCosts(
        stages=stages,
        list_moments=lambda: _list_all_moments(run.schedule, _size_moments(run), run.ahead)[rank],
        resident=resident,
        initialisation=_count_initialisation(run, network, flat, resident),
        update=_count_update(run, flat, resident),
        by_stage=tuple(_count_stage(run, elements) for elements in flat.gathered),
        step=EngineStep(sum(flat.own), transfers),
    )


@functools.lru_cache(maxsize=1024)
def _list_gathered(schedule: ScheduleName, size: PipelineSize, ahead: int | None, rank: int) -> GatheredStages:
    """Return which of a rank's stages are gathered in a step, before its first backward and behind it."""
    if ahead is None:
        return GatheredStages((), (), ahead=False)
    found: tuple[list[int], list[int]] = ([], [])
    late = False
    for action in build_orders(schedule, size, ahead)[rank]:
        late = late or action.kind == "backward"
        if action.kind == "gather":
            found[late].append(size.stages_of(rank).index(action.stage))
    return GatheredStages(tuple(found[0]), tuple(found[1]), bool(ahead))


def _count_resident(flat: FlatTensors, width: int) -> Terms:
    """Weights below fp32 have masters; where they are kept whole, fp32 ones are the masters. Gradients have one flat
    tensor as well."""
    own, gathered = sum(flat.own), sum(flat.gathered) // flat.copies
    return {
        "weights": width * sum(flat.kept),
        "master weights": FULL * (own if width < FULL else gathered),
        "optimizer moments": 2 * FULL * own,
        "gradients": width * sum(flat.kept),
    }


def _count_initialisation(run: PipelineRun, network: Stacks, flat: FlatTensors, resident: Terms) -> Terms:
    """Each parameter is drawn, sliced ones whole for that moment. Then a flat tensor is made beside the parameters that
    move into it, stage after stage; where it is divided, masters are made of it by way of another copy."""
    width = run.width
    largest = max(size.elements for size in list_tensors(network))
    built = width * (sum(flat.gathered) + sum(flat.kept))
    sliced = width * largest if run.tensor > 1 else 0
    drawn = sliced + FULL * min(largest, DRAWN_AT_ONCE)
    working, masters = drawn, 0
    for size in flat.gathered:
        masters += FULL * size // flat.copies
        copy = FULL * size // flat.copies * (width < FULL)
        working = max(working, masters - FULL * size // flat.copies + width * size, masters + copy)
        masters -= width * size
    for size in flat.kept:
        working = max(working, masters + 2 * width * size)
        masters += width * size + FULL * size // flat.copies * (width < FULL)
    moving = {"weights": built, "working memory": working}
    return max(moving, resident | {"optimizer moments": 0}, key=sum_bytes)


def _count_update(run: PipelineRun, flat: FlatTensors, resident: Terms) -> Terms:
    """AdamW works on this rank's part in fp32. What is kept whole is reduced before, at whose end the part is there in
    both widths, and published behind it; gloo does both on a copy."""
    width, alone = run.width, flat.copies == 1
    taken = FULL * sum(flat.gathered) // flat.copies
    needed, working = 0, count_adamw_bytes(run.optimizer, run.device, [EqualTensors(size, 1) for size in flat.own])
    for size in flat.kept:
        own = size // flat.copies
        taken += 0 if alone and width == FULL else FULL * own  # alone in fp32, they are those of the flat tensor
        needed = max(needed, taken + (0 if alone else width * (own * (width < FULL) + size * run.gloo)))
    needed = max(needed, taken + working)
    for size in flat.kept:
        own = size // flat.copies
        taken -= FULL * own
        needed = max(needed, 0 if alone else taken + width * (own + size * run.gloo))
    return resident | {"working memory": needed}


def _count_stage(run: PipelineRun, gathered: int) -> StageBytes:
    """A stage's weights are gathered from a part in their own width, and its gradients reduced to one in fp32."""
    own, width = gathered // run.copies, run.width
    if not gathered:
        return StageBytes()
    reducing = width * (own * (width < FULL) + gathered * run.gloo)
    return StageBytes(width * gathered, width * gathered, FULL * own, reducing)
