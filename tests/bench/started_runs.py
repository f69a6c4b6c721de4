"""`zeroscale run` in its own process, as a user starts it."""

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
    "measure.block_steps=3",
    "measure.warmup_steps=6",
    "measure.min_steps=6",
    "measure.window_s=0",
    "devices_per_node=2",
)
"""A run that takes seconds. Its model is our own GPT: importing transformers' T5 would take half of a rank's time."""
T5 = ("model=tiny", "sequence.encoder=32", "sequence.decoder=16", *QUICK[1:3], *QUICK[4:])
"""The same run with a small T5."""

ENDLESS = (
    *QUICK[:6], "devices_per_node=2", "measure.min_steps=1000000", "measure.max_s=600",
)  # fmt: skip
"""A run without an end; the test ends it."""

PATIENCE_S = 250.0
"""Seconds to wait for processes that import torch: few on an idle machine, minutes on a busy one. Below the time limit
of a test."""
SOON_S = 40.0
"""Seconds for events that follow at once, with room for a busy machine. A test that waits in vain waits for minutes."""


class Command:
    """`zeroscale run` in its own process, as a user starts it."""

    def __init__(
        self, results: Path, overrides: Sequence[str], env: Mapping[str, str] = os.environ, **options: Any
    ) -> None:
        """One thread per rank by default: several threads wait for each other by spinning, and a run would take minutes
        next to background load."""
        words = [sys.executable, "-m", "bench.cli", "run", *overrides, "--results", str(results)]
        options["env"] = {"OMP_NUM_THREADS": "1", **env}
        self.results = results
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )

    def heartbeat(self, ready: Callable[[dict[str, Any]], bool], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until the run's heartbeat satisfies a condition, and return it."""
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
        """Wait until every rank makes steps."""
        return self.heartbeat(lambda beat: bool(beat["ranks"]) and all(rank["step"] >= 0 for rank in beat["ranks"]))

    def record(self, timeout_s: float = PATIENCE_S) -> RunRecord:
        """Wait for the end and return the only record."""
        self.output, self.errors = self.process.communicate(timeout=timeout_s)
        found = list(store.find_records([self.results]))
        assert len(found) == 1, (found, self.output, self.errors)
        return store.read_record(found[0])

    def folder(self) -> Path:
        return next(store.find_records([self.results])).parent


def alive(pids: Sequence[int]) -> list[int]:
    """Return the `pids` that still run."""
    return [pid for pid in pids if _runs(pid)]


def survivors(pids: Sequence[int]) -> list[int]:
    """Return the `pids` that still run after a while. A killed process ends only when the machine schedules it."""
    until = time.monotonic() + SOON_S
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.1)
    return alive(pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # it has ended, perhaps while this looked
        return False
