"""Tests of users' published reports on whether a run fitted into memory. For each report, `published_memory` builds the
spec of the reported run, and predicts the memory. Hydra composes a second spec of the same run. Both specs must have
the same predicted memory."""

import pytest

from analysis.validation import published_memory
from bench.config import compose
from bench.core.spec import RunSpec
from bench.predict.memory import predict_memory

OLD_T5 = ("model=t5_3b", "precision=fp16", "model.attention=eager", "model.dropout=0.1", "devices_per_node=1")
OFFLOAD = ("engine.offload_optimizer.device=cpu", "optimizer.implementation=native")
XXL = ("model=t5_v1_1_xxl", "devices_per_node=8", "model.attention=eager", "model.dropout=0.1")
AUTO = (  # transformers' values for "auto" at d_model 4096
    "engine=zero3", "engine.reduce_bucket_size=16777216", "engine.stage3_prefetch_bucket_size=15099494",
    "engine.stage3_param_persistence_threshold=40960",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "configuration", "overrides"),
    [
        ("t5-3b", "fp16 batch 1 no sharding no offload", (*OLD_T5, "engine=ddp", "batch.micro=1")),
        (
            "t5-3b",
            "ZeRO-2 + CPU optimizer offload batch 20",
            (*OLD_T5, "engine=zero2", "engine.reduce_bucket_size=200000000", *OFFLOAD, "batch.micro=20"),
        ),
        (
            "flan-t5-xxl 11B",
            "ZeRO-3 bf16 batch 8 no offload",
            (*XXL, *AUTO, "precision=bf16", "batch.micro=8", "activation_checkpointing=true"),
        ),
        (
            "flan-t5-xxl 11B",
            "fp32 + offload",
            (*XXL, *AUTO, *OFFLOAD, "engine.offload_param.device=cpu", "precision=fp32", "batch.micro=1",
             "activation_checkpointing=true"),
        ),
    ],
)  # fmt: skip
def test_spec_of_a_published_report_has_the_memory_of_the_composed_spec(
    model: str, configuration: str, overrides: tuple[str, ...]
) -> None:
    read = next(published_memory.list_specs(model, published_memory.REPORTS[model, configuration]))
    lengths = tuple(f"sequence.{kind}={length}" for kind, length in read.sequence.items())
    composed: RunSpec = compose.compose_request(
        compose.parse_single(["devices_per_node=2", *overrides, *lengths, "launcher=slurm"])
    ).spec
    assert predict_memory(read) == predict_memory(composed)


@pytest.mark.parametrize(("device", "machine"), [("V100-16GB", "v100_16"), ("A100-40GB", "a100_40")])
def test_device_of_a_published_report_has_the_memory_of_its_machine_file(device: str, machine: str) -> None:
    assert (
        compose.compose_request([("machine", machine), ("devices_per_node", 2)]).machine.memory_bytes
        == published_memory.DEVICE_BYTES[device]
    )
