"""The sweep of a round, kept going by whatever befalls it, and what there is to strike."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slurm_testbed import Testbed
from sweeping import QUICK, Study

from bench import store
from bench.record import Circumstance
from chaos.marked import MARK, Process, list_processes
from chaos.schedule import Round

PATIENCE_S = 240.0  # for a round to come to its end, and for an attempt to get its record
_POLL_S = 0.5
_POINT = (
    "measure.min_s=5", "measure.max_s=5", "measure.max_steps=100000", "launcher.hang_s=8", "launcher.startup_s=60",
)  # fmt: skip
"""Each takes steps for five seconds."""
_LOCAL = ("launcher=local", "launcher.lock=false")
_OF_A_JOB = ("launcher.warning_s=", "launcher.time_limit_min=", "launcher=")
Found = TypeVar("Found")


class OpenAttempt(NamedTuple):
    """An attempt that has no record yet."""

    folder: Path
    job: str  # Slurm's number; empty here


class Sweep(Study):
    """One round's sweep on a testbed, or on this machine."""

    def __init__(self, bed: Testbed, results: Path, planned: Round) -> None:
        super().__init__(bed, results)
        self.planned, self.mark = planned, f"{os.getpid()}-{planned.seed}"
        os.environ[MARK] = self.mark  # for what is started from here; our own is in no /proc
        self.command = self.begin()

    @property
    def local(self) -> bool:
        return self.planned.mode == "local"

    def begin(self) -> "subprocess.Popen[str]":
        """Start the command that asks for the points."""
        words = [word for word in QUICK if not (self.local and word.startswith(_OF_A_JOB))]
        place = _LOCAL if self.local else (f"launcher.mode={self.planned.mode}", "launcher.throttle=2")
        micro = ",".join(str(number + 1) for number in range(self.planned.points))
        points = (f"nodes={self.planned.nodes}", f"batch.micro={micro}")
        self.command = self.start(*self.asking(*words, *_POINT, *place, *points))
        return self.command

    def answered(self) -> bool:
        """Whether every point has its answer, or as many failures as a point may have."""
        told = self.read_status()
        return bool(told["points"]) and all(point["state"] in ("answered", "given up") for point in told["points"])

    def read_status(self) -> dict[str, Any]:
        """Return what `status` says; nothing where it has nothing to say yet."""
        with contextlib.suppress(json.JSONDecodeError, SystemExit, OSError):
            return self.status()
        return {"points": [], "jobs": []}

    def keep_going(self) -> None:
        """Start what goes on with the sweep if nothing is at it."""
        if self.command.poll() is None:
            return
        if not (self.folder / "sweeps").exists():
            assert self.command.returncode != 2, self.command.communicate()[1]
            self.begin()
        elif not self.read_status()["jobs"] and not self.answered():
            self.command = self.start("resume", str(self.folder), "--json")

    def processes(self, role: str) -> list[Process]:
        return [found for found in list_processes(self.mark) if found.role == role]

    def open_attempts(self, jobs: Sequence[str] | None = None) -> list[OpenAttempt]:
        """Return the attempts without a record, of these jobs or of all."""
        found = []
        for folder in sorted(self.attempts()):
            with contextlib.suppress(OSError, ValueError):  # only just claimed
                launcher = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes()).launcher
                if not (folder / store.RECORD).exists():
                    found.append(OpenAttempt(folder, str(launcher.get("job_id", ""))))
        return [attempt for attempt in found if jobs is None or attempt.job in jobs]

    def running_jobs(self) -> list[tuple[str, list[str]]]:
        """Return the number and nodes of each of our jobs that is at an attempt now."""
        listed = self.bed.slurm("squeue", "--noheader", "--states=RUNNING", "--Format=JobID:20,NodeList:200")
        nodes = {line[:20].strip(): line[20:].strip() for line in listed.splitlines()}
        at_work = sorted({attempt.job for attempt in self.open_attempts()} & set(nodes), key=int)
        return [(job, self.bed.slurm("scontrol", "show", "hostnames", nodes[job]).split()) for job in at_work]

    def wait_for_target(self, find: Callable[[], list[Found]], choice: int) -> Found | None:
        """Wait until there is something to strike, keeping the sweep going; None if it comes to its end before."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if found := find():
                return found[choice % len(found)]
            self.keep_going()
            if self.command.poll() is not None and self.answered():
                return None
            time.sleep(_POLL_S)
        return None

    def settle(self, attempts: Sequence[OpenAttempt], limit_s: float = PATIENCE_S) -> None:
        """Wait until each of these attempts has its record: `status` and the next job conclude what left none."""
        until = time.monotonic() + limit_s
        while any(not (attempt.folder / store.RECORD).exists() for attempt in attempts):
            if time.monotonic() > until:
                return
            self.keep_going()
            self.read_status()
            time.sleep(_POLL_S)

    def finish(self) -> bool:
        """Go on until every point is answered and nothing is under way; False if that takes too long."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self.command.poll() is not None and not self.read_status()["jobs"] and self.answered():
                return True
            self.keep_going()
            time.sleep(_POLL_S)
        return False
