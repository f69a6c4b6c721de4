"""Helpers for tests that start `zeroscale run` in a separate process, as a user does."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core import store
from bench.core.record import RunRecord

QUICK = (
    "model=gpt2_tiny",
    "precision=fp32",
    "batch.micro=2",
    "sequence.tokens=32",
    "measure=full",
    "measure.block_steps=3",
    "measure.warmup_steps=6",
    "measure.min_steps=6",
    "measure.window_s=0",
    "devices_per_node=2",
)
"""Overrides of a run that takes seconds. Its model is the project's own GPT, because importing transformers' T5
would take half of a rank's time."""
T5 = ("model=tiny", "sequence.encoder=32", "sequence.decoder=16", *QUICK[1:3], *QUICK[4:])
"""Overrides of the same run with a small T5."""

ENDLESS = (
    *QUICK[:7], "devices_per_node=2", "measure.min_steps=1000000", "measure.max_s=600",
)  # fmt: skip
"""Overrides of a run that does not end by itself within a test. The test must end it."""

PATIENCE_S = 250.0
"""Timeout in seconds for processes that import torch. They need seconds on an idle machine and minutes on a busy
one. The timeout is below the time limit of a test."""
SOON_S = 40.0
"""Timeout in seconds for events that should follow at once, with a margin for a busy machine. It is shorter than
PATIENCE_S, so that a test that fails does not take minutes."""


class Command:
    """A started process of `zeroscale run`."""

    def __init__(
        self, results: Path, overrides: Sequence[str], env: Mapping[str, str] = os.environ, **options: Any
    ) -> None:
        """Start the command with results in the folder `results`. `options` are further arguments of Popen. By default
        each rank has a single thread. Several threads would busy-wait for each other, and with background load a run
        would take minutes."""
        words = [sys.executable, "-m", "bench.cli", "run", *overrides, "--results", str(results)]
        options["env"] = {"OMP_NUM_THREADS": "1", **env}
        self.results = results
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )

    def heartbeat(self, ready: Callable[[dict[str, Any]], bool], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until `ready` returns True for the content of the run's `heartbeat.json`, and return this content. Fail
        if the run ends earlier."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for path in self.results.rglob(store.HEARTBEAT):
                beat: dict[str, Any] = json.loads(path.read_text())
                if ready(beat):
                    return beat
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError("the run did not get there in time")

    def stepping(self) -> dict[str, Any]:
        """Wait until every rank has begun its steps, and return the heartbeat."""
        return self.heartbeat(lambda beat: bool(beat["ranks"]) and all(rank["step"] >= 0 for rank in beat["ranks"]))

    def record(self, timeout_s: float = PATIENCE_S) -> RunRecord:
        """Wait for the end of the run and return its record. The results folder must contain exactly one record."""
        self.output, self.errors = self.process.communicate(timeout=timeout_s)
        found = list(store.find_records([self.results]))
        assert len(found) == 1, (found, self.output, self.errors)
        return store.read_record(found[0])

    def folder(self) -> Path:
        return next(store.find_records([self.results])).parent


def alive(pids: Sequence[int]) -> list[int]:
    """Return those of the process ids `pids` whose process still runs."""
    return [pid for pid in pids if _runs(pid)]


def survivors(pids: Sequence[int]) -> list[int]:
    """Wait up to SOON_S seconds for all processes `pids` to end, and return the ids of processes that still run. The
    wait is needed because a killed process ends only when the kernel schedules it."""
    until = time.monotonic() + SOON_S
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.1)
    return alive(pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # the process has ended
        return False
