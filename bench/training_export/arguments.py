"""Hugging Face TrainingArguments of a point, by the names that transformers 5 knows."""

from typing import Any

from bench.spec import RunSpec


def build_training_arguments(spec: RunSpec, steps: int | None) -> dict[str, Any]:
    """Return the arguments that decide speed, memory and numbers, for `HfArgumentParser.parse_json_file`.

    They say what ds_config.json says: the Trainer refuses two that differ.
    """
    optimizer = spec.optimizer
    return {
        "output_dir": "output",
        "deepspeed": "ds_config.json",
        "per_device_train_batch_size": spec.batch.micro,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_checkpointing": spec.activation_checkpointing,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if spec.activation_checkpointing else {}),
        "bf16": spec.precision == "bf16",
        "fp16": spec.precision == "fp16",
        "optim": "adamw_torch_fused" if optimizer.implementation == "fused" else "adamw_torch",
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.gradient_clipping,
        **({"max_steps": steps} if steps else {}),
        "dataloader_num_workers": spec.data.workers,
        "dataloader_drop_last": True,
        "seed": spec.seed,
    }
