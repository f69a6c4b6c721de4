"""What ZeRO cannot do, said before anything starts: DeepSpeed asserts most of it with every rank up, some never."""

import re
from typing import Literal

from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.engines.deepspeed.options import Options

Device = Literal["cpu", "cuda"]


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError for the first rule broken; rules about the device only where it is known."""
    _check_name(options, spec)
    _check_precision(options, spec)
    _check_reduction(options, spec)
    _check_offload(options, spec)
    _check_zenflow(options, spec)
    _check_partitions(options, spec)
    _check_compiled(options, spec)
    if device == "cpu":
        _check_on_cpu(options, spec)


def _refuse_if(broken: bool, value: str, rule: str, remedy: str) -> None:
    if broken:
        raise UserError(value, rule, remedy)


def _check_name(options: Options, spec: RunSpec) -> None:
    named = re.match(r"zero(\d)", spec.engine.name)
    _refuse_if(
        named is not None and int(named[1]) != options.stage,
        f"engine.stage={options.stage}",
        f"the engine is called {spec.engine.name}",
        f"choose engine=zero{options.stage}",
    )


def _check_precision(options: Options, spec: RunSpec) -> None:
    stage, bf16, fp16 = options.stage, options.bf16, options.fp16
    accumulation = options.data_types.grad_accum_dtype
    _refuse_if(
        stage == 0 and spec.precision == "fp16",
        "precision=fp16 at stage 0",
        "DeepSpeed 0.19 divides the gradients by a loss scale that it never multiplied the loss by (its PR #8393)",
        "choose engine=ddp or engine=zero1",
    )
    _refuse_if(
        stage == 0 and accumulation not in (None, spec.precision),
        f"engine.data_types.grad_accum_dtype={accumulation}",
        f"stage 0 accumulates in the run's precision, {spec.precision}",
        "leave it out or choose stage 1 to 3",
    )
    for section, active, low in (
        ("bf16", spec.precision == "bf16", bf16.bf16_master_weights_and_grads),
        ("fp16", spec.precision == "fp16", fp16.fp16_master_weights_and_grads),
    ):
        value = f"engine.{section}.{section}_master_weights_and_grads=true"
        _refuse_if(low and not active, value, f"precision is {spec.precision}", f"choose precision={section}")
        _refuse_if(low and stage == 0, value, "stage 0 has fp32 master weights only", "choose stage 1 to 3")
    _refuse_if(
        bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads,
        "engine.bf16.bf16_optimizer_states=true",
        "the master weights are fp32",
        "set engine.bf16.bf16_master_weights_and_grads=true as well",
    )


def _check_reduction(options: Options, spec: RunSpec) -> None:
    scaled = options.prescale_gradients or options.gradient_predivide_factor != 1
    _refuse_if(
        scaled and options.stage >= 2 and options.reduce_scatter,
        "engine.prescale_gradients or engine.gradient_predivide_factor",
        f"stage {options.stage} with reduce_scatter only averages after the sum",
        "leave both out or set engine.reduce_scatter=false",
    )
    value = "engine.compute_grad_norm=false"
    needed = "set it true"
    if not options.compute_grad_norm:
        _refuse_if(
            spec.optimizer.gradient_clipping > 0, value, "clipping needs the norm", "set optimizer.gradient_clipping=0"
        )
        _refuse_if(_is_offloaded(options), value, "offload needs the norm", needed)
        _refuse_if(
            options.stage == 1 and spec.precision == "bf16" and options.data_types.grad_accum_dtype == "fp32",
            value,
            "stage 1 in bf16 with fp32 accumulation needs the norm",
            needed,
        )
    _refuse_if(options.legacy_stage1, "engine.legacy_stage1=true", "DeepSpeed removed it in 0.5.9", "leave it out")


def _is_offloaded(options: Options) -> bool:
    return options.offload_optimizer is not None and options.offload_optimizer.device != "none"


def _check_offload(options: Options, spec: RunSpec) -> None:
    for name, tier in (("offload_param", options.offload_param), ("offload_optimizer", options.offload_optimizer)):
        _refuse_if(
            tier is not None and tier.device == "nvme" and not tier.nvme_path,
            f"engine.{name}.device=nvme",
            "no folder to keep it in",
            f"give engine.{name}.nvme_path",
        )
    optimizer = options.offload_optimizer
    if optimizer is None or not _is_offloaded(options):
        return
    _refuse_if(
        options.stage < 3 and (optimizer.device == "nvme" or optimizer.ratio < 1 or optimizer.super_offload),
        f"engine.offload_optimizer at stage {options.stage}",
        "nvme, a ratio below 1 and super_offload need stage 3",
        "choose engine=zero3 or leave them out",
    )
    native = spec.optimizer.implementation == "native"
    _refuse_if(
        not native and options.zero_force_ds_cpu_optimizer,
        f"optimizer.implementation={spec.optimizer.implementation} with engine.offload_optimizer",
        "torch's AdamW is slow on a CPU",
        "choose optimizer.implementation=native, or set engine.zero_force_ds_cpu_optimizer=false",
    )
    _refuse_if(
        not native and (optimizer.ratio < 1 or optimizer.super_offload),
        f"optimizer.implementation={spec.optimizer.implementation}",
        "a ratio below 1 and super_offload run DeepSpeed's CPUAdam",
        "choose optimizer.implementation=native",
    )


def _check_zenflow(options: Options, spec: RunSpec) -> None:
    if options.zenflow is None:
        return
    _refuse_if(
        not _is_offloaded(options) or spec.optimizer.implementation != "native",
        "engine.zenflow",
        "it splits AdamW between the device and DeepSpeed's CPUAdam",
        "set engine.offload_optimizer.device=cpu and optimizer.implementation=native",
    )
    _refuse_if(
        options.zenflow.update_interval != spec.accumulation,
        f"engine.zenflow.update_interval={options.zenflow.update_interval}",
        "ZenFlow takes it for the accumulation, whatever the batch says",
        f"set it to batch.accumulation={spec.accumulation}",
    )


def _check_partitions(options: Options, spec: RunSpec) -> None:
    secondary = options.zero_hpz_partition_size
    _refuse_if(
        secondary > 1 and spec.data_parallel % secondary != 0,
        f"engine.zero_hpz_partition_size={secondary}",
        f"does not divide {spec.data_parallel} ranks",
        f"choose the devices of a node, {spec.devices_per_node}, or another divisor",
    )


def _check_compiled(options: Options, spec: RunSpec) -> None:
    _refuse_if(
        options.stage == 3 and spec.model.compile != "none",
        f"model.compile={spec.model.compile} at stage 3",
        "its hooks gather and release weights inside what would be compiled",
        "choose stage 0 to 2, or leave it out",
    )


def _check_on_cpu(options: Options, spec: RunSpec) -> None:
    _refuse_if(
        spec.precision == "fp16",
        "precision=fp16 on a CPU",
        "DeepSpeed refuses it",
        "choose precision=bf16 or precision=fp32",
    )
    quantised = [
        name
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
        if getattr(options, name)
    ]
    _refuse_if(
        bool(quantised),
        f"engine.{' and engine.'.join(quantised)} on a CPU",
        "the quantisation kernels are CUDA",
        "leave them out or use a GPU",
    )
