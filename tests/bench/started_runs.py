"""`zeroscale run` in processes of its own, as a user starts it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import store
from bench.record import RunRecord

QUICK = (
    "model=tiny",
    "precision=fp32",
    "batch.micro=2",
    "sequence.encoder=32",
    "sequence.decoder=16",
    "measure.block_steps=3",
    "measure.warmup_steps=3",
    "measure.warmup_max_steps=6",
    "measure.min_steps=6",
    "measure.min_s=0",
    "measure.max_steps=12",
)
"""A run that is over in seconds."""

ENDLESS = (*QUICK[:8], "measure.min_steps=1000000", "measure.max_steps=1000000", "measure.max_s=600")
"""A run that somebody has to end."""


class Command:
    """`zeroscale run` in a process of its own, as a user starts it."""

    def __init__(self, results: Path, overrides: Sequence[str], **options: Any) -> None:
        words = [sys.executable, "-m", "bench.cli", "run", *overrides, "--results", str(results)]
        self.results = results
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )

    def heartbeat(self, ready: Callable[[dict[str, Any]], bool], timeout_s: float = 60) -> dict[str, Any]:
        """Wait until the run's heartbeat is as asked, and return it."""
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
        return self.heartbeat(lambda beat: all(rank["step"] >= 0 for rank in beat["ranks"]))

    def record(self, timeout_s: float = 120) -> RunRecord:
        """Wait for the end and return the one record there must be."""
        self.output, self.errors = self.process.communicate(timeout=timeout_s)
        found = list(store.find_records([self.results]))
        assert len(found) == 1, (found, self.output, self.errors)
        return store.read_record(found[0])

    def folder(self) -> Path:
        return next(store.find_records([self.results])).parent


def alive(pids: Sequence[int]) -> list[int]:
    """Return those of `pids` that still run."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()]
