"""The dict that DeepSpeed is given, with everything in it that DeepSpeed would otherwise choose silently."""

from typing import Any

from bench.engines.deepspeed.options import Options, Zero
from bench.spec import OptimizerSpec, RunSpec

_QUIET: dict[str, Any] = {
    "steps_per_print": None,
    "wall_clock_breakdown": False,  # synchronises around every phase
    "memory_breakdown": False,
    "dump_state": False,
    "flops_profiler": {"enabled": False},
    # on by default, and then synchronises the device twice in every micro-step (utils/timer.py, ThroughputTimer)
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
}
"""Nothing of DeepSpeed's own measures or prints in a timed window. Its log of communication, which synchronises every
collective, is left out for that: a section `comms_logger` turns it on, whatever it says (0.19.8, comm/config.py)."""


def build_deepspeed_config(options: Options, spec: RunSpec) -> dict[str, Any]:
    """Return DeepSpeed's config as plain types; the keys are those of its config.json."""
    return {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": spec.batch.micro,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": spec.optimizer.gradient_clipping,  # unset, 0.19.8 clips at 1.0; 0 clips nothing
        "optimizer": _build_optimizer(spec.optimizer),
        "bf16": {"enabled": spec.precision == "bf16", **options.bf16.model_dump()},
        "fp16": {"enabled": spec.precision == "fp16", "auto_cast": False, **options.fp16.model_dump()},
        "torch_autocast": {"enabled": False},
        "data_types": {"grad_accum_dtype": options.data_types.grad_accum_dtype or spec.precision},
        "communication_data_type": options.communication_data_type or spec.precision,
        "gradient_allreduce_op": "mean",
        "prescale_gradients": options.prescale_gradients,
        "gradient_predivide_factor": options.gradient_predivide_factor,
        "zero_optimization": options.model_dump(mode="json", include=set(Zero.model_fields), exclude_none=True),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": options.zero_force_ds_cpu_optimizer,
        "disable_python_gc": options.disable_python_gc,
        **_QUIET,
    }


def _build_optimizer(optimizer: OptimizerSpec) -> dict[str, Any]:
    """The optimizer section. DeepSpeed hands what it does not know to torch.optim.AdamW, so `fused` gets there."""
    params: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "adam_w_mode": True,
        "torch_adam": optimizer.implementation != "native",
    }
    if optimizer.implementation == "fused":
        params["fused"] = True
    return {"type": "AdamW", "params": params}
