"""Facts about the ZeRO engine: partition of weights, gradients and optimizer state at each stage, DeepSpeed's
compiled ops, and its config."""

import functools
from typing import TYPE_CHECKING, Any

from bench.core.engine_facts import (
    FROZEN_FORMS,
    WITHOUT_INT8,
    Division,
    EngineFacts,
    FrozenWeights,
    Member,
    Rehearsal,
)
from bench.core.spec import Device, OptimizerSpec, RunSpec
from bench.engines.deepspeed.options import Options, Zero

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes

_QUIET: dict[str, Any] = {
    "steps_per_print": None,
    "wall_clock_breakdown": False,  # synchronises before and after every phase
    "memory_breakdown": False,
    "dump_state": False,
    "flops_profiler": {"enabled": False},
    # on by default, and then synchronises the device twice in every micro-step (utils/timer.py, ThroughputTimer)
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
}
"""Settings that turn off DeepSpeed's own timers and printing, so that they do not slow down measured steps. The
section `comms_logger` is omitted on purpose: its presence alone enables a log that synchronises at every collective
(0.19.8, comm/config.py)."""
_TRAINED: frozenset[Member] = frozenset({"evaluate", "predict_tokens", "set_learning_rate"})
_FIRST = Rehearsal(
    "first", "at stage 3 DeepSpeed compares rank 0's lists with those of the other ranks, which a rehearsal lacks"
)


def build_deepspeed_config(options: Options, spec: RunSpec) -> dict[str, Any]:
    """Return DeepSpeed's config as plain types. The keys are those of its config.json."""
    optimizer = spec.optimizer
    return {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": spec.batch.micro,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": optimizer.gradient_clipping,  # DeepSpeed 0.19.8 clips at 1.0 if unset; 0 disables clipping
        **_describe_own_optimizer(optimizer),
        "bf16": {"enabled": spec.precision == "bf16", **options.bf16.model_dump()},
        "fp16": {"enabled": spec.precision == "fp16", "auto_cast": False, **options.fp16.model_dump()},
        "torch_autocast": {"enabled": False},
        "data_types": {"grad_accum_dtype": options.data_types.grad_accum_dtype or spec.precision},
        "communication_data_type": options.communication_data_type or spec.precision,
        "gradient_allreduce_op": "mean",
        "prescale_gradients": options.prescale_gradients,
        "gradient_predivide_factor": options.gradient_predivide_factor,
        "zero_optimization": options.model_dump(mode="json", include=set(Zero.model_fields), exclude_none=True),
        **({"aio": options.aio.model_dump()} if options.disk_tiers else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": options.zero_force_ds_cpu_optimizer,
        "disable_python_gc": options.disable_python_gc,
        **_QUIET,
    }


def _describe_own_optimizer(optimizer: OptimizerSpec) -> dict[str, Any]:
    """Return the section `optimizer` of DeepSpeed's config. Return an empty dict for an optimizer that DeepSpeed does
    not have. Such an optimizer is passed directly to deepspeed.initialize."""
    if optimizer.name != "adamw":
        return {}
    params = {
        **optimizer.model_dump(mode="json", include={"lr", "betas", "eps", "weight_decay"}),
        "adam_w_mode": True,
        "torch_adam": optimizer.implementation != "native",
        # DeepSpeed passes unknown keys to torch.optim.AdamW
        **({"fused": True} if optimizer.implementation == "fused" else {}),
    }
    return {"optimizer": {"type": "AdamW", "params": params}}


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts about this engine for a spec: what it supports, and functions that predict its costs."""
    options = Options.of(spec)
    return EngineFacts(
        label=f"ZeRO stage {options.stage}",
        distinguishing=frozenset({"stage"}),
        division=find_division(options.stage, spec.data_parallel),
        rehearsal=_FIRST if options.stage == 3 else Rehearsal("any"),
        compiled_ops=_list_operations(options, spec),
        scratch=frozenset(tier.nvme_path for tier in options.disk_tiers if tier.nvme_path),
        # Stages 1 to 3 sum in fp64, and stage 0 does here. Exceptions are fp16, and DeepSpeed's BF16_Optimizer, which
        # it uses where gradients are summed in another precision.
        sums_norms=spec.precision != "fp16" and options.data_types.grad_accum_dtype in (None, spec.precision),
        divides_by_tokens=True,
        frozen=find_frozen(options),
        # DeepSpeed 0.19.8 does not restore moments that are on NVMe: the losses after a resume differ
        members=_TRAINED if options.disk_tiers else _TRAINED | {"save", "load", "list_weights"},
        offload=options.offload,
        works_on_host=options.stage == 3,  # the coordinator gathers and releases weights module by module
        host_operations=_HOST_OPERATIONS[options.stage] if options.stage > 1 else 0.0,
        host_operations_of_update=_HOST_OPERATIONS[options.stage] if options.stage < 2 else 0.0,
        deepspeed_config=functools.partial(build_deepspeed_config, options),
        memory=functools.partial(_predict_memory, options),
        step=functools.partial(_predict_step, options),
    )


_HOST_OPERATIONS = {0: 8.0, 1: 20.0, 2: 20.0, 3: 78.0}
"""Operations of the host per trained tensor, by stage. Gradients are copied into buckets in Python; stage 3 also
gathers and releases each weight. Stages 0 and 1 do this in the last micro-step of a step only (DeepSpeed 0.19.8: see
`is_gradient_accumulation_boundary` in runtime/engine.py and runtime/zero/stage_1_and_2.py).

The numbers follow from the steps of mt5_large at micro-batch 16 without accumulation on an H200, compared with those of
ddp. The steps of mt5_base and of micro-batch 64 were not used (results/predictions/gpu_times.csv)."""


def find_division(stage: int, ranks: int) -> Division:
    """Return the numbers of ranks among which weights, gradients and optimizer state are partitioned at a ZeRO stage
    (arXiv 1910.02054, section 5). A number of 1 means not partitioned."""
    return Division(*(ranks if stage >= first else 1 for first in (3, 2, 1)))


def find_frozen(options: Options) -> FrozenWeights:
    """Return the forms of frozen weights (not quantised, nf4, int8) that a ZeRO stage supports. Stages 0 to 2 do not
    change frozen weights, so they support every form of them.

    Stage 3 partitions the packed bytes of nf4 weights like other weights. However, bitsandbytes keeps a reference to
    the packed weights from forward to backward. The packed weights therefore stay whole between the two passes.
    """
    if options.stage < 3:
        return FrozenWeights(FROZEN_FORMS)
    if options.quantised:
        return FrozenWeights(
            frozenset({"none"}), f"engine.{options.quantised[0]}=true would quantise these weights a second time"
        )
    return WITHOUT_INT8


def _predict_memory(
    options: Options, spec: RunSpec, model: "ModelSizes", device: Device, room: int | None, rehearsed: bool
) -> "EngineMemory":
    # imported here because it imports numpy, which other users of facts do not need
    from bench.engines.deepspeed import costs

    return costs.ZeroMemory(costs.build_zero_run(options, spec, model, device, room, rehearsed=rehearsed))


def _predict_step(options: Options, spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.deepspeed import costs

    return costs.predict_step(options, spec, model, device)


def _list_operations(options: Options, spec: RunSpec) -> tuple[str, ...]:
    """Return the names of DeepSpeed's compiled ops that a run loads. A name is that of the op's builder in
    deepspeed.ops.op_builder, without `Builder`.

    Sources in DeepSpeed 0.19: runtime/engine.py (get_optimizer_configuration), runtime/swap_tensor and CUDAQuantizer in
    runtime/zero/partition_parameters.py. DeepSpeed's op for communication over shared memory is excluded, because
    `library.load_deepspeed` prevents its build.
    """
    native, on_disk = spec.optimizer.implementation == "native", bool(options.disk_tiers)
    loaded = {
        "CPUAdam": native and options.optimizer_tier is not None,
        "FusedAdam": native and options.optimizer_tier is None,
        "Quantizer": bool(options.quantised),
        "PinMemory": on_disk,
        "AsyncIO": on_disk,
    }
    return tuple(name for name, needed in loaded.items() if needed)
