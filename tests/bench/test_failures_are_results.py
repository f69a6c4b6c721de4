"""Tests with real failures of every kind. Each run must end within seconds, and leave a record that contains the
reason."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started_runs import ENDLESS, PATIENCE_S, QUICK, SOON_S, Command, alive, survivors

from analysis.flags import list_flags
from bench.core import store
from bench.core.formatting import describe_shortage

pytestmark = pytest.mark.processes
Start = Callable[..., Command]

PLAIN = ("engine=ddp", *ENDLESS)
"""Overrides for failures that do not depend on the engine. The engine is ddp, because importing DeepSpeed for other
engines would take a second."""
PIPELINE = (
    "engine=pipeline", "parallel.pipeline=3", "batch.accumulation=3", *ENDLESS[:7], "devices_per_node=3", *ENDLESS[8:],
)  # fmt: skip
"""Overrides of a pipeline of three ranks. If the middle rank is lost, the first rank waits in vain for gradients,
and the last rank for activations."""


def test_killed_rank_ends_the_run(zeroscale_run: Start) -> None:
    run = zeroscale_run(*PIPELINE)
    pids = [rank["pid"] for rank in run.stepping()["ranks"]]
    os.kill(pids[1], signal.SIGKILL)
    record = run.record()
    assert record.outcome.kind == "error"
    assert record.outcome.reason.startswith("rank 1 was killed by SIGKILL in ")
    assert run.process.returncode == 1
    assert not alive(pids)


def test_rank_that_raises_is_named_with_its_exception(zeroscale_run: Start) -> None:
    run = zeroscale_run(*PLAIN, env=os.environ | {"ZEROSCALE_DRILL": "rank=1 step=2 action=raise"})
    record = run.record()
    assert record.outcome.kind == "error"
    assert record.outcome.reason == "rank 1 in fetch at step 2: RuntimeError: drill: rank 1 raises at step 2"
    assert 'File "bench/measure/failures.py", line' in record.outcome.evidence["traceback"]
    assert record.outcome.evidence["drill"] == "rank=1 step=2 action=raise" and "drill" in list_flags(record)


def test_run_lost_after_its_window_is_measured_but_uninspected(
    zeroscale_run: Start,
) -> None:
    """A run has three warm-up steps, then a window of three timed steps, then an untimed step in which collectives are
    counted. A rank fails in the untimed step. So the record has step times, but no collectives."""
    steps = ("measure.warmup_steps=3", "measure.min_steps=3")
    run = zeroscale_run(
        *QUICK, "engine=ddp", *steps, env=os.environ | {"ZEROSCALE_DRILL": "rank=1 step=6 action=raise"}
    )
    record = run.record()
    assert (record.outcome.kind, run.process.returncode) == ("ok", 0)
    assert record.observations and record.observations.steps and record.observations.collectives is None
    assert record.observations.uninspected == (
        f"{store.UNINSPECTED}: rank 1 in fetch at step 6: RuntimeError: drill: rank 1 raises at step 6"
    )


@pytest.mark.timed
def test_sleeping_rank_is_a_hang_with_the_stacks_of_all_ranks(zeroscale_run: Start) -> None:
    drill = os.environ | {"ZEROSCALE_DRILL": "rank=1 step=2 action=sleep"}
    record = zeroscale_run(*PIPELINE, "launcher.hang_s=4", env=drill).record()
    assert record.outcome.kind == "hang"
    assert record.outcome.reason.endswith("furthest behind: rank 1 in fetch at step 2")
    stacks = record.outcome.evidence["stacks"]
    assert set(stacks) == {"0", "1", "2"}
    assert "in inject" in stacks["1"], "the sleeping rank's stack shows where it sleeps"
    for neighbour in "02":
        assert "train_step" in stacks[neighbour], "the waiting rank's stack shows what it waits in"


def test_exhausted_host_memory_is_host_oom(zeroscale_run: Start) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (10 * 2**30, 10 * 2**30))

    # The attention probabilities of one layer alone take 96 × 32 × 1024 × 1024 × 4 bytes = 12 GiB.
    large = ("model.attention=eager", "model.shape.heads=32", "batch.micro=96", "sequence.tokens=1024")
    record = zeroscale_run(*QUICK, "engine=ddp", *large, "devices_per_node=1", "--no-prune", preexec_fn=limit).record()
    assert record.outcome.kind == "host_oom", record.outcome
    assert record.outcome.final
    assert record.outcome.evidence["ranks"][0]["rule"].startswith("message 'DefaultCPUAllocator")
    short = record.outcome.shortage
    assert short and (short.rank, short.where, short.total_bytes) == (0, "host", 10 * 2**30)
    assert (
        short.requested_bytes
        and short.free_bytes
        and short.lacking_bytes == short.requested_bytes - short.free_bytes > 0
    )
    assert short.live_bytes is None or 0 < short.live_bytes <= (short.peak_bytes or 0) < 10 * 2**30
    assert record.outcome.reason.endswith(describe_shortage(short))
    assert f"{short.requested_bytes / 2**30:.3g} GiB requested, " in record.outcome.reason


def test_nan_loss_is_the_outcome_invalid(zeroscale_run: Start) -> None:
    record = zeroscale_run(*QUICK, "engine=ddp", "optimizer.lr=1e30", "devices_per_node=1").record()
    assert record.outcome.kind == "invalid"
    assert "is not finite at step" in record.outcome.reason
    assert record.observations is not None
    assert record.observations.steps is not None
    assert None in record.observations.steps.loss


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder on a temporary file system of 16 MiB, for tests of a full disk."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_disk_that_fills_during_a_run_loses_no_record(zeroscale_run: Start, small_disk: Path) -> None:
    run = zeroscale_run(*PLAIN[:-1], "measure.max_s=8", results=small_disk / "runs")
    run.stepping()
    fill(small_disk)
    assert os.statvfs(small_disk).f_bavail == 0, "nothing is left but what was reserved"
    record = run.record()
    assert record.outcome.kind == "ok"
    assert (run.folder() / "steps.parquet").exists()


def test_full_disk_is_reported_before_the_start(zeroscale_run: Start, small_disk: Path) -> None:
    fill(small_disk)
    (small_disk / "filler").open("r+b").truncate((small_disk / "filler").stat().st_size - 64 * 1024)
    run = zeroscale_run(*QUICK, results=small_disk / "runs")
    _, errors = run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 2
    assert "cannot reserve" in errors
    # Tests that run in parallel may make this machine busy, which is also printed.
    assert len([line for line in errors.splitlines() if "this machine is busy" not in line]) == 1


@pytest.mark.parametrize(
    ("number", "point", "expected"),
    [
        (signal.SIGINT, PIPELINE, "SIGINT (Ctrl-C)"),
        (signal.SIGTERM, PLAIN, "SIGTERM"),
        (signal.SIGKILL, PLAIN, "SIGTERM"),  # the kernel sends it to the supervisor, whose parent died
    ],
    ids=str,
)
def test_command_ended_by_any_signal_leaves_a_record_and_no_orphans(
    zeroscale_run: Start, number: int, point: tuple[str, ...], expected: str
) -> None:
    run = zeroscale_run(*point)
    beat = run.stepping()
    os.kill(run.process.pid, number)
    run.process.wait(timeout=SOON_S)
    assert not survivors([beat["supervisor"], *(rank["pid"] for rank in beat["ranks"])])
    record = run.record()
    assert (record.outcome.kind, record.outcome.reason) == ("cancelled", f"interrupted by {expected}")
    assert not record.outcome.final
    where = {rank["rank"]: rank["phase"] for rank in record.outcome.evidence["ranks"]}
    assert sorted(where) == list(range(record.spec.world_size))
    assert set(where.values()) <= {"fetch", "steps"}, "a step first fetches its samples, then trains on them"
    if number == signal.SIGINT:
        ending = f"zeroscale: interrupted by {expected}; ending the run and writing its record into {run.folder()} …"
        step = min(rank["step"] for rank in record.outcome.evidence["ranks"])
        result = f"cancelled: interrupted by {expected} at step {step}"
        assert run.errors.splitlines()[-3:] == [ending, result, "next: repeat the same command, which starts a new run"]


@pytest.mark.cold
def test_ctrl_c_before_the_start_leaves_a_record_and_no_traceback(zeroscale_run: Start) -> None:
    run = zeroscale_run(*PLAIN)
    until = time.monotonic() + SOON_S
    while not list(run.results.glob(f"*/*/*/{store.SPEC}")) and time.monotonic() < until:
        time.sleep(0.001)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.record(SOON_S).outcome.kind == "cancelled"
    assert "Traceback" not in run.errors


def test_killed_supervisor_leaves_a_record_and_no_orphans(zeroscale_run: Start) -> None:
    run = zeroscale_run(*PLAIN)
    beat = run.stepping()
    os.kill(beat["supervisor"], signal.SIGKILL)
    record = run.record()
    assert record.outcome.kind == "error"
    assert record.outcome.reason.startswith("its supervisor died")
    assert not survivors([rank["pid"] for rank in beat["ranks"]])


def test_time_limit_ends_a_run_with_outcome_timeout(zeroscale_run: Start) -> None:
    record = zeroscale_run(*PLAIN, "devices_per_node=1", "launcher.time_limit_min=0.2").record()
    assert record.outcome.kind == "timeout"
    assert record.outcome.reason == "the time limit of 0.2 min was reached"


def test_failed_attempt_has_at_most_ten_files(zeroscale_run: Start) -> None:
    run = zeroscale_run(*PLAIN, env=os.environ | {"ZEROSCALE_DRILL": "rank=0 step=1 action=exit"})
    record = run.record()
    assert record.outcome.reason == "rank 0 exited with 3 in fetch at step 1"
    files = sorted(path.name for path in run.folder().iterdir())
    assert len(files) <= 10
    assert json.loads((run.folder() / "heartbeat.json").read_text())["state"] == "ended"
