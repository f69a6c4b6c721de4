"""Sweep of one round of random faults. It is resumed after every fault. It also lists the attempts, jobs and processes
that a fault can hit."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slurm_testbed import Testbed
from sweeping import QUICK, Study

from bench.core import store
from bench.core.record import Circumstance
from chaos.marked import MARK, Process, list_processes
from chaos.schedule import POINTS, Round

PATIENCE_S = 900.0  # limit for the end of a round, and for the record of an attempt, on a busy machine
_POLL_S = 0.5
_POINT = ("launcher.hang_s=13", "launcher.startup_s=60")
"""Overrides of each point. A node that is silent for 10 s (see QUICK) counts as lost. The limits here are longer, so
that a silent node counts as lost before its ranks count as hanging."""
_LOCAL = ("launcher=local", "launcher.lock=false")
_OF_A_JOB = ("launcher.warning_s=", "launcher.time_limit_min=", "launcher=")
Found = TypeVar("Found")


class OpenAttempt(NamedTuple):
    """Attempt (one try at a point) that has no record yet."""

    folder: Path
    job: str  # Slurm's job id; empty for a local run


class Sweep(Study):
    """Sweep of one round, on a Slurm testbed, or on this machine in mode `local`."""

    def __init__(self, bed: Testbed, results: Path, planned: Round) -> None:
        super().__init__(bed, results)
        self.planned, self.mark, self.asked = planned, f"{os.getpid()}-{planned.seed}", POINTS
        self._commands: list[subprocess.Popen[str]] = []
        self.library, self.stall = results.parent / "stall.so", results.parent / f"stalled-{planned.seed}"
        if not self.library.exists():
            source = str(Path(__file__).with_name("stall.c"))
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self.library, source, "-ldl"], check=True)
        os.environ[MARK] = self.mark  # for child processes; /proc does not show this change for the current process
        self.command = self.begin()

    @property
    def local(self) -> bool:
        return self.planned.mode == "local"

    def begin(self) -> "subprocess.Popen[str]":
        """Start the `zeroscale sweep` command that submits the points, and return its process."""
        words = [word for word in QUICK if not (self.local and word.startswith(_OF_A_JOB))]
        stalls = (
            f"launcher.environment={{LD_PRELOAD: {self.library}, STALL_FILE: {self.stall}, STALL_PATH: {self.folder}}}"
        )
        place = _LOCAL if self.local else (f"launcher.mode={self.planned.mode}", "launcher.throttle=2", stalls)
        micro = ",".join(str(number + 1) for number in range(self.asked))
        window_s = self.planned.window_s
        window = (f"measure.window_s={window_s}", f"measure.max_s={window_s}")
        points = (f"nodes={self.planned.nodes}", f"batch.micro={micro}")
        self.command = self.start(*self.asking(*words, *_POINT, *window, *place, *points))
        return self.command

    def start(self, verb: str, *words: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a `zeroscale` command, and keep it so that its error output can be checked at the end of the round."""
        command = super().start(verb, *words, **environment)
        self._commands.append(command)
        return command

    def list_tracebacks(self) -> Iterator[str]:
        """Yield an error for each command that ended with a traceback instead of a one-line message."""
        for command in self._commands:
            _, errors = command.communicate(timeout=30)
            if "Traceback" in errors:
                yield f"a command ended with a traceback: {errors.strip().splitlines()[-1]}"

    def read_status(self) -> dict[str, Any]:
        """Return the JSON output of `zeroscale status`. Its lists of points and jobs are empty if the command fails,
        for example because the study does not exist yet."""
        with contextlib.suppress(json.JSONDecodeError, SystemExit, OSError):
            return self.status()
        return {"points": [], "jobs": []}

    def keep_going(self, *, more: bool = False) -> bool:
        """Resume the sweep if no command and no job is working on it. Return True if every point is finished. A
        finished point has a final result (`answered`) or has failed in as many attempts as are allowed (`given up`).

        If all points are finished and `more` is true, further points are added to the sweep.
        """
        if self.command.poll() is None:
            return False
        if not (self.folder / "sweeps").exists():
            assert self.command.returncode != 2, "".join(self.command.communicate())
            self.begin()
            return False
        status = self.read_status()
        if status["jobs"]:
            return False
        ended = bool(status["points"]) and all(point["state"] in ("answered", "given up") for point in status["points"])
        if ended and more:
            self.asked += POINTS
            self.begin()
        elif not ended:
            self.command = self.start("resume", str(self.folder), "--json")
        return ended

    def processes(self, role: str) -> list[Process]:
        return [found for found in list_processes(self.mark) if found.role == role]

    def open_attempts(self, jobs: Sequence[str] | None = None) -> list[OpenAttempt]:
        """Return the attempts of the Slurm jobs `jobs` that have no record yet. If `jobs` is None, return those of
        all jobs that have no record yet."""
        found = []
        for folder in sorted(self.attempts()):
            with contextlib.suppress(OSError, ValueError):  # the attempt was just claimed and has no such file yet
                launcher = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes()).launcher
                if not (folder / store.RECORD).exists():
                    found.append(OpenAttempt(folder, str(launcher.get("job_id", ""))))
        return [attempt for attempt in found if jobs is None or attempt.job in jobs]

    def running_jobs(self) -> list[tuple[str, list[str]]]:
        """Return (job id, nodes) of each running job of the sweep that has an open attempt."""
        listed = self.bed.slurm("squeue", "--noheader", "--states=RUNNING", "--Format=JobID:20,NodeList:200")
        nodes = {line[:20].strip(): line[20:].strip() for line in listed.splitlines()}
        at_work = sorted({attempt.job for attempt in self.open_attempts()} & set(nodes), key=int)
        return [(job, self.bed.slurm("scontrol", "show", "hostnames", nodes[job]).split()) for job in at_work]

    def wait_for_target(self, find: Callable[[], list[Found]], choice: int) -> Found | None:
        """Wait until the function `find` returns possible targets of a fault. Return the target whose index is `choice`
        modulo the number of targets. Return None if no target appears within a time limit.

        Points are added to the sweep when all points are finished, so that new targets appear.
        """
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if found := find():
                return found[choice % len(found)]
            self.keep_going(more=True)
            time.sleep(_POLL_S)
        return None

    def settle(self, attempts: Sequence[OpenAttempt], limit_s: float = PATIENCE_S) -> None:
        """Wait until each of these attempts has a record, but at most for `limit_s` seconds.

        A killed attempt may leave no record. Then `zeroscale status` or the next job of the sweep writes the record.
        """
        until = time.monotonic() + limit_s
        while any(not (attempt.folder / store.RECORD).exists() for attempt in attempts):
            if time.monotonic() > until:
                return
            self.keep_going()
            time.sleep(_POLL_S)

    def finish(self) -> bool:
        """Resume the sweep until every point has a final result or has failed in as many attempts as are allowed.
        Return False if this takes longer than a time limit."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self.keep_going():
                return True
            time.sleep(_POLL_S)
        return False
