"""Options of DeepSpeed 0.19, and the check of specs for this engine. The options are all options of the ZeRO section in
DeepSpeed's config, and the options outside this section that affect speed, memory or numerical results.

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

from bench.core.errors import UserError
from bench.core.spec import Device, Frozen, Positive, Precision, RunSpec
from bench.engines import EngineOptions
from bench.engines.precision import LossScale, check_whole

Share = Annotated[float, Field(ge=0, le=1)]
Tier = Literal["none", "cpu", "nvme"]
_ON_CHECKPOINTS = "about DeepSpeed's checkpoints: without effect on a measured run"


class OffloadParam(Frozen):
    """Offload of stage 3's partitioned weights."""

    device: Tier = Field("none", description="memory for the weights; none: no offload")
    nvme_path: str | None = Field(None, description="absolute path of a folder on the NVMe disk")
    buffer_count: NonNegativeInt = Field(5, description="number of host buffers with device=nvme")
    buffer_size: NonNegativeInt = Field(100_000_000, description="number of elements per buffer")
    max_in_cpu: NonNegativeInt = Field(
        1_000_000_000, description="number of elements that stay in host memory with device=nvme"
    )
    pin_memory: bool = Field(True, description="True: page-locked host memory, for faster copies")


class OffloadOptimizer(Frozen):
    """Offload of the optimizer's state. AdamW then runs on the CPU."""

    device: Tier = Field("none", description="memory for the optimizer's state; none: no offload")
    nvme_path: str | None = Field(None, description="absolute path of a folder on the NVMe disk")
    buffer_count: NonNegativeInt = Field(4, description="number of host buffers with device=nvme, at least 4 for AdamW")
    pin_memory: bool = Field(True, description="True: page-locked host memory, for faster copies")
    pipeline_read: bool = Field(False, description="with device=nvme: read the next state while AdamW computes")
    pipeline_write: bool = Field(False, description="with device=nvme: write the previous state while AdamW computes")
    fast_init: bool = Field(False, description="with device=nvme: faster initialisation of the state")
    ratio: Share = Field(1.0, description="share of the optimizer's state that is offloaded; below 1 only at stage 3")
    super_offload: bool = Field(False, description="offload for GPUs with a fast link to the CPU (GH200), stage 3")
    cpuadam_cores_perc: Share = Field(0.8, description="share of cores that run AdamW with super_offload")


class ZenFlow(Frozen):
    """ZenFlow: the device updates the parameters with the most important gradients, and the CPU updates the others
    later (arXiv 2505.12242)."""

    topk_ratio: float = Field(0.1, gt=0, lt=1, description="share of gradient columns that the device updates")
    select_strategy: Literal["auto", "step", "epoch"] = Field("auto", description="unit of select_interval")
    select_interval: int | Literal["auto"] = Field(
        "auto", description="steps or epochs between two selections of columns"
    )
    update_interval: Positive | Literal["auto"] = Field("auto", description="must equal batch.accumulation")
    overlap_step: bool = Field(False, description="True: the CPU updates parameters during forward and backward")
    offload: bool = Field(False, description="True: the state of columns that the device updates is in host memory")
    auto_ratio: Share = Field(0.99, description="threshold for update_interval=auto")
    full_warm_up_rounds: int = Field(
        0, description="number of rounds at the start in which all parameters are updated, without a selection"
    )
    pt_reserved_cores_perc: Share = Field(0.5, description="share of cores for torch; the others update parameters")


_EXPERT_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModule(Frozen):
    """Modules that stage 3 gathers as a whole, without hooks on their submodules."""

    classes: tuple[str, ...] = Field(_EXPERT_BLOCKS, description="classes of modules that are gathered as a whole")
    names: tuple[str, ...] = Field((), description="names of modules that are gathered as a whole")
    name_suffixes: tuple[str, ...] = Field((), description="ends of names of modules that are gathered as a whole")


class Zero(Frozen):
    """DeepSpeed's section `zero_optimization`. Sizes are elements, not bytes."""

    stage: Literal[0, 1, 2, 3] = Field(
        description="ZeRO stage. Partitioned among ranks at stage 0: nothing; 1: optimizer state; 2: also gradients; "
        "3: also weights"
    )

    # gradients
    reduce_bucket_size: Positive | None = Field(
        None,
        description="elements of a gradient bucket; presets use at most the model's number of parameters",
    )
    overlap_comm: bool | None = Field(
        None, description="True: gradients are reduced during backward; stages 1 and 2 then have a second bucket"
    )
    contiguous_gradients: bool = Field(True, description="True: gradients are copied to a contiguous buffer")
    reduce_scatter: bool = Field(True, description="True: reduce-scatter of gradients; False: all-reduce")
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="True: one all-reduce per bucket; False: one reduce for each rank that owns a part of it"
    )
    round_robin_gradients: bool = Field(False, description="with offload: ranks copy gradients to the host in turn")
    ignore_unused_parameters: bool = Field(True, description="False: fail if a parameter has no gradient (stage 2)")
    compute_grad_norm: bool = Field(True, description="False: no gradient norm; only without gradient clipping")

    # weights, stages 1 and 2
    allgather_partitions: bool = Field(True, description="without effect in DeepSpeed 0.19.8")
    allgather_bucket_size: NonNegativeInt = Field(500_000_000, description="without effect in torch 2 and later")
    parameter_alignment: bool = Field(False, description="True: each parameter starts at a multiple of 16 bytes")

    # weights, stage 3
    stage3_prefetch_bucket_size: NonNegativeInt | None = Field(None, description="elements gathered ahead at a time")
    stage3_param_persistence_threshold: NonNegativeInt | None = Field(
        None, description="parameters with fewer elements are not partitioned"
    )
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        None, description="number of gathered elements at which prefetching of weights stops"
    )
    stage3_max_reuse_distance: NonNegativeInt | None = Field(
        None, description="a weight stays gathered if its next use is fewer than this number of elements away"
    )
    stage3_model_persistence_threshold: NonNegativeInt = Field(
        2**63 - 1, description="maximum number of elements in parameters that are not partitioned"
    )
    stage3_module_granularity_threshold: int = Field(
        0, description="modules with fewer parameters per submodule are gathered as a whole; 0: none"
    )
    stage3_use_all_reduce_for_fetch_params: bool = Field(False, description="gather weights by all-reduce")
    stage3_allgather_sequential: bool = Field(False, description="gather parameters one by one, without a buffer")
    sub_group_size: NonNegativeInt = Field(1_000_000_000, description="number of elements that AdamW updates at a time")
    memory_efficient_linear: bool = Field(True, description="keep no gathered weights for backward")
    override_module_apply: bool = Field(True, description="gather the weights of a module for torch's Module.apply")
    leaf_module: LeafModule = LeafModule()

    # ZeRO++ (arXiv 2306.10209), stage 3
    zero_hpz_partition_size: NonNegativeInt = Field(
        1, description="ranks that share a second partition of the weights (hpZ), e.g. those of a node; 1: none"
    )
    zero_quantized_weights: bool = Field(False, description="quantise weights when they are gathered (qwZ)")
    zero_quantized_nontrainable_weights: bool = Field(False, description="keep frozen weights quantised")
    zero_quantized_gradients: bool = Field(False, description="quantise gradients when they are reduced (qgZ)")

    # offload
    offload_param: OffloadParam | None = Field(None, description="offload of weights, stage 3")
    offload_optimizer: OffloadOptimizer | None = Field(None, description="offload of the optimizer's state")
    zenflow: ZenFlow | None = Field(None, description="ZenFlow: most updates run later, on the CPU (arXiv 2505.12242)")
    save_muon_momentum_buffer_in_memory: bool = Field(False, description="for the optimizer Muon, which no run uses")

    # checkpoints and debugging: without effect on a measured run
    load_from_fp32_weights: bool = Field(True, description=_ON_CHECKPOINTS)
    elastic_checkpoint: bool = Field(False, description=_ON_CHECKPOINTS)
    stage3_gather_16bit_weights_on_model_save: bool = Field(False, description=_ON_CHECKPOINTS)
    pipeline_loading_checkpoint: bool = Field(False, description=_ON_CHECKPOINTS)
    legacy_stage1: bool = Field(False, description="not supported: removed in DeepSpeed 0.5.9")
    log_trace_cache_warnings: bool = Field(False, description="log changes in the order in which modules run")
    enable_sanity_checks: bool = Field(False, description="check the engine's internal state, for debugging")

    @model_validator(mode="after")
    def _at_this_stage(self) -> Self:
        for name, stages in STAGES.items():
            value, acts = getattr(self, name), self.stage in stages
            if acts and value is None and name in WRITTEN_OUT:
                rule = f"{name} is missing, but decides memory and time of stage {self.stage}"
                raise ValueError(f"{rule}; set engine.{name}")
            if not acts and value != type(self).model_fields[name].get_default():
                where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
                raise ValueError(f"{name}={value} has no effect at stage {self.stage}, only at {where}; remove it")
        return self


WRITTEN_OUT = frozenset({
    "reduce_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance",
})  # fmt: skip
"""Options without a default. A spec must set each of them at the stages where the option has an effect."""

FITTED_TO_MODEL = ("reduce_bucket_size",)
"""Names of options that are sizes in elements, in the presets in conf/engine. If the model has fewer parameters than
such a size, the option is lowered to the number of parameters.

DeepSpeed allocates the full size of a bucket. If the size were not lowered, a preset's bucket of 50,000,000 elements
would dominate the memory of a tiny model.
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
        description="sum gradients in fp32 during backward; only stage 1 with data_types.grad_accum_dtype=fp32",
    )
    check_grad_overflow: bool = Field(
        True, description="True: check gradients for overflow in every step, which waits for the device (stages 1, 2)"
    )
    bf16_master_weights_and_grads: bool = Field(False, description="master weights and gradients in bf16, not fp32")
    bf16_optimizer_states: bool = Field(False, description="AdamW's moments in bf16, not fp32")


class Fp16(LossScale):
    """DeepSpeed's section `fp16`, for runs in fp16."""

    fp16_master_weights_and_grads: bool = Field(False, description="master weights and gradients in fp16, not fp32")


class DataTypes(Frozen):
    """DeepSpeed's section `data_types`."""

    grad_accum_dtype: Precision | None = Field(
        None,
        description="type in which gradients are summed over micro-steps; None: the run's precision. With fp32 in a "
        "bf16 run at stage 1, DeepSpeed uses its BF16_Optimizer, which ignores reduce_bucket_size and "
        "overlap_comm",
    )


class Aio(Frozen):
    """DeepSpeed's section `aio`, for offload to NVMe. A tensor stays in host memory if it is smaller than 1 MiB or
    smaller than `block_size`."""

    block_size: Positive = Field(1_048_576, description="bytes of one read or write")
    queue_depth: Positive = Field(8, description="number of reads or writes in flight per thread")
    intra_op_parallelism: Positive = Field(1, description="number of threads for one tensor")
    single_submit: bool = Field(False, description="True: submit reads and writes one by one; False: in batches")
    overlap_events: bool = Field(True, description="submit new reads and writes while others are in flight")
    use_gds: bool = Field(False, description="copy between disk and GPU without host memory (GPUDirect Storage)")


class Options(EngineOptions, Zero):
    """Options of the presets in conf/engine: the fields of DeepSpeed's ZeRO section, and options of its config outside
    this section."""

    communication_data_type: Precision | None = Field(
        None, description="type in which gradients are communicated; None: the run's precision"
    )
    prescale_gradients: bool = Field(False, description="divide gradients before their sum over ranks, not after it")
    gradient_predivide_factor: float = Field(1.0, gt=0, description="divisor of gradients before their sum over ranks")
    zero_force_ds_cpu_optimizer: bool = Field(
        True, description="True: offload needs an optimizer of DeepSpeed; False: any optimizer"
    )
    disable_python_gc: bool = Field(False, description="switch off Python's garbage collector during training")
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
    def offload(self) -> str:
        """Name of the option that moves model states into host memory; empty if all states are in device memory."""
        tiers = {"offload_optimizer": self.optimizer_tier, "offload_param": self.weights_tier, "zenflow": self.zenflow}
        return next((name for name, tier in tiers.items() if tier), "")

    @property
    def quantised(self) -> list[str]:
        """Names of the enabled options that quantise communicated values."""
        names = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
        return [name for name in names if getattr(self, name)]


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError for the first rule that the spec violates. Rules about the device are checked only if `device` is
    given."""
    named = re.match(r"zero(\d)", spec.engine.name)
    if named and int(named[1]) != options.stage:
        rule, remedy = f"contradicts engine={spec.engine.name}", f"set engine=zero{options.stage}"
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
        remedy = f"set the number of devices of a node, {spec.devices_per_node}, or another divisor"
        rule = f"does not divide the {spec.data_parallel} ranks"
        raise UserError(f"engine.zero_hpz_partition_size={secondary}", rule, remedy)
    if options.stage == 3 and spec.model.compile != "none":
        rule = "the compiled code would contain the hooks by which stage 3 gathers and releases weights"
        remedy = "use stage 0, 1 or 2, ddp or fsdp, or remove model.compile"
        raise UserError(f"model.compile={spec.model.compile} at stage 3", rule, remedy)
    if device == "cpu" and spec.precision == "fp16":
        rule, remedy = "DeepSpeed does not support it", "set precision=bf16 or precision=fp32"
        raise UserError("precision=fp16 on a CPU", rule, remedy)
    if device == "cpu" and options.quantised:
        value = f"engine.{' and engine.'.join(options.quantised)} on a CPU"
        raise UserError(value, "quantisation runs on GPUs only", "remove these options, or use a GPU")


def _check_precision(options: Options, spec: RunSpec) -> None:
    stage, accumulation = options.stage, options.data_types.grad_accum_dtype
    if stage == 0 and spec.precision == "fp16":
        # https://github.com/deepspeedai/DeepSpeed/pull/8393
        rule = "DeepSpeed 0.19 divides gradients by a loss scale that it never applied to the loss (DeepSpeed PR #8393)"
        raise UserError("precision=fp16 at stage 0", rule, "set engine=ddp or engine=zero1")
    if stage == 0 and accumulation not in (None, spec.precision):
        rule = f"stage 0 accumulates gradients in the run's precision, {spec.precision}"
        raise UserError(f"engine.data_types.grad_accum_dtype={accumulation}", rule, "remove it, or use stage 1 to 3")
    low = {"bf16": options.bf16.bf16_master_weights_and_grads, "fp16": options.fp16.fp16_master_weights_and_grads}
    for section in (section for section, given in low.items() if given):
        value = f"engine.{section}.{section}_master_weights_and_grads=true"
        if spec.precision != section:
            raise UserError(value, f"has no effect with precision={spec.precision}", f"set precision={section}")
        if stage == 0:
            raise UserError(value, "stage 0 supports only fp32 master weights", "use stage 1 to 3")
    if options.bf16.bf16_optimizer_states and not low["bf16"]:
        remedy = "set engine.bf16.bf16_master_weights_and_grads=true as well"
        raise UserError("engine.bf16.bf16_optimizer_states=true", "needs bf16 master weights", remedy)


def _check_reduction(options: Options, spec: RunSpec) -> None:
    scaled = options.prescale_gradients or options.gradient_predivide_factor != 1
    if scaled and options.stage >= 2 and options.reduce_scatter:
        rule = f"stage {options.stage} with reduce_scatter divides gradients only after their sum"
        remedy = "remove both, or set engine.reduce_scatter=false"
        raise UserError("engine.prescale_gradients or engine.gradient_predivide_factor", rule, remedy)
    if not options.compute_grad_norm:
        value, remedy = "engine.compute_grad_norm=false", "set engine.compute_grad_norm=true"
        if spec.optimizer.gradient_clipping > 0:
            raise UserError(value, "clipping needs the gradient norm", "set optimizer.gradient_clipping=0")
        if options.optimizer_tier:
            raise UserError(value, "offload of the optimizer's state needs the gradient norm", remedy)
        if (options.stage, spec.precision, options.data_types.grad_accum_dtype) == (1, "bf16", "fp32"):
            raise UserError(value, "stage 1 in bf16 with fp32 accumulation needs the gradient norm", remedy)
    if options.legacy_stage1:
        raise UserError("engine.legacy_stage1=true", "DeepSpeed 0.5.9 removed it", "remove it")


def _check_offload(options: Options, spec: RunSpec) -> None:
    for name, tier in (("offload_param", options.offload_param), ("offload_optimizer", options.offload_optimizer)):
        if tier is not None and tier.device == "nvme" and not tier.nvme_path:
            raise UserError(f"engine.{name}.device=nvme", "needs a folder on the disk", f"set engine.{name}.nvme_path")
        if tier is not None and tier.nvme_path and not tier.nvme_path.startswith("/"):
            rule = "a relative path depends on the working directory of each rank"
            raise UserError(f"engine.{name}.nvme_path={tier.nvme_path}", rule, "set an absolute path")
    optimizer = options.optimizer_tier
    if optimizer is None:
        return
    partial, native = optimizer.ratio < 1 or optimizer.super_offload, spec.optimizer.implementation == "native"
    if options.stage < 3 and (optimizer.device == "nvme" or partial):
        rule = "device=nvme, ratio below 1 and super_offload need stage 3"
        remedy = "set engine=zero3, or remove the option"
        raise UserError(f"engine.offload_optimizer at stage {options.stage}", rule, remedy)
    value, name = f"optimizer.implementation={spec.optimizer.implementation}", spec.optimizer.name
    if name != "adamw" and (optimizer.device == "nvme" or partial or options.zero_force_ds_cpu_optimizer):
        rule, remedy = "DeepSpeed swaps and splits only fp32 states", "set optimizer.name=adamw"
        if optimizer.device == "cpu" and not partial:
            rule, remedy = (
                "this optimizer is slow on a CPU",
                f"{remedy}, or set engine.zero_force_ds_cpu_optimizer=false",
            )
        raise UserError(f"optimizer.name={name} with engine.offload_optimizer", rule, remedy)
    if not native and options.zero_force_ds_cpu_optimizer:
        remedy = "set optimizer.implementation=native, or engine.zero_force_ds_cpu_optimizer=false"
        raise UserError(f"{value} with engine.offload_optimizer", "torch's AdamW is slow on a CPU", remedy)
    if not native and partial:
        rule = "engine.offload_optimizer with ratio below 1 or super_offload needs DeepSpeed's CPUAdam"
        raise UserError(value, rule, "set optimizer.implementation=native")


def _check_zenflow(options: Options, spec: RunSpec) -> None:
    assert options.zenflow is not None
    if options.optimizer_tier is None or spec.optimizer.implementation != "native":
        rule = "ZenFlow divides AdamW's update between the device and DeepSpeed's CPUAdam"
        remedy = "set engine.offload_optimizer.device=cpu and optimizer.implementation=native"
        raise UserError("engine.zenflow", rule, remedy)
    if (interval := options.zenflow.update_interval) != spec.accumulation:
        rule = "ZenFlow accumulates over this many micro-steps, and ignores batch.accumulation"
        remedy = f"set engine.zenflow.update_interval={spec.accumulation}, equal to batch.accumulation"
        raise UserError(f"engine.zenflow.update_interval={interval}", rule, remedy)
