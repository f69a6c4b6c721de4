"""Every option of DeepSpeed 0.19's ZeRO section, and those beside it that decide speed, memory or numbers.

Names and defaults are DeepSpeed's (runtime/zero/config.py, runtime/zero/offload_config.py, runtime/zenflow/
zenflow_config.py, runtime/zero/leaf_module_config.py, runtime/precision_config.py), with two exceptions: deprecated
options are left out, and those in WRITTEN_OUT have no default, since they decide what a comparison of stages shows.
"""

import functools
import json
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from bench.core.spec import Frozen, Positive, Precision, RunSpec
from bench.engines.precision.optimizer import LossScale

Share = Annotated[float, Field(ge=0, le=1)]
Tier = Literal["none", "cpu", "nvme"]


class OffloadParam(Frozen):
    """Where stage 3 keeps its partitions of the weights."""

    device: Tier = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    buffer_size: NonNegativeInt = Field(100_000_000, description="elements")
    max_in_cpu: NonNegativeInt = Field(1_000_000_000, description="elements, with nvme")
    pin_memory: bool = True


class OffloadOptimizer(Frozen):
    """Where the optimizer's state lies, and with it where AdamW runs."""

    device: Tier = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Share = Field(1.0, description="of the state that is offloaded; less than all with stage 3 only")
    super_offload: bool = False
    cpuadam_cores_perc: Share = 0.8


class ZenFlow(Frozen):
    """Updates the most important gradients on the device and the others later on the CPU (arXiv 2505.12242)."""

    topk_ratio: float = Field(0.1, gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: int | Literal["auto"] = "auto"
    update_interval: Positive | Literal["auto"] = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: Share = 0.99
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: Share = 0.5


class LeafModule(Frozen):
    """Modules that stage 3 fetches whole, without hooks on their parts."""

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


class Zero(Frozen):
    """The section `zero_optimization`. Sizes are elements, not bytes."""

    stage: Literal[0, 1, 2, 3] = Field(
        description="partitioned among the ranks: 0: nothing; 1: optimizer states; 2: gradients too; 3: weights too"
    )

    # gradients
    reduce_bucket_size: Positive | None = None
    overlap_comm: bool | None = Field(
        None, description="reduce a bucket while backward goes on; stages 1 and 2 hold two buckets then"
    )
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="stages 1 and 2: one all-reduce in place of a reduce per owner"
    )
    round_robin_gradients: bool = False
    ignore_unused_parameters: bool = True
    compute_grad_norm: bool = True

    # weights, stages 1 and 2
    allgather_partitions: bool = Field(True, description="read by nothing in 0.19.8")
    allgather_bucket_size: NonNegativeInt = Field(
        500_000_000, description="unused as well, where torch has all_gather_into_tensor"
    )
    parameter_alignment: bool = False

    # weights, stage 3
    stage3_prefetch_bucket_size: NonNegativeInt | None = None
    stage3_param_persistence_threshold: NonNegativeInt | None = None
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        None, description="ends prefetching; a fetch that is needed goes on"
    )
    stage3_max_reuse_distance: NonNegativeInt | None = None
    stage3_model_persistence_threshold: NonNegativeInt = 2**63 - 1
    stage3_module_granularity_threshold: int = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    sub_group_size: NonNegativeInt = Field(1_000_000_000, description="AdamW goes through the partition in such pieces")
    memory_efficient_linear: bool = True
    override_module_apply: bool = True
    leaf_module: LeafModule = LeafModule()

    # ZeRO++ (arXiv 2306.10209), stage 3
    zero_hpz_partition_size: NonNegativeInt = Field(
        1, description="ranks that hold a second copy of the weights among them"
    )
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False

    # offload
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: ZenFlow | None = None
    save_muon_momentum_buffer_in_memory: bool = False

    # checkpoints and debugging: nothing that a run here does
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    stage3_gather_16bit_weights_on_model_save: bool = False
    pipeline_loading_checkpoint: bool = False
    legacy_stage1: bool = False
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False

    @model_validator(mode="after")
    def _at_this_stage(self) -> Self:
        for name, stages in STAGES.items():
            value, acts = getattr(self, name), self.stage in stages
            if acts and value is None and name in WRITTEN_OUT:
                raise ValueError(
                    f"{name} is not given, but decides what stage {self.stage} moves and holds; write it out"
                )
            if not acts and value != type(self).model_fields[name].get_default():
                where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
                raise ValueError(f"{name}={value} does nothing at stage {self.stage}, only at {where}; leave it out")
        return self


WRITTEN_OUT = frozenset({
    "reduce_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance",
})  # fmt: skip
"""Options without a default: a stage where they act must be told."""

STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("reduce_bucket_size", "overlap_comm", "contiguous_gradients", "reduce_scatter",
                     "offload_optimizer", "zenflow"), (1, 2, 3)),
    **dict.fromkeys(("use_multi_rank_bucket_allreduce", "round_robin_gradients", "compute_grad_norm",
                     "allgather_partitions", "allgather_bucket_size", "parameter_alignment"), (1, 2)),
    "ignore_unused_parameters": (2,),
    **dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
                     "stage3_max_live_parameters", "stage3_max_reuse_distance",
                     "stage3_model_persistence_threshold", "stage3_module_granularity_threshold",
                     "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "sub_group_size",
                     "memory_efficient_linear", "override_module_apply", "leaf_module", "zero_hpz_partition_size",
                     "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
                     "offload_param", "save_muon_momentum_buffer_in_memory"), (3,)),
}  # fmt: skip
"""Where an option acts. One set elsewhere is refused: a sweep over it would measure the same thing again and again."""


class Bf16(Frozen):
    """The section `bf16` of a bf16 run."""

    immediate_grad_update: bool = Field(False, description="acts with data_types.grad_accum_dtype=fp32 at stage 1")
    check_grad_overflow: bool = Field(
        True, description="stages 1 and 2 read a flag from the device in every step; false waits less"
    )
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16(LossScale):
    """The section `fp16` of an fp16 run."""

    fp16_master_weights_and_grads: bool = False


class DataTypes(Frozen):
    """The section `data_types`."""

    grad_accum_dtype: Precision | None = Field(
        None,
        description="of the sum over micro-steps; None: the run's precision. fp32 in a bf16 run at stage 1 makes "
        "DeepSpeed take its BF16_Optimizer, which knows neither reduce_bucket_size nor overlap_comm",
    )


class Options(Zero):
    """What conf/engine may say: the ZeRO section flat, and what lies beside it in DeepSpeed's config."""

    communication_data_type: Precision | None = Field(
        None, description="of reduced gradients; None: the run's precision"
    )
    prescale_gradients: bool = False
    gradient_predivide_factor: float = Field(1.0, gt=0)
    zero_force_ds_cpu_optimizer: bool = Field(
        True, description="with offload, refuse any optimizer but DeepSpeed's own"
    )
    disable_python_gc: bool = False
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    data_types: DataTypes = DataTypes()


def decode_options(spec: RunSpec) -> Options:
    """Return the options that a spec holds as plain data."""
    return _decode_cached(json.dumps(spec.engine.options))


@functools.lru_cache(maxsize=1024)  # points of a sweep share them, and decoding costs as much as predicting
def _decode_cached(plain: str) -> Options:
    return Options.model_validate_json(plain)
