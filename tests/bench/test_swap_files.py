"""Tests of offload of optimizer states and weights to files on a disk. Losses must equal those with offload to host
memory. After a run, no such file may be left."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from started_runs import PATIENCE_S, T5, Command

from bench.core.record import RunRecord

BUILD_S = 1200.0
"""Timeout in seconds for a run that first compiles DeepSpeed's op for files."""
ZERO_3 = (
    *T5, "model.name=wide", "model.parameters=null", "model.shape.vocab=4096", "engine=zero3",
    "engine.zero_force_ds_cpu_optimizer=false", "engine.offload_param.pin_memory=false",
    "engine.offload_optimizer.pin_memory=false",
)  # fmt: skip
"""Overrides for a model with matrices of several MiB. DeepSpeed keeps tensors below 1 MiB in memory."""

pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(BUILD_S + 2 * PATIENCE_S)]


@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="needs libaio-dev")
def test_nvme_offload_gives_bitwise_the_losses_of_cpu_offload(
    zeroscale_run: Callable[..., Command], tmp_path: Path
) -> None:
    disk, seen = tmp_path / "disk", set[str]()
    disk.mkdir()
    on_disk = (word for name in ("param", "optimizer") for word in (
        f"engine.offload_{name}.device=nvme", f"engine.offload_{name}.nvme_path={disk}"
    ))  # fmt: skip
    run = zeroscale_run(*ZERO_3, "engine.offload_param.buffer_size=1000000", *on_disk, results=tmp_path / "disk_runs")
    until = time.monotonic() + BUILD_S
    while run.process.poll() is None and time.monotonic() < until:
        seen.update(file.name for file in disk.rglob("*.swp"))
        time.sleep(0.05)
    swapped = run.record()
    in_memory = ("engine.offload_param.device=cpu", "engine.offload_optimizer.device=cpu")
    held = zeroscale_run(*ZERO_3, *in_memory, results=tmp_path / "memory_runs").record()
    assert any(name.endswith("_param.tensor.swp") for name in seen)
    assert any(name.startswith("exp_avg_sq-") for name in seen)
    assert not list(disk.iterdir()) and not list((tmp_path / "disk_runs").rglob("*.swp"))
    assert swapped.outcome.kind == held.outcome.kind == "ok"
    assert losses(swapped) == losses(held) and len(losses(held)) >= 6


def test_unwritable_nvme_folder_is_refused_in_one_line(zeroscale_run: Callable[..., Command], tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "folder"
    words = ("engine.offload_optimizer.device=nvme", f"engine.offload_optimizer.nvme_path={absent}")
    reason = zeroscale_run(*ZERO_3, *words).record().outcome.reason
    rule = "files for direct I/O cannot be written there (No such file or directory)"
    assert reason.endswith(f"nvme_path={absent}: {rule}; set a writable folder on a local disk")


def losses(record: RunRecord) -> list[float | None]:
    assert record.observations is not None
    return list(record.observations.steps.loss)
