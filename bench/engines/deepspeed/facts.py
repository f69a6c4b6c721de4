"""What DeepSpeed's ZeRO says of itself: what a stage divides, which ops it compiles, what it cannot do."""

import functools
from typing import TYPE_CHECKING, Any

from bench.engine_facts import Division, EngineFacts, Rehearsal
from bench.engines.deepspeed.config import build_deepspeed_config
from bench.engines.deepspeed.options import Options, decode_options
from bench.spec import Device, RunSpec

if TYPE_CHECKING:
    from bench.engine_costs import EngineMemory, EngineStep, ModelSizes

_FIRST = Rehearsal(
    "first", "at stage 3 DeepSpeed compares rank 0's lists with the others', which a pretended rank 0 cannot answer"
)


def facts(spec: RunSpec) -> EngineFacts:
    """Return what holds for this spec."""
    options = decode_options(spec)
    return EngineFacts(
        label=f"ZeRO stage {options.stage}",
        distinguishing=frozenset({"stage"}),
        division=find_division(options.stage, spec.data_parallel),
        rehearsal=_FIRST if options.stage == 3 else Rehearsal("any"),
        compiled_ops=_list_operations(options, spec),
        # Stages 1 to 3 sum in fp64 by themselves. Not so in fp16, nor DeepSpeed's BF16_Optimizer, which it takes where
        # gradients are summed in another precision.
        sums_norms=spec.precision != "fp16" and options.data_types.grad_accum_dtype in (None, spec.precision),
        divides_by_tokens=True,
        members=frozenset({"evaluate", "set_learning_rate", "save", "load"}),
        works_on_host=options.stage == 3,  # its coordinator gathers and releases weights from module to module
        deepspeed_config=_build_config,
        memory=functools.partial(_predict_memory, options),
        step=functools.partial(_predict_step, options),
    )


def find_division(stage: int, ranks: int) -> Division:
    """Return what a stage divides (arXiv 1910.02054, section 5)."""
    return Division(
        weights=ranks if stage >= 3 else 1, gradients=ranks if stage >= 2 else 1, optimizer=ranks if stage >= 1 else 1
    )


def _build_config(spec: RunSpec) -> dict[str, Any]:
    return build_deepspeed_config(decode_options(spec), spec)


def _predict_memory(
    options: Options, spec: RunSpec, model: "ModelSizes", device: Device, room: int | None, rehearsed: bool
) -> "EngineMemory":
    from bench.engines.deepspeed import costs  # numpy, which readers of facts need not have

    return costs.predict_memory(options, spec, model, device, room, rehearsed)


def _predict_step(options: Options, spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.deepspeed import costs

    return costs.predict_step(options, spec, model, device)


def _list_operations(options: Options, spec: RunSpec) -> tuple[str, ...]:
    """Return the ops that a run loads: their builders' names in deepspeed.ops.op_builder, without `Builder`.

    From DeepSpeed 0.19: runtime/engine.py (get_optimizer_configuration), runtime/swap_tensor and CUDAQuantizer in
    runtime/zero/partition_parameters.py. The engine keeps it from building its shared-memory op.
    """
    native = spec.optimizer.implementation == "native"
    optimizer, weights = options.offload_optimizer, options.offload_param
    offloaded = optimizer is not None and optimizer.device != "none"
    on_disk = any(tier is not None and tier.device == "nvme" for tier in (optimizer, weights))
    quantised = (
        options.zero_quantized_weights
        or options.zero_quantized_nontrainable_weights
        or options.zero_quantized_gradients
    )
    loaded = {
        "CPUAdam": native and offloaded,
        "FusedAdam": native and not offloaded,
        "Quantizer": quantised,
        "PinMemory": on_disk,
        "AsyncIO": on_disk,
    }
    return tuple(name for name, needed in loaded.items() if needed)
