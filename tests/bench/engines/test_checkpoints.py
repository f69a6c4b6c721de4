"""Every engine that writes checkpoints resumes from them with bitwise equal results."""

from pathlib import Path
from typing import Any

import pytest
from started_ranks import start_ranks
from test_engines_agree import SHAPE, spec

DROPOUT: dict[str, Any] = {"model": {**spec("fsdp")["model"], "dropout": 0.1}}
# matrices of which even half on a rank has 8-bit moments
WIDE = {"model": {**DROPOUT["model"], "shape": SHAPE | {"vocab": 512}}, "optimizer": {"name": "adamw_8bit"}}
SAVED = {
    "fsdp fp32": spec("fsdp", "fp32", **DROPOUT),
    "fsdp bf16": spec("fsdp", "bf16", **DROPOUT),
    "ddp fp32": spec("ddp", "fp32", **DROPOUT),
    "ddp fp16": spec("ddp", "fp16", **DROPOUT),  # its loss scale is part of the checkpoint
    "zero0 bf16": spec("zero0", "bf16", **DROPOUT),
    "zero1 bf16": spec("zero1", "bf16", **DROPOUT),
    "zero3 fp32": spec("zero3", "fp32", **DROPOUT),
    **{f"{name} adamw_8bit": spec(name, **WIDE) for name in ("ddp", "zero0", "zero2", "zero3", "fsdp")},
    "ddp adafactor": spec("ddp", **DROPOUT, optimizer={"name": "adafactor"}),
}

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


def test_a_fresh_process_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    """Dropout is drawn in every step, so results are equal only if the random state is restored."""
    first = start_ranks("checkpoint_ranks.py", SAVED, 2, tmp_path / "first")
    second = start_ranks("checkpoint_ranks.py", SAVED, 2, tmp_path / "second")
    for saved, loaded in zip(first, second, strict=True):
        for label in SAVED:
            assert (saved[label].pop("loaded"), loaded[label].pop("loaded")) == (False, True)
            assert saved[label] == loaded[label]
    assert first[0]["fsdp fp32"]["losses"] != first[1]["fsdp fp32"]["losses"]
