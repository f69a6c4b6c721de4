"""Read a study's folder: attempts with and without a record, jobs, and the trials of a search."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import AwareDatetime, BaseModel, ValidationError

from bench.core import store
from bench.core.processes import ProcessIdentity, identify_process
from bench.core.quantities import RunQuantities, compute_node_hours, derive_quantities
from bench.core.record import Circumstance
from bench.core.spec import RunSpec
from bench.core.store import RunAttempt
from bench.sweep import definition, jobs
from bench.sweep.definition import RunKey, SweepDefinition, Trial
from bench.sweep.policy import TrialResult, explain_given_up, find_answer

FRESH_S = 90.0
"""An attempt counts as alive for this many seconds after its last heartbeat. Heartbeats are written every few seconds,
but a file system can stall for longer."""
_CLAIM_S = 3.0  # longest time from the creation of an attempt's folder to its description, on a slow file system
REPORT = "report"
"""Name of the folder for the files that the autopilot writes when all jobs have ended."""
_NO_POINTS = (definition.FOLDER, definition.TRIALS, jobs.FOLDER, jobs.EXCLUDED, REPORT)


class HeartbeatRank(BaseModel):
    """Phase and step of one rank in a heartbeat."""

    phase: str = ""
    step: int = -1  # -1 outside the loop of steps


class LastHeartbeat(BaseModel):
    """The fields of a heartbeat file that this package reads."""

    at: AwareDatetime
    host: str
    supervisor: int
    process: ProcessIdentity | None = None  # identity of the supervisor; None in heartbeats of older versions
    ranks: tuple[HeartbeatRank, ...] = ()


class AttemptOrigin(BaseModel):
    """The job that started an attempt. It is recorded under `launcher` in the attempt's circumstances."""

    job: str = ""  # empty without a scheduler
    task: int | None = None
    restart: int = 0


class UnfinishedAttempt(NamedTuple):
    """An attempt without a record. Either it is still running, or it died and its record is yet to be written."""

    key: RunKey
    attempt: store.RunAttempt
    job: str  # empty without a scheduler
    task: int | None
    restart: int
    heartbeat: LastHeartbeat | None
    seen_at: float  # last sign of life, in seconds since the epoch

    @property
    def fresh(self) -> bool:
        return time.time() - self.seen_at < FRESH_S

    @property
    def dead_here(self) -> bool:
        """Return whether the attempt's supervisor ran on this machine and has ended. False if it ran on another
        machine."""
        if not self.heartbeat or self.heartbeat.host != os.uname().nodename:
            return False
        own, before = identify_process(os.getpid()), self.heartbeat.process
        if own is None or before is None:
            return not Path(f"/proc/{self.heartbeat.supervisor}").exists()
        if before.boot_id != own.boot_id:
            return True
        # In another namespace, its pid belongs to another process.
        return before.namespace == own.namespace and identify_process(self.heartbeat.supervisor) != before

    def doing(self) -> str:
        """Return the phase and step of the attempt's slowest rank in words, and the age of its last sign of life."""
        if not self.heartbeat or not self.heartbeat.ranks:
            return "starting"
        behind = min(self.heartbeat.ranks, key=lambda rank: rank.step)
        step = f" step {behind.step}" if behind.step >= 0 else ""
        return f"{behind.phase}{step}, {time.time() - self.seen_at:.0f} s ago"


class StudySnapshot(NamedTuple):
    """Content of a study's folder at one point in time."""

    folder: Path
    tried: dict[str, list[store.RunAttempt]]  # by config_id
    open: dict[RunKey, list[UnfinishedAttempt]]  # attempts without a record
    jobs: list[jobs.SubmittedJob]
    ends: dict[tuple[str, int | None], jobs.JobEnd]  # ends of jobs or array tasks that left points without an attempt
    unreadable: list[store.Unreadable]  # files and folders that are ignored because they cannot be read
    undescribed: list[Path]  # attempt folders older than `FRESH_S` seconds that still have no description

    def of(self, key: RunKey) -> list[store.RunAttempt]:
        """Return the attempts at a point that have a record, oldest first."""
        tried = self.tried.get(key.config_id, ())
        return [a for a in tried if a.outcome and (a.repeat, a.machine) == (key.repeat, key.machine)]

    def list_started_jobs(self) -> set[str]:
        """Return the names of the jobs that have begun at least one attempt (one try at a run). Attempts at the control
        point, a reference configuration, count as well."""
        unfinished = (attempt.job for attempts in self.open.values() for attempt in attempts)
        return {*unfinished, *(attempt.job for attempts in self.tried.values() for attempt in attempts)}

    def has_attempt(self, key: RunKey, job: str) -> bool:
        """Return whether a job has begun an attempt (one try) at a point. The attempt may have ended with any outcome,
        or may still be running."""
        return any(a.job == job for a in (*self.of(key), *self.open.get(key, ())))


def read_snapshot(folder: Path) -> StudySnapshot:
    """Read a study's folder once and return its content."""
    submitted, unreadable = jobs.list_submitted(folder)
    ends = {(job.name, end.task): end for job in submitted for end in jobs.list_ends(job.folder)}
    seen = StudySnapshot(folder, {}, {}, submitted, ends, unreadable, [])
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name not in _NO_POINTS:
            try:
                seen.tried[entry.name] = store.list_attempts(Path(entry.path))
            except OSError as error:
                seen.unreadable.append(store.Unreadable(Path(entry.path), error.strerror or str(error)))
    # Records were listed before this: an attempt that ends meanwhile counts as unfinished instead of missing.
    for config_id, attempts in seen.tried.items():
        for attempt in attempts:
            if attempt.outcome is None:
                _add_unfinished(seen, config_id, attempt)
    return seen


def _add_unfinished(seen: StudySnapshot, config_id: str, attempt: store.RunAttempt) -> None:
    """Add an attempt (one try at a run) without a readable record to the snapshot, as unfinished or as unreadable. If
    its folder has no files that describe the run and is older than `FRESH_S` seconds, the folder is added to
    `undescribed`."""
    if attempt.unreadable:
        seen.unreadable.append(store.Unreadable(attempt.folder / store.RECORD, attempt.unreadable))
        return
    try:
        found = _read_unfinished(config_id, attempt)
        seen.open.setdefault(found.key, []).append(found)
        last = attempt.folder / store.HEARTBEAT
        if found.heartbeat is None and last.exists():
            seen.unreadable.append(store.Unreadable(last, "not a heartbeat"))
    except FileNotFoundError:  # claimed just now, or by a process that was killed right after
        with contextlib.suppress(OSError):
            if time.time() - attempt.folder.stat().st_mtime > FRESH_S:
                seen.undescribed.append(attempt.folder)
    except store.Unreadable as error:
        seen.unreadable.append(error)


def read_unfinished(config_id: str, attempt: store.RunAttempt) -> UnfinishedAttempt | None:
    """Return an attempt without a record, as described by the files in its folder. None if its description is not
    written yet or cannot be read."""
    if attempt.unreadable:
        return None
    with contextlib.suppress(FileNotFoundError, store.Unreadable):
        return _read_unfinished(config_id, attempt)
    return None


def _read_unfinished(config_id: str, attempt: store.RunAttempt) -> UnfinishedAttempt:
    """Return an attempt without a record, as described by the files in its folder.

    Raise FileNotFoundError or Unreadable if these files do not suffice to write a record for it later.
    """
    path = attempt.folder / store.CIRCUMSTANCE
    circumstance = store.read_value(path, Circumstance)
    store.read_value(attempt.folder / store.SPEC, RunSpec)
    try:
        place = AttemptOrigin.model_validate(circumstance.launcher)
    except ValidationError as error:
        raise store.Unreadable(path, "launcher: no job, task and restart") from error
    key = RunKey(config_id, circumstance.machine.name, attempt.repeat)
    last = read_heartbeat(attempt.folder)
    seen_at = last.at.timestamp() if last else path.stat().st_mtime
    return UnfinishedAttempt(key, attempt, place.job, place.task, place.restart, last, seen_at)


def read_heartbeat(folder: Path) -> LastHeartbeat | None:
    """Return the last heartbeat of an attempt; None if it does not exist or cannot be read."""
    with contextlib.suppress(FileNotFoundError, store.Unreadable):
        return store.read_value(folder / store.HEARTBEAT, LastHeartbeat)
    return None


def find_rival_attempt(
    config_folder: Path,
    key: RunKey,
    before: int | None = None,
    ours: Callable[[UnfinishedAttempt], bool] = lambda attempt: False,
) -> UnfinishedAttempt | None:
    """Return an attempt at the point `key` that another process is running; None if there is none. `ours` is called
    with an attempt and returns True if this attempt belongs to the caller.

    If the caller has already reserved a number for its own attempt, `before` is this number, and only attempts with
    smaller numbers are found. So if two processes reserve numbers at the same time, only the later process finds a
    rival.
    """
    for attempt in store.list_attempts(config_folder):
        if attempt.outcome is None and attempt.repeat == key.repeat and (before is None or attempt.attempt < before):
            found = read_unfinished(key.config_id, attempt)
            if found is None and before is not None:
                found = _wait_until_described(key.config_id, attempt)
            if found and found.key == key and found.fresh and not found.dead_here and not ours(found):
                return found
    return None


def _wait_until_described(config_id: str, attempt: store.RunAttempt) -> UnfinishedAttempt | None:
    """Wait for the description of an attempt whose folder was created just now, and return it.

    An attempt has begun as soon as its folder exists; the description follows. Return None if it does not follow within
    `_CLAIM_S` seconds, or if the folder is older than `FRESH_S`.
    """
    until, found = time.monotonic() + _CLAIM_S, None
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        while found is None and time.monotonic() < until and time.time() - attempt.folder.stat().st_mtime < FRESH_S:
            time.sleep(_CLAIM_S / 30)
            found = read_unfinished(config_id, attempt)
    return found


def compute_spent_node_hours(submitted: Sequence[jobs.SubmittedJob]) -> float:
    """Return the node-hours that all jobs together have used so far, including jobs that failed or are still
    running."""
    seconds = 0.0
    for job in submitted:
        for _, allocation in jobs.list_allocations(job.folder):
            seconds += allocation.nodes * ((allocation.ended_at or time.time()) - allocation.began_at)
    return seconds / 3600


def read_trial_results(folder: Path, search: SweepDefinition) -> list[TrialResult]:
    """Return the result of every trial (proposed configuration) of the search in a folder, ordered by trial number."""
    attempts = search.rules.budget.attempts
    return TrialReader(folder, lambda config_id: store.list_attempts(folder / config_id), attempts).read_results()


class TrialReader:
    """Reads the results of a search's trials (proposed configurations). Each record is read only once, since every
    proposal needs the results of all trials."""

    def __init__(self, folder: Path, tried: Callable[[str], Sequence[RunAttempt]], attempts: int) -> None:
        """`folder` is the folder of the search. `tried` returns the attempts at the configuration with a given
        config_id. A trial is given up after `attempts` failed attempts."""
        self._folder, self._tried, self._attempts = folder, tried, attempts
        self._records: dict[Path, tuple[RunQuantities | None, float]] = {}

    def read_results(self) -> list[TrialResult]:
        """Return the result of every trial (proposed configuration), ordered by trial number. The outcome is None for a
        trial that is running or will run again."""
        return [self._read_result(trial) for trial in definition.read_trials(self._folder)]

    def _read_result(self, trial: Trial) -> TrialResult:
        at = trial.point.machine
        done = [a for a in self._tried(trial.point.config_id) if a.outcome and (a.repeat, a.machine) == (0, at)]
        spent = sum(self._read_record(attempt)[1] for attempt in done)
        answer = find_answer(done, prune=True)
        if answer is None and done and explain_given_up(done, self._attempts):
            answer = done[-1]
        if answer is None:
            return TrialResult(trial, node_hours=spent)
        return TrialResult(trial, answer.outcome, self._read_record(answer)[0], spent, answer.environment_id)

    def _read_record(self, attempt: RunAttempt) -> tuple[RunQuantities | None, float]:
        if attempt.folder not in self._records:
            self._records[attempt.folder] = None, 0.0
            with contextlib.suppress(OSError, store.Unreadable):
                record = store.read_record(attempt.folder / store.RECORD)
                self._records[attempt.folder] = derive_quantities(record), compute_node_hours(record) or 0.0
        return self._records[attempt.folder]
