"""Facts about FSDP2: states that it divides, the ranks that share them, and its optional members."""

from typing import TYPE_CHECKING

from bench.core.engine_facts import Division, EngineFacts, Rehearsal
from bench.core.spec import Device, RunSpec
from bench.engines.fsdp.options import decode_options, shard_ranks

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts of this spec's engine. Between steps it holds 12 bytes per parameter, fp32 weights and two
    moments. ZeRO holds 14 to 16: weights below fp32, fp32 masters, moments, and at stage 3 gradients."""
    options, ranks = decode_options(spec), shard_ranks(decode_options(spec), spec)
    again = options.reshard_after_forward
    kept = "" if again is True else ", weights kept" + (f" among {again}" if again else "") + " for backward"
    hybrid = ", hybrid shards" if ranks < spec.data_parallel else ""
    return EngineFacts(
        label=f"FSDP2{hybrid}{kept}{', offloaded' if options.offload else ''}",
        distinguishing=frozenset({"reshard_after_forward", "shard_ranks", "offload"}),
        division=Division(weights=ranks, gradients=ranks, optimizer=ranks),
        rehearsal=Rehearsal("any"),
        sums_norms=True,
        divides_by_tokens=True,
        members=frozenset({"evaluate", "set_learning_rate", "save", "load"}),
        memory=_predict_memory,
        step=_predict_step,
    )


def _predict_memory(
    spec: RunSpec, model: "ModelSizes", device: Device, room: int | None, rehearsed: bool
) -> "EngineMemory":
    from bench.engines.fsdp import costs  # imports numpy, which readers of facts do not need

    return costs.FsdpMemory(costs.build_fsdp_run(spec, model, device, rehearsed=rehearsed))


def _predict_step(spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.fsdp import costs

    return costs.predict_step(spec, model, device)
