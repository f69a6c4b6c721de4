"""Costs that a pipeline adds to those of its forward and backward passes: memory of flat tensors
(`bench.engines.distributed.flat`), transfers between data-parallel copies, and simulated schedules. They are computed
once for each position in the pipeline. All ranks with the same stages have the same position: data-parallel copies, and
tensor-parallel ranks with slices of the stages.

This module does not import torch. Its formulas follow the allocations of flat tensors and AdamW; no value is fitted to
a measurement.
"""

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from bench.core.engine_costs import (
    EngineStep,
    Hop,
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
from bench.engines.distributed.simulation import LinkedPass, link_passes, list_moments, simulate_passes
from bench.engines.pipeline.options import Options, size_of
from bench.engines.precision import DRAWN_AT_ONCE, count_moment_bytes, count_update_bytes

PASSES: tuple[StepPass, StepPass] = ("forward", "backward")
NORM_BYTES = 4
"""Bytes of the squared gradient norm in fp32."""
SETTLED, REPEATED = 3, 3
"""Numbers of groups of micro-batches that are simulated. A group has one micro-batch for each rank of the pipeline.
After SETTLED groups, a schedule repeats itself. The next REPEATED groups are simulated too. Each later group is not
simulated, and is assumed to take the mean time of these REPEATED groups.

This was compared with simulations of whole schedules for 300 random schedules. Step times were exact if all stages were
equally fast. If one stage was up to three times as slow as another, step times were within 1 %.
"""
FILLED = 3
"""Number of groups of micro-batches after which the memory of activations on a rank no longer grows, in schedules whose
backward passes begin as early as possible. A group has one micro-batch for each rank of the pipeline."""


class PipelineRun(NamedTuple):
    """Values that decide the costs of a pipeline run. Instances are keys of caches, so they must be hashable."""

    schedule: ScheduleName
    size: PipelineSize
    ahead: int | None  # number of stages whose weights are gathered in advance; None: no weights are partitioned
    copies: int  # data-parallel copies
    tensor: int  # tensor-parallel ranks
    sequence: bool  # True with sequence parallelism
    width: int  # bytes per element of weights and gradients
    optimizer: OptimizerSpec
    device: Device
    gloo: bool  # True if gloo gathers and reduces; it works on a copy of the larger of input and output
    devices_per_node: int
    world_size: int


class FlatTensors(NamedTuple):
    """Sizes of the flat tensors on a rank at one position in the pipeline, as numbers of elements. The sizes include
    padding, which makes the partitions of all data-parallel copies equal."""

    kept: tuple[int, ...]  # whole on every copy: parameters of this position alone, then of each set of positions
    gathered: tuple[int, ...]  # by stage; 0 if none of its parameters are partitioned
    copies: int

    @property
    def own(self) -> list[int]:
        """Elements that one rank updates, for each of its flat tensors."""
        return [size // self.copies for size in (*self.gathered, *self.kept) if size]


def predict_pipeline(
    spec: RunSpec, network: Stacks, parts: tuple[Part, ...], device: Device, rehearsed: bool
) -> PipelineCosts:
    """Return the costs of every position in a pipeline whose stages are `parts` of the model. If `rehearsed` is true,
    collectives run on a fake process group and need no memory."""
    options, copies = Options.of(spec), spec.data_parallel
    run = PipelineRun(
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
    return _predict(run, network, parts)


@functools.lru_cache(maxsize=4096)  # shared by configurations of a sweep that differ in micro-batch or checkpointing
def _predict(run: PipelineRun, network: Stacks, parts: tuple[Part, ...]) -> PipelineCosts:
    places = tuple(_build_place(run, network, parts, rank) for rank in range(run.size.ranks))
    schedule = run.schedule, run.size
    return PipelineCosts(
        parts, places, functools.partial(simulate_ends, *schedule), functools.partial(list_passes, *schedule)
    )


def _build_place(run: PipelineRun, network: Stacks, parts: Sequence[Part], rank: int) -> PlaceCosts:
    stages = tuple(run.size.stages_of(rank))
    flat = _lay_out(run, network, parts, stages)
    width, size = run.width, run.size
    own, kept = sum(flat.own), width * sum(flat.kept)
    resident = {
        "weights": kept,
        # low-precision weights have fp32 masters; fp32 weights that are kept whole are the masters themselves
        "master weights": FULL * (own if width < FULL else sum(flat.gathered) // flat.copies),
        "optimizer moments": count_moment_bytes(run.optimizer, [EqualTensors(part, 1) for part in flat.own]),
        "gradients": kept,
    }
    # weights are gathered from a partition in the run's precision; gradients are reduced to a partition in fp32
    parts_of_copies = [(elements, elements // run.copies) for elements in flat.gathered]
    by_stage = tuple(
        StageBytes(width * whole, width * whole, FULL * part, width * (part * (width < FULL) + whole * run.gloo))
        for whole, part in parts_of_copies
    )
    # if backwards begin early, micro-batches beyond FILLED groups do not raise the number of kept activations
    if run.schedule in ("1f1b", "interleaved"):
        size = size._replace(micro_batches=min(size.micro_batches, FILLED * size.ranks))
    transfers = [
        *_list_gathers(run, flat, rank),
        *_list_sums(run, network, parts, stages, flat),
        *_list_reductions(run, flat),
    ]
    return PlaceCosts(
        stages=stages,
        list_moments=lambda: _list_all_moments(run.schedule, size, run.ahead)[rank],
        resident=resident,
        initialisation=_count_initialisation(run, network, flat, resident),
        update=_count_update(run, flat, resident),
        by_stage=by_stage,
        step=EngineStep(own, transfers),
    )


# ---------------------------------------- flat tensors


def _lay_out(run: PipelineRun, network: Stacks, parts: Sequence[Part], stages: Sequence[int]) -> FlatTensors:
    """Return the flat tensors of the pipeline position that holds the stages `stages`. A parameter that several stages
    share, such as a tied embedding, is not partitioned, so it is never gathered. If several positions share parameters,
    a separate flat tensor contains these parameters. There is one such tensor for each set of positions."""
    tensor, shared = run.tensor, _list_shared(network, parts)
    alone = count_part_elements(network, [parts[stage] for stage in stages], tensor)
    gathered = [0] * len(stages)
    if run.ahead is not None:
        for place, stage in enumerate(stages):
            common = sum(elements // tensor for elements, holders in shared if stage in holders)
            gathered[place] = count_part_elements(network, [parts[stage]], tensor) - common
    several = list(_count_by_places(run, network, parts, stages).values())
    kept = (alone - sum(gathered) - sum(several), *several)
    pad = functools.partial(pad_elements, ranks=run.copies)
    return FlatTensors(tuple(map(pad, kept)), tuple(map(pad, gathered)), run.copies)


def _count_by_places(
    run: PipelineRun, network: Stacks, parts: Sequence[Part], stages: Collection[int]
) -> dict[tuple[int, ...], int]:
    """Count the elements of the parameters that a position in the pipeline shares with other positions, such as a tied
    embedding. Return one number for each set of positions that share parameters. The key is the sorted tuple of these
    positions. `stages` are the stages at this position, and `parts` are the parts of the model, one per stage."""
    found: dict[tuple[int, ...], int] = {}
    for elements, holders in _list_shared(network, parts):
        places = tuple(sorted({stage % run.size.ranks for stage in holders}))
        if len(places) > 1 and not holders.isdisjoint(stages):
            found[places] = found.get(places, 0) + elements // run.tensor
    return dict(sorted(found.items()))


def _list_shared(network: Stacks, parts: Sequence[Part]) -> list[tuple[int, set[int]]]:
    """Return a pair for each parameter that several stages share: its number of elements, and the set of these stages.
    Shared parameters are a tied embedding and tables of position biases."""
    last, layers = len(parts) - 1, [stack.layers for stack in network.stacks]
    found = [(network.table, {0, last})] if network.tied else []
    for place, stack in enumerate(network.stacks):
        rows, columns = stack.bias_table or (0, 0)
        holders = {number for number, part in enumerate(parts) if part.blocks(layers)[place]}
        found += [(rows * columns, holders)] if rows else []
    return [(elements, holders) for elements, holders in found if len(holders) > 1]


# ---------------------------------------- memory


def _count_initialisation(run: PipelineRun, network: Stacks, flat: FlatTensors, resident: Terms) -> Terms:
    """Return the memory peak of building the stages at one position in the pipeline, in bytes by kind. `flat` has the
    sizes of the flat tensors at this position. `resident` has the bytes between two steps.

    First, each parameter is filled with random values. Meanwhile, even a sliced parameter is whole. Then, stage by
    stage, the parameters move to a new flat tensor. If a flat tensor is partitioned among data-parallel copies, this
    rank's partition is also copied to master weights.
    """
    width = run.width
    largest = max(size.elements for size in list_tensors(network))
    built = width * (sum(flat.gathered) + sum(flat.kept))
    sliced = width * largest if run.tensor > 1 else 0
    working, masters = sliced + FULL * min(largest, DRAWN_AT_ONCE), 0
    for size in flat.gathered:
        own = FULL * size // flat.copies
        working = max(working, masters + width * size, masters + own + own * (width < FULL))
        masters += own - width * size  # the whole parameters are freed
    for size in flat.kept:
        working = max(working, masters + 2 * width * size)  # flat tensors of weights and of gradients
        masters += width * size + FULL * size // flat.copies * (width < FULL)
    moving = {"weights": built, "working memory": working}
    return max(moving, resident | {"optimizer moments": 0}, key=sum_bytes)


def _count_update(run: PipelineRun, flat: FlatTensors, resident: Terms) -> Terms:
    """Return the memory peak of the optimizer's step in bytes, by kind. AdamW updates this rank's partition in fp32.

    Gradients that are kept whole are reduced first. When the reduction ends, this rank's partition of the gradients
    exists twice, in the run's precision and in fp32. After the step, updated weights are gathered. gloo makes a copy of
    the whole flat tensor for the reduction, and again for the gather.
    """
    width, alone = run.width, flat.copies == 1
    taken = FULL * sum(flat.gathered) // flat.copies
    needed, working = 0, count_update_bytes(run.optimizer, run.device, [EqualTensors(size, 1) for size in flat.own])
    for size in flat.kept:
        own = size // flat.copies
        taken += 0 if alone and width == FULL else FULL * own  # one copy in fp32 uses the flat tensor itself
        needed = max(needed, taken + (0 if alone else width * (own * (width < FULL) + size * run.gloo)))
    needed = max(needed, taken + working)
    # tensor by tensor: the gradient of a tensor is freed before its updated weights are gathered
    for size in flat.kept:
        own = size // flat.copies
        taken -= FULL * own
        needed = max(needed, 0 if alone else taken + width * (own + size * run.gloo))
    return resident | {"working memory": needed}


# ---------------------------------------- transfers


def _list_gathers(run: PipelineRun, flat: FlatTensors, rank: int) -> list[Transfer]:
    """Return the gathers of weights that are partitioned among data-parallel copies, and the reductions of their
    gradients. The rank waits for each reduction. On a CPU, no collective overlaps with computation."""
    if run.ahead is None:
        return []
    width, found = run.width, list[Transfer]()
    for when, gathered in zip(PASSES, _list_gathered(run.schedule, run.size, run.ahead, rank), strict=True):
        if sizes := [width * flat.gathered[place] for place in gathered if flat.gathered[place]]:
            overlaps, first = run.ahead > 0 and run.device == "cuda", sizes[0] if when == "forward" else 0
            found.append(_build(run, "all_gather", when, sizes, overlaps, first))
    if reduced := [width * size for size in flat.gathered if size]:
        found.append(_build(run, "reduce_scatter", "backward", reduced))
    return found


@functools.lru_cache(maxsize=1024)
def _list_gathered(
    schedule: ScheduleName, size: PipelineSize, ahead: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return all gathers of weights on a rank in one step, in order, as two lists. The first list has the gathers
    before the rank's first backward pass. The second list has all later gathers. An entry is the stage whose weights
    are gathered, given by its index among the rank's stages. `ahead` is the number of stages whose weights are gathered
    in advance."""
    found: tuple[list[int], list[int]] = ([], [])
    late = False
    for action in build_orders(schedule, size, ahead)[rank]:
        late = late or action.kind == "backward"
        if action.kind == "gather":
            found[late].append(size.stages_of(rank).index(action.stage))
    return tuple(found[0]), tuple(found[1])


def _list_sums(
    run: PipelineRun, network: Stacks, parts: Sequence[Part], stages: Sequence[int], flat: FlatTensors
) -> list[Transfer]:
    """Return the all-reduces of gradients among ranks that hold the same parameters, for one position in the pipeline.
    `stages` are the stages at this position. `parts` are the parts of the model, one per stage. `flat` has the flat
    tensors of this position.

    If several positions in the pipeline share parameters, the gradients of these parameters are summed over the
    positions, separately in each data-parallel copy. Each rank all-reduces only its own partition of the gradients.
    With sequence parallelism, gradients of parameters that are not sliced are summed over the tensor-parallel ranks,
    which have different tokens.
    """
    apart, tensor, found = run.copies * run.tensor, run.tensor, list[Transfer]()
    at_once = min(apart, run.devices_per_node)
    for size, places in zip(flat.kept[1:], _count_by_places(run, network, parts, stages), strict=True):
        payload, nodes = run.width * size // flat.copies, {place * apart // run.devices_per_node for place in places}
        alike = Transfer("all_reduce", "backward", payload, 1, 1, False, len(places), nodes=len(nodes), at_once=at_once)
        found.append(alike)
    if not run.sequence or tensor == 1:
        return found
    mine = [parts[stage] for stage in stages]
    payloads = []  # bytes per flat tensor of norms and learned positions, whole on each tensor-parallel rank
    for group in [mine] if run.ahead is None else [[part] for part in mine]:
        sliced, all_of_it = count_part_elements(network, group, tensor), count_part_elements(network, group)
        payloads.append(run.width * ((tensor * sliced - all_of_it) // (tensor - 1)))
    if payloads := [payload for payload in payloads if payload]:
        found.append(Transfer("all_reduce", "backward", sum(payloads), len(payloads), 1, False, tensor))
    return found


def _list_reductions(run: PipelineRun, flat: FlatTensors) -> list[Transfer]:
    """Return the transfers after the last pass: the gradient norm over all ranks, the reduction of gradients that
    every data-parallel copy keeps whole, and the gather of updated weights."""
    kept = [run.width * size for size in flat.kept if size]
    found = [Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, run.world_size)]
    if flat.copies > 1 and kept:
        found += [_build(run, "reduce_scatter", "backward", kept), _build(run, "all_gather", "update", kept)]
    return found


def _build(
    run: PipelineRun, kind: CollectiveKind, when: StepPass, sizes: Sequence[int], overlaps: bool = False, alone: int = 0
) -> Transfer:
    """Return the collectives among the data-parallel copies of a position in the pipeline. There is one collective for
    each of `sizes` (bytes). `when` is the pass in which the collectives run. If `overlaps` is true, all collectives
    except the first overlap with the computation of this pass. `alone` is the size of the first collective in bytes; 0
    means the mean of `sizes`.

    The rank numbers of neighbouring copies differ by `parallel.tensor`. The ranks between two neighbouring copies have
    other slices of the same stages, and run their own collectives at the same time.
    """
    copies, tensor = run.copies, run.tensor
    nodes = min(copies, -(-copies * tensor // run.devices_per_node))
    at_once = min(tensor, run.devices_per_node)
    return Transfer(kind, when, sum(sizes), len(sizes), 1, overlaps, copies, alone, nodes=nodes, at_once=at_once)


# ---------------------------------------- the schedule


@functools.lru_cache(maxsize=256)
def _link(schedule: ScheduleName, size: PipelineSize) -> tuple[LinkedPass, ...]:
    return link_passes(build_computation(schedule, size), size)


def simulate_ends(
    schedule: ScheduleName, size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> tuple[float, ...]:
    """Return the end of the last pass at each position in the pipeline, in seconds. `hop` returns the seconds of a
    transfer between two ranks.

    A schedule with many micro-batches is not simulated as a whole. Its micro-batches form groups, with one micro-batch
    for each rank of the pipeline. Two shorter schedules are simulated, and the longer schedule has REPEATED more
    groups. The difference of the two end times, divided by REPEATED, is the mean time of a group. Each group that is
    not simulated is assumed to take this mean time.
    """

    def simulate(size: PipelineSize) -> tuple[float, ...]:
        passes, ends_s = _link(schedule, size), dict.fromkeys(range(size.ranks), 0.0)
        for one, end_s in zip(passes, simulate_passes(passes, size, forward_s, backward_s, hop), strict=True):
            ends_s[one.rank] = end_s  # passes of a rank are in execution order, so the last one stays
        return tuple(ends_s.values())

    # once passes alternate, after SETTLED groups, a rank's end time grows linearly with the number of groups
    left_out = max(0, size.micro_batches // size.ranks - SETTLED - REPEATED)  # groups that are not simulated
    many = size._replace(micro_batches=size.micro_batches - left_out * size.ranks)
    ends_s = simulate(many)
    if not left_out:
        return ends_s
    before_s = simulate(many._replace(micro_batches=many.micro_batches - REPEATED * many.ranks))
    groups = left_out / REPEATED
    return tuple(end_s + groups * (end_s - other_s) for end_s, other_s in zip(ends_s, before_s, strict=True))


def list_passes(
    schedule: ScheduleName, size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> list[SimulatedPass]:
    """Return the start and end of each pass in a simulated schedule for a pipeline of the given size. The passes of one
    position in the pipeline are in execution order. `hop` returns the seconds of a transfer between two ranks."""
    passes = _link(schedule, size)
    ends_s = simulate_passes(passes, size, forward_s, backward_s, hop)
    found = []
    for (action, rank, source), end_s in zip(passes, ends_s, strict=True):
        kind: StepPass = "forward" if action.kind == "forward" else "backward"
        seconds = (forward_s if kind == "forward" else backward_s)[action.stage]
        sent_s = None if source is None or passes[source].rank == rank else ends_s[source]
        found.append(SimulatedPass(kind, action.stage, rank, end_s - seconds, end_s, sent_s))
    return found


@functools.lru_cache(maxsize=256)  # shared by configurations of a sweep that differ in their model or batch
def build_orders(schedule: ScheduleName, size: PipelineSize, ahead: int | None) -> tuple[Order, ...]:
    """Return the ordered actions of every rank in a step. Raise UserError if the schedule does not exist for this size.

    `ahead` is the number of stages whose weights are gathered in advance. It is None if weights are not partitioned.
    """
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
