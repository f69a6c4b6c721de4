"""Options of DeepSpeed 0.19, and the check of specs for this engine. The options are the whole ZeRO section, and those
outside it that affect speed, memory or numerical results.

Names and defaults of options are those of DeepSpeed (runtime/zero/config.py, runtime/zero/offload_config.py,
runtime/zenflow/zenflow_config.py, runtime/zero/leaf_module_config.py, runtime/precision_config.py), with two
exceptions. Deprecated options are excluded. Options listed in WRITTEN_OUT have no default, because they decide the
result of a comparison of ZeRO stages.

Specs are checked before a run starts. DeepSpeed checks most of these rules only after every rank has started, and does
not check some of them at all.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import Device, Frozen, Positive, Precision, RunSpec
from bench.engines.precision import LossScale, check_whole

Share = Annotated[float, Field(ge=0, le=1)]
Tier = Literal["none", "cpu", "nvme"]


class OffloadParam(Frozen):
    """Offload of stage 3's partitioned weights."""

    device: Tier = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    buffer_size: NonNegativeInt = Field(100_000_000, description="number of elements per buffer")
    max_in_cpu: NonNegativeInt = Field(
        1_000_000_000, description="number of elements that stay in host memory with device=nvme"
    )
    pin_memory: bool = True


class OffloadOptimizer(Frozen):
    """Offload of the optimizer's state. AdamW then runs on the CPU."""

    device: Tier = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Share = Field(1.0, description="share of the optimizer state that is offloaded; below 1 only with stage 3")
    super_offload: bool = False
    cpuadam_cores_perc: Share = 0.8


class ZenFlow(Frozen):
    """ZenFlow: the device updates the parameters with the most important gradients, and the CPU updates the others
    later (arXiv 2505.12242)."""

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
    """Modules that stage 3 gathers as a whole, without hooks on their submodules."""

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


class Zero(Frozen):
    """DeepSpeed's section `zero_optimization`. Sizes are elements, not bytes."""

    stage: Literal[0, 1, 2, 3] = Field(
        description="partitioned among ranks: 0: nothing; 1: optimizer state; 2: also gradients; 3: also weights"
    )

    # gradients
    reduce_bucket_size: Positive | None = Field(
        None,
        description="elements per bucket; a preset's larger size is reduced to the model's number of parameters",
    )
    overlap_comm: bool | None = Field(
        None, description="True: gradients are reduced during backward, for which stages 1 and 2 need a second bucket"
    )
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="True: one all-reduce per bucket; False: one reduce per owning rank"
    )
    round_robin_gradients: bool = False
    ignore_unused_parameters: bool = True
    compute_grad_norm: bool = True

    # weights, stages 1 and 2
    allgather_partitions: bool = Field(True, description="without effect in 0.19.8")
    allgather_bucket_size: NonNegativeInt = Field(500_000_000, description="without effect in torch 2 and later")
    parameter_alignment: bool = False

    # weights, stage 3
    stage3_prefetch_bucket_size: NonNegativeInt | None = None
    stage3_param_persistence_threshold: NonNegativeInt | None = None
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        None, description="number of gathered elements at which prefetching of weights stops"
    )
    stage3_max_reuse_distance: NonNegativeInt | None = None
    stage3_model_persistence_threshold: NonNegativeInt = 2**63 - 1
    stage3_module_granularity_threshold: int = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    sub_group_size: NonNegativeInt = Field(1_000_000_000, description="number of elements that AdamW updates at a time")
    memory_efficient_linear: bool = True
    override_module_apply: bool = True
    leaf_module: LeafModule = LeafModule()

    # ZeRO++ (arXiv 2306.10209), stage 3
    zero_hpz_partition_size: NonNegativeInt = Field(
        1, description="number of ranks that share the secondary weight partition of ZeRO++; 1: no such partition"
    )
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False

    # offload
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: ZenFlow | None = None
    save_muon_momentum_buffer_in_memory: bool = False

    # checkpoints and debugging: without effect on a measured run
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
                raise ValueError(f"{name} is not given, but decides the memory and time of stage {self.stage}; set it")
            if not acts and value != type(self).model_fields[name].get_default():
                where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
                raise ValueError(f"{name}={value} does nothing at stage {self.stage}, only at {where}; leave it out")
        return self


WRITTEN_OUT = frozenset({
    "reduce_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance",
})  # fmt: skip
"""Options without a default. A spec must set each of them at the stages where the option has an effect."""

FITTED_TO_MODEL = ("reduce_bucket_size",)
"""Options of a preset that are sizes in elements. If the model has fewer parameters than such a size, the option is
lowered to the number of parameters.

DeepSpeed allocates the full size of a bucket. Without this reduction, a preset's bucket of 50,000,000 elements would
dominate the memory of a tiny model.
"""

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
"""ZeRO stages at which an option has an effect. Setting the option at another stage raises an error, because a sweep
over its values would repeat the same measurement."""


class Bf16(Frozen):
    """DeepSpeed's section `bf16`, for runs in bf16."""

    immediate_grad_update: bool = Field(
        False,
        description="accumulate fp32 gradients during backward; only with data_types.grad_accum_dtype=fp32 at stage 1",
    )
    check_grad_overflow: bool = Field(
        True, description="True: stages 1 and 2 check gradients for overflow and wait for the device in every step"
    )
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16(LossScale):
    """DeepSpeed's section `fp16`, for runs in fp16."""

    fp16_master_weights_and_grads: bool = False


class DataTypes(Frozen):
    """DeepSpeed's section `data_types`."""

    grad_accum_dtype: Precision | None = Field(
        None,
        description="type in which gradients are summed over micro-steps; None: the run's precision. With fp32 in a "
        "bf16 run at stage 1, DeepSpeed uses its BF16_Optimizer, which ignores reduce_bucket_size and "
        "overlap_comm",
    )


class Aio(Frozen):
    """DeepSpeed's section `aio`, for offload to NVMe. Tensors of less than 1 MiB or one block stay in host memory."""

    block_size: Positive = Field(1_048_576, description="bytes")
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class Options(Zero):
    """Options of the presets in conf/engine: the fields of DeepSpeed's ZeRO section, and options of its config outside
    this section."""

    communication_data_type: Precision | None = Field(
        None, description="type in which gradients are communicated; None: the run's precision"
    )
    prescale_gradients: bool = False
    gradient_predivide_factor: float = Field(1.0, gt=0)
    zero_force_ds_cpu_optimizer: bool = Field(
        True, description="True: with offload, only DeepSpeed's optimizers are accepted"
    )
    disable_python_gc: bool = False
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    data_types: DataTypes = DataTypes()
    aio: Aio = Aio()

    @property
    def disk_tiers(self) -> list[OffloadOptimizer | OffloadParam]:
        """Options for offload to NVMe, of the optimizer's state and of the weights."""
        return [tier for tier in (self.optimizer_tier, self.weights_tier) if tier and tier.device == "nvme"]

    @property
    def optimizer_tier(self) -> OffloadOptimizer | None:
        """Options for offload of the optimizer's state. None if it stays on the device."""
        tier = self.offload_optimizer
        return None if tier is None or tier.device == "none" else tier

    @property
    def weights_tier(self) -> OffloadParam | None:
        """Options for offload of stage 3's partitioned weights. None if they stay on the device."""
        tier = self.offload_param
        return None if tier is None or tier.device == "none" else tier

    @property
    def quantised(self) -> list[str]:
        """Names of the enabled options that quantise communicated values."""
        names = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
        return [name for name in names if getattr(self, name)]


def decode_options(spec: RunSpec) -> Options:
    """Return the spec's engine options, decoded from plain data."""
    return engines.decode_options(Options, spec)


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError for the first rule that the spec violates. Rules about the device are checked only if `device` is
    given."""
    named = re.match(r"zero(\d)", spec.engine.name)
    if named and int(named[1]) != options.stage:
        rule, remedy = f"the engine is called {spec.engine.name}", f"choose engine=zero{options.stage}"
        raise UserError(f"engine.stage={options.stage}", rule, remedy)
    if options.stage > 0:
        check_whole(spec, "a part of one flat tensor")
    _check_precision(options, spec)
    _check_reduction(options, spec)
    _check_offload(options, spec)
    if options.zenflow is not None:
        _check_zenflow(options, spec)
    secondary = options.zero_hpz_partition_size
    if secondary > 1 and spec.data_parallel % secondary:
        remedy = f"choose the devices of a node, {spec.devices_per_node}, or another divisor"
        rule = f"does not divide {spec.data_parallel} ranks"
        raise UserError(f"engine.zero_hpz_partition_size={secondary}", rule, remedy)
    if options.stage == 3 and spec.model.compile != "none":
        rule = "stage 3 gathers and releases weights by hooks inside the code that would be compiled"
        raise UserError(f"model.compile={spec.model.compile} at stage 3", rule, "choose stage 0 to 2, or leave it out")
    if device == "cpu" and spec.precision == "fp16":
        raise UserError("precision=fp16 on a CPU", "DeepSpeed refuses it", "choose precision=bf16 or precision=fp32")
    if device == "cpu" and options.quantised:
        value = f"engine.{' and engine.'.join(options.quantised)} on a CPU"
        raise UserError(value, "the quantisation kernels are CUDA", "leave them out or use a GPU")


def _check_precision(options: Options, spec: RunSpec) -> None:
    stage, accumulation = options.stage, options.data_types.grad_accum_dtype
    if stage == 0 and spec.precision == "fp16":
        # https://github.com/deepspeedai/DeepSpeed/pull/8393
        rule = "DeepSpeed 0.19 divides the gradients by a loss scale that it never applied to the loss (its PR #8393)"
        raise UserError("precision=fp16 at stage 0", rule, "choose engine=ddp or engine=zero1")
    if stage == 0 and accumulation not in (None, spec.precision):
        rule = f"stage 0 accumulates in the run's precision, {spec.precision}"
        raise UserError(
            f"engine.data_types.grad_accum_dtype={accumulation}", rule, "leave it out or choose stage 1 to 3"
        )
    low = {"bf16": options.bf16.bf16_master_weights_and_grads, "fp16": options.fp16.fp16_master_weights_and_grads}
    for section in (section for section, given in low.items() if given):
        value = f"engine.{section}.{section}_master_weights_and_grads=true"
        if spec.precision != section:
            raise UserError(value, f"precision is {spec.precision}", f"choose precision={section}")
        if stage == 0:
            raise UserError(value, "stage 0 has fp32 master weights only", "choose stage 1 to 3")
    if options.bf16.bf16_optimizer_states and not low["bf16"]:
        remedy = "set engine.bf16.bf16_master_weights_and_grads=true as well"
        raise UserError("engine.bf16.bf16_optimizer_states=true", "the master weights are fp32", remedy)


def _check_reduction(options: Options, spec: RunSpec) -> None:
    scaled = options.prescale_gradients or options.gradient_predivide_factor != 1
    if scaled and options.stage >= 2 and options.reduce_scatter:
        rule = f"stage {options.stage} with reduce_scatter only averages after the sum"
        remedy = "leave both out or set engine.reduce_scatter=false"
        raise UserError("engine.prescale_gradients or engine.gradient_predivide_factor", rule, remedy)
    if not options.compute_grad_norm:
        value, remedy = "engine.compute_grad_norm=false", "set it true"
        if spec.optimizer.gradient_clipping > 0:
            raise UserError(value, "clipping needs the norm", "set optimizer.gradient_clipping=0")
        if options.optimizer_tier:
            raise UserError(value, "offload needs the norm", remedy)
        if (options.stage, spec.precision, options.data_types.grad_accum_dtype) == (1, "bf16", "fp32"):
            raise UserError(value, "stage 1 in bf16 with fp32 accumulation needs the norm", remedy)
    if options.legacy_stage1:
        raise UserError("engine.legacy_stage1=true", "DeepSpeed removed it in 0.5.9", "leave it out")


def _check_offload(options: Options, spec: RunSpec) -> None:
    for name, tier in (("offload_param", options.offload_param), ("offload_optimizer", options.offload_optimizer)):
        if tier is not None and tier.device == "nvme" and not tier.nvme_path:
            raise UserError(f"engine.{name}.device=nvme", "has no folder to write to", f"give engine.{name}.nvme_path")
        if tier is not None and tier.nvme_path and not tier.nvme_path.startswith("/"):
            rule = "a relative folder depends on where a rank starts"
            raise UserError(f"engine.{name}.nvme_path={tier.nvme_path}", rule, "give an absolute path")
    optimizer = options.optimizer_tier
    if optimizer is None:
        return
    partial, native = optimizer.ratio < 1 or optimizer.super_offload, spec.optimizer.implementation == "native"
    if options.stage < 3 and (optimizer.device == "nvme" or partial):
        rule = "nvme, a ratio below 1 and super_offload need stage 3"
        raise UserError(
            f"engine.offload_optimizer at stage {options.stage}", rule, "choose engine=zero3 or leave it out"
        )
    value, name = f"optimizer.implementation={spec.optimizer.implementation}", spec.optimizer.name
    if name != "adamw" and (optimizer.device == "nvme" or partial or options.zero_force_ds_cpu_optimizer):
        rule, remedy = "DeepSpeed swaps and splits fp32 states only", "choose optimizer.name=adamw"
        if optimizer.device == "cpu" and not partial:
            rule, remedy = "it is slow on a CPU", f"{remedy}, or set engine.zero_force_ds_cpu_optimizer=false"
        raise UserError(f"optimizer.name={name} with engine.offload_optimizer", rule, remedy)
    if not native and options.zero_force_ds_cpu_optimizer:
        remedy = "choose optimizer.implementation=native, or set engine.zero_force_ds_cpu_optimizer=false"
        raise UserError(f"{value} with engine.offload_optimizer", "torch's AdamW is slow on a CPU", remedy)
    if not native and partial:
        rule = "a ratio below 1 and super_offload run DeepSpeed's CPUAdam"
        raise UserError(value, rule, "choose optimizer.implementation=native")


def _check_zenflow(options: Options, spec: RunSpec) -> None:
    assert options.zenflow is not None
    if options.optimizer_tier is None or spec.optimizer.implementation != "native":
        rule = "it splits AdamW between the device and DeepSpeed's CPUAdam"
        remedy = "set engine.offload_optimizer.device=cpu and optimizer.implementation=native"
        raise UserError("engine.zenflow", rule, remedy)
    if (interval := options.zenflow.update_interval) != spec.accumulation:
        rule = "ZenFlow uses it as the accumulation, and ignores that of the batch"
        remedy = f"set it to batch.accumulation={spec.accumulation}"
        raise UserError(f"engine.zenflow.update_interval={interval}", rule, remedy)
