"""What FSDP2 says of itself: what it divides among which ranks, and what it can do beside training."""

from typing import TYPE_CHECKING

from bench.core.engine_facts import Division, EngineFacts, Rehearsal
from bench.core.spec import Device, RunSpec
from bench.engines.fsdp.options import Options, options_of, shard_ranks

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes


def facts(spec: RunSpec) -> EngineFacts:
    """Return what holds for this spec. At rest there are 12 bytes per parameter, fp32 weights and two moments, where
    ZeRO has 14 to 16: weights below fp32, their fp32 masters, the moments, and at stage 3 gradients."""
    options = options_of(spec)
    ranks = shard_ranks(options, spec)
    return EngineFacts(
        label=_label(options, ranks < spec.data_parallel),
        distinguishing=frozenset({"reshard_after_forward", "shard_ranks", "offload"}),
        division=Division(weights=ranks, gradients=ranks, optimizer=ranks),
        rehearsal=Rehearsal("any"),
        sums_norms=True,
        divides_by_tokens=True,
        members=frozenset({"evaluate", "set_learning_rate", "save", "load"}),
        memory=_memory,
        step=_step,
    )


def _label(options: Options, hybrid: bool) -> str:
    """Return FSDP2 with what tells it from its plain form."""
    again = options.reshard_after_forward
    kept = ", weights kept for backward" if again is False else f", weights kept among {again} for backward"
    parts = (", hybrid shards" * hybrid, kept * (again is not True), ", offloaded" * options.offload)
    return f"FSDP2{''.join(parts)}"


def _memory(spec: RunSpec, model: "ModelSizes", device: Device, room: int | None, rehearsed: bool) -> "EngineMemory":
    from bench.engines.fsdp import costs  # numpy, which readers of facts need not have

    return costs.memory(options_of(spec), spec, model, device, rehearsed)


def _step(spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.fsdp import costs

    return costs.step(options_of(spec), spec, model, device)
