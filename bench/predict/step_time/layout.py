"""Seconds of a step where the blocks of one stack are divided among devices: inside of each, and from block to block.

Tensor parallelism (arXiv 1909.08053, section 3) divides heads, the width between an MLP's matrices and the vocabulary;
each sub-layer ends in an all-reduce of its output, for which everything waits, and so does its backward. A pipeline's
stages have equally many blocks, the last one the head as well; its time is that of its schedule, played through
(bench.distributed.simulation). Replicas all-reduce their gradients after the last backward, beside nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.distributed.schedule import PipelineSize, ScheduleName, build_computation
from bench.distributed.simulation import simulate_schedule
from bench.errors import UserError
from bench.machine import Machine
from bench.predict.forward import compute_blocks, compute_ends
from bench.predict.step_time.network import RankSpan, compute_collective_s, compute_hop_s
from bench.predict.step_time.rates import DeviceRates, read_rates
from bench.predict.work import PassWork, compute_backward
from bench.predict.workload import Workload
from bench.spec import Precision
from bench.stacks import Attention, Mlp, Stack, Stacks, count_parameters

REDUCTION_OPERATIONS = 2
"""What the host starts for one all-reduce of tensor parallelism: a function of autograd's, and the collective. Chosen
as START_S of `rates` was: one or three would be plausible too."""


class DeviceLayout(NamedTuple):
    """How the devices of one node share a step."""

    tensor: int  # devices that share each block
    pipeline: int  # stages, of equally many blocks
    data: int  # replicas
    micro_batches: int  # of each replica
    schedule: ScheduleName = "1f1b"


class StageTime(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward: float


class Kernels(NamedTuple):
    """What is run beside the network's own sizes."""

    precision: Precision
    fused: bool  # element-wise work moves what it does when compiled, but Python starts each operation by itself
    update_bytes: float  # that the optimizer moves per parameter


def predict_layout_s(
    network: Stacks, load: Workload, layout: DeviceLayout, machine: Machine, kernels: Kernels
) -> float:
    """Return the seconds of a step; UserError where the layout does not divide the network, or the machine lacks a
    number."""
    sliced = slice_network(network, layout)
    known = read_rates(machine.model_dump_json(), kernels.precision, load.device)
    reduction_s = _compute_reductions_s(sliced, load, layout, machine)
    stages = [
        _time_stage(sliced, load, known, reduction_s, fused=kernels.fused, last=stage == layout.pipeline - 1)
        for stage in range(layout.pipeline)
    ]
    parameters = count_parameters(sliced)  # with the embedding: of the first stage, and of the last one
    reduced_s = compute_collective_s("all_reduce", load.width * parameters, RankSpan(1, layout.data), machine)
    updated_s = kernels.update_bytes * parameters / known.memory
    return _play_schedule(sliced, load, layout, machine, stages) + reduced_s + updated_s


def predict_micro_step_s(network: Stacks, load: Workload, tensor: int, machine: Machine, kernels: Kernels) -> float:
    """Return the seconds of forward and backward of one micro-batch on `tensor` devices."""
    layout = DeviceLayout(tensor, 1, 1, 1)
    sliced = slice_network(network, layout)
    known = read_rates(machine.model_dump_json(), kernels.precision, load.device)
    reduction_s = _compute_reductions_s(sliced, load, layout, machine)
    return sum(_time_stage(sliced, load, known, reduction_s, fused=kernels.fused, last=True))


def slice_network(network: Stacks, layout: DeviceLayout) -> Stacks:
    """Return what one device of one stage has."""
    if layout.pipeline > 1 and len(network.stacks) > 1:
        rule = f"{len(network.stacks)} stacks have no equal stages"
        raise UserError(f"pipeline={layout.pipeline}", rule, "choose a model of one stack, or one stage")
    stacks = tuple(_slice_stack(stack, layout) for stack in network.stacks)
    return dataclasses.replace(network, stacks=stacks, vocab=-(-network.vocab // layout.tensor))


def _slice_stack(stack: Stack, layout: DeviceLayout) -> Stack:
    if stack.layers % layout.pipeline:
        rule = f"does not divide {stack.layers} layers into equal stages"
        raise UserError(f"pipeline={layout.pipeline}", rule, "choose a divisor")
    block = tuple(_slice_part(part, layout.tensor) for part in stack.block)
    return dataclasses.replace(stack, layers=stack.layers // layout.pipeline, block=block)


def _slice_part(part: Attention | Mlp, tensor: int) -> Attention | Mlp:
    whole = part.heads if isinstance(part, Attention) else part.inner
    if whole % tensor:
        what = "heads" if isinstance(part, Attention) else "elements between an MLP's matrices"
        raise UserError(f"tensor={tensor}", f"does not divide {whole} {what}", "choose a divisor")
    if isinstance(part, Mlp):
        return dataclasses.replace(part, inner=part.inner // tensor)
    groups = None if part.key_heads is None else max(1, part.key_heads // tensor)
    return dataclasses.replace(part, heads=part.heads // tensor, key_heads=groups)


def _time_stage(
    sliced: Stacks, load: Workload, known: DeviceRates, reduction_s: float, *, fused: bool, last: bool
) -> StageTime:
    """Return a stage's seconds. Checkpointed blocks run again but on the last stage, where backward follows at once
    (VIA-Research/vTrain, predictor.py, has it so)."""
    blocks = _count_work(compute_blocks, sliced, load, fused=fused)
    if reduction_s:
        started = REDUCTION_OPERATIONS * sum(stack.layers * len(stack.block) for stack in sliced.stacks)
        blocks = blocks.plus(PassWork(operations=started))
    there = blocks.plus(_count_work(compute_ends, sliced, load, fused=fused)) if last else blocks
    again_s = known.pass_s(blocks) + reduction_s if load.checkpointing and not last else 0.0
    backward_s = again_s + known.pass_s(compute_backward(there)) + reduction_s
    return StageTime(known.pass_s(there) + reduction_s, backward_s)


def _count_work(
    compute: Callable[[Stacks, Workload], PassWork], sliced: Stacks, load: Workload, *, fused: bool
) -> PassWork:
    work = compute(sliced, load)
    return compute(sliced, load._replace(compiled=True))._replace(operations=work.operations) if fused else work


def _compute_reductions_s(sliced: Stacks, load: Workload, layout: DeviceLayout, machine: Machine) -> float:
    """Return the seconds of a pass's all-reduces: one behind each sub-layer, of its output or its input's gradient."""
    return sum(
        stack.layers
        * len(stack.block)
        * compute_collective_s(
            "all_reduce", _count_state_bytes(sliced, stack, load), RankSpan(1, layout.tensor), machine
        )
        for stack in sliced.stacks
    )


def _count_state_bytes(network: Stacks, stack: Stack, load: Workload) -> int:
    """Bytes of the states between two blocks in one micro-batch."""
    return load.width * load.micro * load.tokens(stack.tokens) * network.width


def _play_schedule(
    sliced: Stacks, load: Workload, layout: DeviceLayout, machine: Machine, stages: Sequence[StageTime]
) -> float:
    """Return the seconds from the first forward to the last backward."""
    size = PipelineSize(layout.pipeline, 1, layout.micro_batches)
    computation = build_computation(layout.schedule, size)
    hop_s = 0.0
    if layout.pipeline > 1:
        hop_s = compute_hop_s(_count_state_bytes(sliced, sliced.stacks[0], load), machine)
    forward_s, backward_s = [one.forward for one in stages], [one.backward for one in stages]
    return simulate_schedule(computation, size, forward_s, backward_s, hop_s).total_s
