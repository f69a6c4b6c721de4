"""Predicted seconds of a pipeline step, from a simulation of its schedule.

The simulation uses computing and transfer times of each stage for one micro-batch. The last pass is followed by the
reductions of gradients, a barrier of all ranks, the update, and the gathers of updated weights. Tensor-parallel ranks
exchange states before and after each sub-layer, and wait for each exchange. Without sequence parallelism, an exchange
is one all-reduce of the states (arXiv 1909.08053). With sequence parallelism, a gather and a reduce-scatter move as
many bytes (arXiv 2205.05198).

`predict_idle_share` needs no machine. It assumes that the backward of a stage has twice the FLOPs of its forward.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.core.engine_costs import PipelineCosts, PlaceCosts, SimulatedPass, StepPass, Transfer
from bench.core.machine import CollectiveKind
from bench.core.network import Attention, Part, Stacks
from bench.core.spec import FULL, RunSpec
from bench.engines.distributed.cut import count_unit_flops
from bench.predict.memory.stages import TensorSlices, count_state_bytes, cut_network, list_alike
from bench.predict.step_time.compute import (
    ComputeTime,
    DeviceRates,
    PassTimes,
    StepContext,
    build_compute_time,
    compute_update_s,
    time_passes,
)
from bench.predict.step_time.network import TransferTime, compute_hop_s, compute_transfer_s, time_transfers
from bench.predict.work import PassWork, compute_blocks, compute_ends, compute_recomputed
from bench.predict.workload import Workload, get_network, predict_pipeline

_BACKWARD = 2
"""Ratio of the FLOPs of backward to the FLOPs of forward. Backward computes the gradient of the inputs and the gradient
of the weights, each with as many FLOPs as forward."""
EXCHANGE_OPERATIONS = 2
"""Number of operations that the host starts for one exchange of tensor parallelism: an autograd function and the
collective. The value was chosen together with BESIDE of bench.predict.step_time.compute; 1 or 3 would be plausible too.
"""


def predict_idle_share(spec: RunSpec) -> float | None:
    """Return the share of time in which a rank of a pipeline is idle, as the mean over ranks. The time is that from the
    start of a step's first pass to the end of its last pass. None without a pipeline.

    The time of a stage is assumed proportional to its FLOPs. Transfers and the update are assumed to take no time.
    Raise UserError if the engine cannot predict its schedule.
    """
    if (costs := _find_costs(spec)) is None:
        return None
    forward, backward = _count_stage_flops(spec, costs)
    end = max(costs.simulate(forward, backward, _move_at_once))
    passes = [forward[stage] + backward[stage] for stage in range(len(costs.parts))]
    busy = statistics.mean(spec.accumulation * sum(passes[stage] for stage in place.stages) for place in costs.places)
    return 1 - busy / end


def play_passes_by_flops(spec: RunSpec) -> Sequence[SimulatedPass]:
    """Return start and end of each pass of a pipeline step. No machine is known, so time is measured in FLOPs: a pass
    lasts as long as its number of FLOPs for one sample. Transfers are assumed to take no time.

    Empty without a pipeline. Raise UserError if the engine cannot predict its schedule.
    """
    costs = _find_costs(spec)
    return costs.list_passes(*_count_stage_flops(spec, costs), _move_at_once) if costs else ()


def _find_costs(spec: RunSpec) -> PipelineCosts | None:
    return predict_pipeline(spec, "cpu") if spec.parallel.pipeline > 1 else None


def _count_stage_flops(spec: RunSpec, costs: PipelineCosts) -> tuple[list[float], list[float]]:
    """Return the FLOPs of a forward pass and of a backward pass for each stage, for one sample."""
    flops = count_unit_flops(get_network(spec), dict(spec.sequence.items()))
    forward = [float(sum(flops[part.begin : part.end])) for part in costs.parts]
    return forward, [(_BACKWARD + spec.activation_checkpointing) * one for one in forward]


def _move_at_once(source: int, target: int) -> float:
    return 0.0


class _PlaceTime(NamedTuple):
    """Times of a step on the ranks at one position of the pipeline."""

    own: ComputeTime
    exchanged: list[TransferTime]  # tensor-parallel exchanges within passes
    moved: list[TransferTime]  # transfers between model copies

    @property
    def reduced_s(self) -> float:
        """Seconds of communication from the last pass to the barrier of all ranks."""
        return sum(one.exposed_s for one in self.moved if one.transfer.when != "update")

    @property
    def updated_s(self) -> float:
        """Seconds from the barrier of all ranks to the end of the step."""
        return self.own.optimizer + sum(one.exposed_s for one in self.moved if one.transfer.when == "update")

    @property
    def busy_s(self) -> float:
        exchanged_s = sum(one.exposed_s for one in self.exchanged)
        return self.own.total - self.own.optimizer + exchanged_s + self.reduced_s + self.updated_s


def time_pipeline(context: StepContext, costs: PipelineCosts) -> tuple[ComputeTime, list[TransferTime], float]:
    """Return the times of a pipeline step for the rank that is busy longest: its computing time, its transfers, and the
    seconds in which it waits for other stages."""
    places, forward_s, backward_s = _time_places(context, costs)
    ends_s = costs.simulate(forward_s, backward_s, _build_hop(context))
    met_s = max(end_s + place.reduced_s for end_s, place in zip(ends_s, places, strict=True))
    total_s = met_s + max(place.updated_s for place in places)
    most = max(places, key=lambda place: place.busy_s)
    idle_s = 0.0 if math.isclose(total_s, most.busy_s) else total_s - most.busy_s  # no idle time from rounding errors
    return most.own, [*most.exchanged, *most.moved], idle_s


def list_pipeline_passes(context: StepContext, costs: PipelineCosts) -> Sequence[SimulatedPass]:
    """Return start and end of each pass of a pipeline step, in seconds."""
    _, forward_s, backward_s = _time_places(context, costs)
    return costs.list_passes(forward_s, backward_s, _build_hop(context))


def _time_places(context: StepContext, costs: PipelineCosts) -> tuple[list[_PlaceTime], list[float], list[float]]:
    """Return three lists: the times of a step for each position of the pipeline, the seconds of one forward pass for
    each stage, and the seconds of one backward pass for each stage."""
    passes, exchanges = _time_stages(context, costs.parts)
    places = [_time_place(context, place, passes, exchanges) for place in costs.places]
    # a rehearsal runs the first rank only, so all positions are scaled by its ratio
    factor = 1.0 if context.rehearsed_s is None else context.rehearsed_s / places[0].own.total
    factor *= context.contention

    def sum_s(found: list[TransferTime], when: StepPass) -> float:
        return sum(one.whole_s for one in found if one.transfer.when == when)

    pairs = list(zip(passes, exchanges, strict=True))
    return (
        [one._replace(own=one.own.scaled(factor)._replace(doubt=context.doubt)) for one in places],
        [factor * one.forward + sum_s(found, "forward") for one, found in pairs],
        [factor * (one.recomputation + one.backward) + sum_s(found, "backward") for one, found in pairs],
    )


def _time_stages(context: StepContext, parts: tuple[Part, ...]) -> tuple[list[PassTimes], list[list[TransferTime]]]:
    """Return the computing times and the tensor-parallel exchanges of each stage for one micro-batch."""
    spec, load = context.spec, context.load
    network = get_network(spec)
    slices, seconds = TensorSlices(spec.parallel.tensor, spec.parallel.sequence), dict[Transfer, float]()
    passes, exchanges = list[PassTimes](), list[list[TransferTime]]()
    for number, first in enumerate(list_alike(network, parts)):
        if first < number:  # equal stages take equal time
            passes.append(passes[first])
            exchanges.append(exchanges[first])
            continue
        part = parts[number]
        its = load._replace(checkpointing=load.checkpointing and (load.software.last_again or not part.last))
        found = list_exchanges(network, its, part, slices)
        passes.append(_time_part(network, its, part, slices, context.rates))
        for one in found:
            if one not in seconds:
                seconds[one] = compute_transfer_s(one, spec, context.machine)
        exchanges.append([TransferTime(one, seconds[one], seconds[one]) for one in found])
    return passes, exchanges


@functools.lru_cache(maxsize=4096)  # many stages are equal, and points of a sweep share them
def _time_part(network: Stacks, load: Workload, part: Part, slices: TensorSlices, known: DeviceRates) -> PassTimes:
    sliced = cut_network(network, part, slices.ranks)
    exchanges = sum(one.calls for one in list_exchanges(network, load, part, slices) if one.when == "forward")
    forward = compute_blocks(sliced, load).plus(PassWork(operations=EXCHANGE_OPERATIONS * exchanges))
    if part.last:
        forward = forward.plus(compute_ends(sliced, load))
    again = compute_recomputed(sliced, load) if forward.matmuls else PassWork()
    return time_passes(forward, again, known)


@functools.lru_cache(maxsize=4096)
def list_exchanges(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> list[Transfer]:
    """Return the tensor-parallel exchanges of one stage in a forward and a backward pass.

    States are exchanged at the input and output of each sub-layer (see `_list_edges`). The loss adds two all-reduces:
    one with a single fp32 number per label, and one with two fp32 numbers per label. The recomputation of a block ends
    with the last matrix product of the block. The exchange after this product is therefore not repeated.
    """
    if slices.ranks == 1:
        return []
    found = list[Transfer]()

    def exchange(states: int, ends: int, begins: int, again_ends: int) -> None:
        found.extend(_list_edges(states, ends, begins, slices))
        if load.checkpointing:  # the recomputation has the exchanges of a forward, and runs before its backward
            again = [one for one in _list_edges(states, again_ends, begins, slices) if one.when == "forward"]
            found.extend(one._replace(when="backward") for one in again)

    layers = part.blocks([stack.layers for stack in network.stacks])
    for stack, blocks in zip(network.stacks, layers, strict=True):
        state_bytes = load.width * load.micro * network.width
        begun = len(stack.block) * len(blocks)
        exchange(state_bytes * load.tokens(stack.tokens), begun + part.first, begun, begun - len(blocks))
        for other in [one.over for one in stack.block if isinstance(one, Attention) and one.over is not None]:
            exchange(state_bytes * load.tokens(network.named(other).tokens), 0, len(blocks), 0)
    if part.last:
        rows = load.micro * load.tokens(network.stacks[-1].tokens)
        found += _list_edges(load.width * rows * network.width, 0, 1, slices)
        found += [Transfer("all_reduce", "forward", FULL * rows * n, 1, 1, False, slices.ranks) for n in (1, 2)]
    return found


def _list_edges(states: int, ends: int, begins: int, slices: TensorSlices) -> list[Transfer]:
    """Return the exchanges between tensor-parallel ranks at the inputs and outputs of sub-layers, in a forward and a
    backward pass. Each exchange has `states` bytes. `begins` is the number of sub-layers with an exchange at their
    input, and `ends` the number of sub-layers with an exchange at their output.

    Without sequence parallelism, a forward pass has exchanges only at outputs. A backward pass has exchanges only at
    inputs, for the gradients of these inputs. With sequence parallelism, each pass has exchanges at inputs and outputs.
    """
    kinds: tuple[tuple[CollectiveKind, StepPass, int], ...] = (
        ("all_reduce", "forward", ends),
        ("all_reduce", "backward", begins),
    )
    if slices.sequence:
        kinds = (
            ("reduce_scatter", "forward", ends), ("all_gather", "forward", begins),
            ("all_gather", "backward", ends), ("reduce_scatter", "backward", begins),
        )  # fmt: skip
    return [Transfer(kind, when, states * calls, calls, 1, False, slices.ranks) for kind, when, calls in kinds if calls]


def _time_place(
    context: StepContext, place: PlaceCosts, passes: list[PassTimes], exchanges: list[list[TransferTime]]
) -> _PlaceTime:
    spec, steps = context.spec, context.spec.accumulation
    updating = compute_update_s(spec, place.step.updated, context.rates)
    own = build_compute_time([passes[stage] for stage in place.stages], updating, steps)
    exchanged = [
        TransferTime(one.transfer._replace(passes=steps), steps * one.whole_s, steps * one.exposed_s)
        for stage in place.stages
        for one in exchanges[stage]
    ]
    return _PlaceTime(own, exchanged, time_transfers(place.step.transfers, own, spec, context.machine, 1))


def _build_hop(context: StepContext) -> Callable[[int, int], float]:
    """Return a function that gives the seconds of sending states from one position of the pipeline to another.

    All ranks of a position send at the same time. If the receivers are on other nodes, the ranks of a node share the
    node's links to other nodes.
    """
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
