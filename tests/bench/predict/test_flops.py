"""Tests of the FLOPs of a step. Without recomputation, they equal the number of samples times the closed form of the
model family."""

import subprocess
import sys
from typing import Any

import pytest

from bench.core.spec import RunSpec
from bench.predict.work import compute_flops_per_step, compute_training_flops
from bench.predict.workload import get_network

SHAPE = {
    "d_model": 48, "d_kv": 8, "d_ff": 80, "encoder_layers": 2, "decoder_layers": 3, "heads": 4, "vocab": 96,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip


def spec_of(**rest: Any) -> RunSpec:
    model = {"name": "small", "shape": SHAPE, "dropout": rest.pop("dropout", 0.0)}
    engine, data = {"name": "ddp", "backend": "ddp"}, {"name": "synthetic", "source": "synthetic"}
    sequence = {"encoder": 12, "decoder": 7}
    return RunSpec.model_validate(
        {"model": model, "engine": engine, "data": data, "batch": {"micro": 1}, "sequence": sequence, **rest}
    )


def test_flops_of_a_step_are_those_of_all_samples_of_all_ranks_and_micro_steps() -> None:
    spec = spec_of(batch={"micro": 4, "accumulation": 3}, nodes=2, devices_per_node=5)
    step = compute_flops_per_step(spec)
    assert step.model == step.hardware == 4 * 3 * 10 * compute_training_flops(get_network(spec), spec.sequence)


def test_recomputation_adds_hardware_flops_only_and_more_with_dropout_or_fp16() -> None:
    plain, full, fp16 = (
        compute_flops_per_step(spec_of(activation_checkpointing=True, **rest))
        for rest in ({}, {"dropout": 0.1}, {"precision": "fp16"})
    )
    assert plain.model == full.model == fp16.model == compute_flops_per_step(spec_of()).model
    assert plain.model < plain.hardware < full.hardware == fp16.hardware < 4 / 3 * plain.model


@pytest.mark.processes
def test_predicting_flops_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, bench.predict.work, bench.models.t5; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
