"""Seconds of a step of a pipeline: its very schedule is played through, with what each stage computes and moves for one
micro-batch. Behind the last pass come the reductions, a moment when all ranks have met, the update, and the gathers.

A tensor-parallel rank waits for each exchange at a region's edge: one all-reduce of the states where they are not
divided by tokens (arXiv 1909.08053), else a gather and a reduce-scatter of as many bytes (arXiv 2205.05198).

`predict_idle_share` depends on no machine: the backward of a stage has twice the FLOPs of its forward.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.core.engine_costs import PipelineCosts, PlaceCosts, SimulatedPass, StepPass, Transfer
from bench.core.machine import CollectiveKind
from bench.core.network import Attention, Part, Stacks
from bench.core.spec import FULL, Precision, RunSpec
from bench.engines.distributed.cut import count_unit_flops
from bench.predict.memory.stages import TensorSlices, count_state_bytes, cut_network, list_alike
from bench.predict.step_time.compute import ComputeTime, PassTimes, StepContext, compute_update_s, time_passes
from bench.predict.step_time.network import TransferTime, compute_hop_s, compute_transfer_s, time_transfers
from bench.predict.work import PassWork, compute_blocks, compute_ends, compute_recomputed
from bench.predict.workload import Workload, get_network, predict_pipeline

_BACKWARD = 2
"""FLOPs over those of forward: a gradient of the inputs and one of the weights."""
EXCHANGE_OPERATIONS = 2
"""What the host starts for one exchange of tensor parallelism: a function of autograd's, and the collective. Chosen as
BESIDE of `rates` was: one or three would be plausible too."""


def predict_idle_share(spec: RunSpec) -> float | None:
    """Return the part of a step's passes in which a rank waits, mean over ranks; None where the engine divides no
    layers among ranks. Stages take as long as their FLOPs say, transfers and the update no time. UserError for what
    the engine cannot predict."""
    if (costs := _find_costs(spec)) is None:
        return None
    forward, backward = _count_stage_flops(spec, costs)
    end = max(costs.simulate(forward, backward, _move_at_once))
    passes = [forward[stage] + backward[stage] for stage in range(len(costs.parts))]
    busy = statistics.mean(spec.accumulation * sum(passes[stage] for stage in place.stages) for place in costs.places)
    return 1 - busy / end


def play_passes_by_flops(spec: RunSpec) -> Sequence[SimulatedPass]:
    """Return when each pass of such a step is made, in FLOPs of one sample in place of seconds; nothing where the
    engine divides no layers among ranks. UserError as `predict_idle_share`."""
    costs = _find_costs(spec)
    return costs.list_passes(*_count_stage_flops(spec, costs), _move_at_once) if costs else ()


def _find_costs(spec: RunSpec) -> PipelineCosts | None:
    return predict_pipeline(spec, "cpu") if spec.parallel.pipeline > 1 else None


def _count_stage_flops(spec: RunSpec, costs: PipelineCosts) -> tuple[list[float], list[float]]:
    """Return by stage those of a forward and of a backward."""
    flops = count_unit_flops(get_network(spec), dict(spec.sequence.items()))
    forward = [float(sum(flops[part.begin : part.end])) for part in costs.parts]
    return forward, [(_BACKWARD + spec.activation_checkpointing) * one for one in forward]


def _move_at_once(source: int, target: int) -> float:
    return 0.0


class PipelineTime(NamedTuple):
    """A step of the rank that has most to do."""

    own: ComputeTime
    moved: list[TransferTime]
    idle_s: float  # in which it waits for other stages


class PlaceTime(NamedTuple):
    """What the ranks of a place do in a step."""

    own: ComputeTime
    exchanged: list[TransferTime]  # inside passes
    moved: list[TransferTime]  # between copies

    @property
    def reduced_s(self) -> float:
        """From the last pass until all ranks meet."""
        return sum(one.exposed_s for one in self.moved if one.transfer.when != "update")

    @property
    def updated_s(self) -> float:
        """From there to the end of the step."""
        return self.own.optimizer + sum(one.exposed_s for one in self.moved if one.transfer.when == "update")

    @property
    def busy_s(self) -> float:
        exchanged_s = sum(one.exposed_s for one in self.exchanged)
        return self.own.total - self.own.optimizer + exchanged_s + self.reduced_s + self.updated_s


def time_pipeline(context: StepContext, costs: PipelineCosts) -> PipelineTime:
    """Return the time of a step."""
    places, forward_s, backward_s = _time_places(context, costs)
    ends_s = costs.simulate(forward_s, backward_s, _build_hop(context))
    met_s = max(end_s + place.reduced_s for end_s, place in zip(ends_s, places, strict=True))
    total_s = met_s + max(place.updated_s for place in places)
    most = max(places, key=lambda place: place.busy_s)
    idle_s = 0.0 if math.isclose(total_s, most.busy_s) else total_s - most.busy_s  # not what rounding leaves
    return PipelineTime(most.own, [*most.exchanged, *most.moved], idle_s)


def list_pipeline_passes(context: StepContext, costs: PipelineCosts) -> Sequence[SimulatedPass]:
    """Return when each pass of a step is made."""
    _, forward_s, backward_s = _time_places(context, costs)
    return costs.list_passes(forward_s, backward_s, _build_hop(context))


def _time_places(context: StepContext, costs: PipelineCosts) -> tuple[list[PlaceTime], list[float], list[float]]:
    """Return what each place does in a step, and by stage the seconds of a forward and of a backward."""
    passes, exchanges = _time_stages(context, costs.parts)
    places = [_time_place(context, place, passes, exchanges) for place in costs.places]
    factor = 1.0 if context.rehearsed_s is None else context.rehearsed_s / places[0].own.total
    factor *= context.contention
    return (
        [one._replace(own=one.own.scaled(factor)._replace(doubt=context.doubt)) for one in places],
        [factor * one.forward + _sum_s(found, "forward") for one, found in zip(passes, exchanges, strict=True)],
        [
            factor * (one.recomputation + one.backward) + _sum_s(found, "backward")
            for one, found in zip(passes, exchanges, strict=True)
        ],
    )


def _sum_s(found: list[TransferTime], when: StepPass) -> float:
    return sum(one.whole_s for one in found if one.transfer.when == when)


def _time_stages(context: StepContext, parts: tuple[Part, ...]) -> tuple[list[PassTimes], list[list[TransferTime]]]:
    """Return what each stage computes for one micro-batch, and what its ranks exchange in it."""
    spec, load = context.spec, context.load
    network = get_network(spec)
    slices, seconds = TensorSlices(spec.parallel.tensor, spec.parallel.sequence), dict[Transfer, float]()
    passes, exchanges = list[PassTimes](), list[list[TransferTime]]()
    for number, first in enumerate(list_alike(network, parts)):
        if first < number:
            passes.append(passes[first])
            exchanges.append(exchanges[first])
            continue
        part = parts[number]
        its = load._replace(checkpointing=load.checkpointing and (load.software.last_again or not part.last))
        found = list_exchanges(network, its, part, slices)
        passes.append(_time_part(network, its, part, slices, context.machine_json, spec.precision))
        for one in found:
            if one not in seconds:
                seconds[one] = compute_transfer_s(one, spec, context.machine)
        exchanges.append([TransferTime(one, seconds[one], seconds[one]) for one in found])
    return passes, exchanges


@functools.lru_cache(maxsize=4096)  # stages are alike, and points of a sweep share them
def _time_part(
    network: Stacks, load: Workload, part: Part, slices: TensorSlices, machine_json: str, precision: Precision
) -> PassTimes:
    sliced = cut_network(network, part, slices.ranks)
    exchanges = sum(one.calls for one in list_exchanges(network, load, part, slices) if one.when == "forward")
    there = compute_blocks(sliced, load).plus(PassWork(operations=EXCHANGE_OPERATIONS * exchanges))
    if part.last:
        there = there.plus(compute_ends(sliced, load))
    again = compute_recomputed(sliced, load) if there.matmuls else PassWork()
    return time_passes(there, again, machine_json, precision, load.device, load.software)


@functools.lru_cache(maxsize=4096)
def list_exchanges(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> list[Transfer]:
    """Return what tensor-parallel ranks exchange in a pass of a part, in forward and in backward: states that regions
    begin and end with, and two numbers for each label. What is computed again ends with its last product."""
    if slices.ranks == 1:
        return []
    found = list[Transfer]()
    layers = part.blocks([stack.layers for stack in network.stacks])
    for stack, blocks in zip(network.stacks, layers, strict=True):
        own = load.width * load.micro * load.tokens(stack.tokens) * network.width
        begun = len(stack.block) * len(blocks)
        found += _list_edges(own, begun + part.first, begun, slices)
        if load.checkpointing:
            found += _list_again(own, begun - len(blocks), begun, slices)
        for other in [one.over for one in stack.block if isinstance(one, Attention) and one.over is not None]:
            states = load.width * load.micro * load.tokens(network.named(other).tokens) * network.width
            found += _list_edges(states, 0, len(blocks), slices)
            if load.checkpointing:
                found += _list_again(states, 0, len(blocks), slices)
    if part.last:
        rows = load.micro * load.tokens(network.stacks[-1].tokens)
        found += _list_edges(load.width * rows * network.width, 0, 1, slices)
        found += [_build_exchange("all_reduce", "forward", FULL * rows * number, 1, slices) for number in (1, 2)]
    return found


def _list_edges(states: int, ends: int, begins: int, slices: TensorSlices) -> list[Transfer]:
    """What the edges of regions exchange of so many bytes: forward where they end, backward where they begin, and where
    tokens are divided the other way round as well."""
    kinds: tuple[tuple[CollectiveKind, StepPass, int], ...] = (
        ("all_reduce", "forward", ends),
        ("all_reduce", "backward", begins),
    )
    if slices.sequence:
        kinds = (
            ("reduce_scatter", "forward", ends), ("all_gather", "forward", begins),
            ("all_gather", "backward", ends), ("reduce_scatter", "backward", begins),
        )  # fmt: skip
    return [_build_exchange(kind, when, states, calls, slices) for kind, when, calls in kinds if calls]


def _list_again(states: int, ends: int, begins: int, slices: TensorSlices) -> list[Transfer]:
    """What a forward that is computed again exchanges, before its backward."""
    forward = [one for one in _list_edges(states, ends, begins, slices) if one.when == "forward"]
    return [one._replace(when="backward") for one in forward]


def _build_exchange(kind: CollectiveKind, when: StepPass, payload: int, calls: int, slices: TensorSlices) -> Transfer:
    return Transfer(kind, when, payload * calls, calls, 1, False, slices.ranks)


def _time_place(
    context: StepContext, place: PlaceCosts, passes: list[PassTimes], exchanges: list[list[TransferTime]]
) -> PlaceTime:
    spec, micro_steps = context.spec, context.spec.accumulation
    mine = [passes[stage] for stage in place.stages]
    forward, again, backward = (
        micro_steps * sum(getattr(one, name) for one in mine) for name in ("forward", "recomputation", "backward")
    )
    updating = compute_update_s(spec, place.step.updated, context.rates)
    kinds = {name: sum(one.kinds[name] for one in mine) for name in mine[0].kinds}
    kinds["memory traffic of the optimizer"] = updating / micro_steps
    own = ComputeTime(forward, again, backward, updating, max(kinds, key=lambda name: kinds[name]))
    exchanged = [
        TransferTime(one.transfer._replace(passes=micro_steps), micro_steps * one.whole_s, micro_steps * one.exposed_s)
        for stage in place.stages
        for one in exchanges[stage]
    ]
    return PlaceTime(own, exchanged, time_transfers(place.step.transfers, own, spec, context.machine, 1))


def _build_hop(context: StepContext) -> Callable[[int, int], float]:
    """Return the seconds of a transfer between two places. All ranks of a place send at once, and share the links of
    their nodes where these are others than the receivers'."""
    spec = context.spec
    slices = TensorSlices(spec.parallel.tensor, spec.parallel.sequence)
    payload = count_state_bytes(get_network(spec), context.load, slices)
    apart = spec.data_parallel * spec.parallel.tensor

    @functools.cache
    def hop(source: int, target: int) -> float:
        first, last = source * apart, (source + 1) * apart - 1
        moved = (target - source) * apart
        across = any(rank // spec.devices_per_node != (rank + moved) // spec.devices_per_node for rank in (first, last))
        together = min(apart, spec.devices_per_node) if across else 1
        return compute_hop_s(together * payload, context.machine, between_nodes=across)

    return hop
