"""Tests that every engine which writes checkpoints resumes from them. The results must be bitwise equal to those
without an interruption."""

from pathlib import Path
from typing import Any

import pytest
from started_ranks import start_ranks
from test_engines_agree import SHAPE, spec

DROPOUT: dict[str, Any] = {"model": {**spec("fsdp")["model"], "dropout": 0.1}}
LORA: dict[str, Any] = {"name": "lora", "rank": 4, "dropout": 0.1}
NF4 = LORA | {"quantization": "nf4", "double_quantization": True}
# matrices so large that even half of one, on a rank, gets 8-bit moments
WIDE = {"model": {**DROPOUT["model"], "shape": SHAPE | {"vocab": 512}}, "optimizer": {"name": "adamw_8bit"}}
SAVED = {
    "fsdp fp32": spec("fsdp", "fp32", **DROPOUT),
    "fsdp bf16": spec("fsdp", "bf16", **DROPOUT),
    "ddp fp32": spec("ddp", "fp32", **DROPOUT),
    "ddp fp16": spec("ddp", "fp16", **DROPOUT),  # its loss scale is part of the checkpoint
    "zero0 bf16": spec("zero0", "bf16", **DROPOUT),
    "zero1 bf16": spec("zero1", "bf16", **DROPOUT),
    "zero3 fp32": spec("zero3", "fp32", **DROPOUT),
    **{f"{name} lora": spec(name, "bf16", adapter=LORA) for name in ("ddp", "zero0", "zero2", "zero3", "fsdp")},
    **{f"{name} nf4": spec(name, "bf16", adapter=NF4) for name in ("ddp", "zero2", "zero3", "fsdp")},
    "zero1 int8": spec("zero1", "fp32", adapter=LORA | {"quantization": "int8"}),
    "fsdp frozen": spec("fsdp", "fp32", adapter={"frozen": "^(shared|encoder)"}),
    **{f"{name} adamw_8bit": spec(name, **WIDE) for name in ("ddp", "zero0", "zero2", "zero3", "fsdp")},
    "ddp adafactor": spec("ddp", **DROPOUT, optimizer={"name": "adafactor"}),
}

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


def test_resuming_from_a_checkpoint_in_a_new_process_is_bitwise_exact(tmp_path: Path) -> None:
    """Every step draws random numbers for dropout. So results are equal only if the state of the random generator is
    restored."""
    first = start_ranks("checkpoint_ranks.py", SAVED, 2, tmp_path / "first")
    second = start_ranks("checkpoint_ranks.py", SAVED, 2, tmp_path / "second")
    for saved, loaded in zip(first, second, strict=True):
        for label in SAVED:
            assert (saved[label].pop("loaded"), loaded[label].pop("loaded")) == (False, True)
            assert saved[label] == loaded[label]
    assert first[0]["fsdp fp32"]["losses"] != first[1]["fsdp fp32"]["losses"]
