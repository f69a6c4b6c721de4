"""Facts about the FSDP2 engine: how weights, gradients and optimizer state are partitioned, among which ranks, and
which optional methods the engine has."""

from typing import TYPE_CHECKING

from bench.core.engine_facts import WITHOUT_INT8, Division, EngineFacts, Rehearsal
from bench.core.spec import Device, RunSpec
from bench.engines.fsdp.options import Options, shard_ranks

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes


_HOST_OPERATIONS, _HOST_OPERATIONS_OF_UPDATE = 11.0, 9.0
"""`EngineFacts.host_operations` and `host_operations_of_update`: Python hooks of each block in every pass, and the
optimizer, which handles each tensor as a DTensor. Their sum follows from the steps of mt5_large at micro-batch 16 on an
H200, compared with those of ddp (results/measured/h200.zip). The shares follow from a T5 with 24 small blocks on a CPU,
with 1 and with 8 accumulated micro-steps: 48 to 62 % of the additional time was in every micro-step (three repeats)."""


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts about this engine for a spec: what it supports, and functions that predict its costs.

    Between steps FSDP2 holds 12 bytes per parameter: fp32 weights and two moments. ZeRO in bf16 or fp16 holds 14 bytes
    per parameter: low-precision weights, fp32 master weights, and two moments. At stage 3, ZeRO holds up to 16 bytes,
    because gradients stay allocated, too.
    """
    options, ranks = Options.of(spec), shard_ranks(Options.of(spec), spec)
    again = options.reshard_after_forward
    kept = "" if again is True else ", weights kept" + (f" among {again}" if again else "") + " for backward"
    hybrid = ", hybrid shards" if ranks < spec.data_parallel else ""
    return EngineFacts(
        label=f"FSDP2{hybrid}{kept}{', offloaded' if options.offload else ''}",
        distinguishing=frozenset({"reshard_after_forward", "shard_ranks", "offload"}),
        division=Division(weights=ranks, gradients=ranks, optimizer=ranks),
        rehearsal=Rehearsal("any"),
        offload="offload" if options.offload else "",
        sums_norms=True,
        divides_by_tokens=True,
        host_operations=_HOST_OPERATIONS,
        host_operations_of_update=_HOST_OPERATIONS_OF_UPDATE,
        frozen=WITHOUT_INT8,
        members=frozenset({"evaluate", "predict_tokens", "set_learning_rate", "save", "load", "list_weights"}),
        memory=_predict_memory,
        step=_predict_step,
    )


def _predict_memory(
    spec: RunSpec, model: "ModelSizes", device: Device, room: int | None, rehearsed: bool
) -> "EngineMemory":
    # imported here because it imports numpy, which other users of facts do not need
    from bench.engines.fsdp import costs

    return costs.FsdpMemory(costs.build_fsdp_run(spec, model, device, rehearsed=rehearsed))


def _predict_step(spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.fsdp import costs

    return costs.predict_step(spec, model, device)
