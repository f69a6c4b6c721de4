"""Determine the state of every point of a sweep from the study's folder and the scheduler."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from bench import launchers
from bench.core.formatting import format_count
from bench.core.plugins import QueueingLauncherPlugin, StoringLauncherPlugin
from bench.core.scheduling import JobSetup, JobState, SchedulingOptions
from bench.core.store import RunAttempt
from bench.sweep import definition, jobs
from bench.sweep.definition import RequestedRepeat, RunKey, SweepDefinition, SweepPoint
from bench.sweep.jobs import SubmittedJob
from bench.sweep.policy import explain_given_up, explain_spent, find_answer
from bench.sweep.pruning import Siblings, find_siblings
from bench.sweep.snapshot import StudySnapshot, UnfinishedAttempt, compute_spent_node_hours, read_snapshot

State = Literal["answered", "running", "pending", "waiting", "given up", "unknown"]
"""State of a point. It is `answered` if its outcome is final, `running` if an attempt runs, and `pending` if a queued
or running job has it. It is `waiting` if no job has it, and `given up` if its allowed attempts are used up. It is
`unknown` if a job has it and the scheduler was not asked or did not respond."""

JobTask = tuple[str, int | None]
"""Name of a job at its scheduler, and the index of a task in a job array (None for other jobs)."""


Queue = Mapping[JobTask, JobState]
"""States of the jobs that the scheduler knows."""


class PointStatus(NamedTuple):
    """State of one repeat of a point (configuration), with the reason for the state."""

    key: RunKey
    point: SweepPoint
    sweep: SweepDefinition
    state: State
    outcome: str  # outcome of the attempt that decides the state; empty if there is none
    why: str  # reason for the state, or for the outcome
    attempts: int  # number of attempts with a record
    folder: str  # folder of the attempt that decides the state, relative to the study's folder
    job: str = ""  # name of the queued or running job that has the point; empty if there is none
    task: int | None = None  # task of the job array; None for other jobs

    @property
    def final(self) -> bool:
        return self.state == "answered"

    @property
    def shown(self) -> str:
        """Text for listings: the outcome (such as `ok`) if it is final, and otherwise the state (such as `running`)."""
        return self.outcome if self.final else self.state


def list_statuses(
    wanted: Mapping[RunKey, RequestedRepeat], seen: StudySnapshot, queue: Queue, *, is_reached: bool = True
) -> list[PointStatus]:
    """Return the state of every requested run, in the given order.

    `is_reached` is True if the scheduler was asked and responded. If it is True, a point that is not in `queue` is
    known to be in no job.
    """
    reader = _StatusReader(wanted, seen, queue, is_reached)
    return [reader.read_status(*one) for one in wanted.values()]


def find_failed_starts(sweeps: Mapping[RunKey, SweepDefinition], seen: StudySnapshot) -> dict[RunKey, list[str]]:
    """Return, for each point, texts about the jobs that failed before they began any attempt, oldest first.

    Jobs that ended before the latest call of `sweep` with this point are ignored, since the user may have removed the
    cause since then.
    """
    found: dict[RunKey, list[str]] = {}
    for job in seen.jobs:
        for key, task in job.points:
            end = seen.ends.get((job.name, task))
            if not end or not end.faulty or key not in sweeps:
                continue
            if end.ended_at >= datetime.fromisoformat(sweeps[key].asked_at).timestamp():
                found.setdefault(key, []).append(end.describe())
    return found


class _StatusReader:
    """Determines states of points by combining a study's folder with the jobs of its scheduler."""

    def __init__(
        self, wanted: Mapping[RunKey, RequestedRepeat], seen: StudySnapshot, queue: Queue, is_reached: bool
    ) -> None:
        self._seen, self._queue, self._is_reached = seen, queue, is_reached
        self._submitted: Counter[RunKey] = Counter()
        self._places: dict[RunKey, JobTask] = {}
        self._last: dict[RunKey, tuple[SubmittedJob, int | None]] = {}
        for job in seen.jobs:
            for key, task in job.points:
                self._submitted[key] += 1
                if job.handle:
                    self._last[key] = (job, task)
                if (state := queue.get((job.name, task))) and state.live:
                    self._places[key] = (job.name, task)
        by_key = {key: one.sweep for key, one in wanted.items()}
        self._failed_starts = find_failed_starts(by_key, seen) if seen.ends else {}

    def read_status(self, key: RunKey, sweep: SweepDefinition, point: SweepPoint) -> PointStatus:
        done, place = self._seen.of(key), self._places.get(key)
        state, explanation = self._state(key, sweep, done, place)
        last = find_answer(done, prune=sweep.rules.prune) or (done[-1] if done else None)
        job, task = place or ("", None)
        status = PointStatus(key, point, sweep, state, "", explanation, len(done), "", job, task)
        if last is None:
            return status
        folder = last.folder.relative_to(self._seen.folder).as_posix()
        return status._replace(outcome=str(last.outcome), why=explanation or last.reason, folder=folder)

    def _state(
        self, key: RunKey, sweep: SweepDefinition, done: list[RunAttempt], place: JobTask | None
    ) -> tuple[State, str]:
        # In this order: an answer decides, then a running attempt, then the queue, then the rules.
        if find_answer(done, prune=sweep.rules.prune):
            return "answered", ""
        for attempt in self._seen.open.get(key, ()):
            if self._alive(attempt):
                job = self._queue.get((attempt.job, attempt.task)) if attempt.job else None
                return "running", f"in job {job.number}: {attempt.doing()}" if job else attempt.doing()
        if place:
            job = self._queue[place]
            return "pending", f"in job {job.number}: {describe_wait(job) if job.pending else 'not started yet'}"
        last = self._last.get(key)
        if not self._is_reached and last and (in_job := self._explain_unknown(*last)):
            return "unknown", in_job
        failed_starts = self._failed_starts.get(key, ())
        if reason := explain_given_up(done, sweep.rules.budget.attempts, self._submitted[key], failed_starts):
            return "given up", reason
        if last and (ended := self._explain_last_job(key, *last)):
            return "waiting", ended
        return "waiting", f"to run again; last attempt: {_explain_attempt(done[-1])}" if done else ""

    def _alive(self, attempt: UnfinishedAttempt) -> bool:
        """Return whether an attempt without a record is running. If the scheduler knows the attempt's job, the state of
        this job decides. Otherwise, the age of the attempt's heartbeat decides."""
        if attempt.dead_here:
            return False
        state = self._queue.get((attempt.job, attempt.task)) if attempt.job else None
        if state is None:
            return attempt.fresh
        return state.live and not state.pending and (state.restarts or 0) <= attempt.restart

    def _explain_last_job(self, key: RunKey, job: SubmittedJob, task: int | None) -> str:
        """Return a text that says how the last job of a point ended. Empty if that job made an attempt at the point, or
        if its end is unknown."""
        if self._seen.has_attempt(key, job.name):
            return ""
        # The written end comes first: the scheduler forgets a job after a while.
        if end := self._seen.ends.get((job.name, task)):
            return end.describe()
        if state := self._queue.get((job.name, task)):  # its end was not written, for example because of a full disk
            exit_text = f" ({state.exit})" if state.exit else ""
            return f"job {state.number} {state.state}{exit_text} without an attempt at this point; see {job.place}"
        if self._is_reached and not any(jobs.list_allocations(job.folder)):
            return f"job {job.handle} started no attempt, and the scheduler no longer lists it; see {job.place}"
        return ""

    def _explain_unknown(self, job: SubmittedJob, task: int | None) -> str:
        """Return a text that names the last known job of a point, from the study's folder alone. Empty if that job has
        ended."""
        spent = [a for _, a in jobs.list_allocations(job.folder) if a.task == task]
        over = (job.name, task) in self._seen.ends or (spent and all(a.ended_at is not None for a in spent))
        return "" if over else f"in job {job.handle}, by the last known state of the queue"


def describe_wait(state: JobState) -> str:
    """Return in a few words why a job waits in the queue, and when it is expected to start."""
    reason = f" ({state.reason})" if state.reason else ""
    if state.stuck:
        return f"{state.state.lower()}{reason}: {state.stuck}"
    starts = state.started_at and datetime.fromtimestamp(state.started_at).strftime("%Y-%m-%d %H:%M")
    return f"{state.state.lower()}{reason}" + (f", expected to start {starts}" if starts else "")


def _explain_attempt(attempt: RunAttempt) -> str:
    if attempt.drill:
        return "a run with an injected fault, which does not count"
    paused = f"a run that was paused for {attempt.paused_s:g} s, which does not count"
    return paused if attempt.outcome == "ok" and attempt.paused_s else attempt.reason


class StudyState(NamedTuple):
    """State of a study at one point in time, from its folder and its scheduler."""

    folder: Path
    sweeps: list[SweepDefinition]
    seen: StudySnapshot
    queue: Queue
    statuses: list[PointStatus]
    is_reached: bool = True  # the scheduler was asked and responded

    def __repr__(self) -> str:
        return f"<StudyState of {self.folder}: {self.describe()}>"

    def describe(self) -> str:
        """Return one line with the number of points by outcome and the number of jobs in the queue. A point whose
        outcome is not final is counted by its state, such as `running`."""
        shown = Counter(one.shown for one in self.statuses)
        counts = ", ".join(f"{number} {kind}" for kind, number in shown.most_common())
        jobs_text = f"; {self.describe_queue()}" if self.seen.jobs else ""
        return f"{format_count(len(self.statuses), 'run')}: {counts or 'none'}{jobs_text}"

    def describe_queue(self) -> str:
        """Return the number of the study's jobs in the queue as text."""
        return f"{format_count(len(self.live), 'job')} in the queue" if self.is_reached else "the queue is unknown"

    def find_log(self, job: jobs.SubmittedJob, task: int | None) -> Path | None:
        """Return the log file of a job, or of an array task; None if the scheduler has not accepted the job yet."""
        launcher = launchers.load_queueing(str(self.sweeps[-1].launcher["name"]))
        state = self.queue.get((job.name, task))
        handle = state.handle if state else job.handle  # they differ if the job was resubmitted by hand
        return launcher.find_log(job.folder, handle, task) if launcher and handle else None

    @property
    def live(self) -> list[jobs.SubmittedJob]:
        """Jobs that are still queued or running at the scheduler, oldest first."""
        return [job for job in self.seen.jobs if any(self.is_live(job.name, task) for task in job.tasks)]

    def list_live(self) -> list[tuple[jobs.SubmittedJob, JobState]]:
        """Return the queued and running jobs with their states, one entry per array task, oldest first."""
        found = [(job, self.queue.get((job.name, task))) for job in self.seen.jobs for task in job.tasks]
        return [(job, state) for job, state in found if state and state.live]

    def kin(self) -> dict[tuple[str, str], Siblings]:
        """Return the siblings of every point by config_id and machine. Siblings are points that differ in the
        micro-batch alone."""
        return find_siblings((one.key, one.point.spec) for one in self.statuses)

    def tried(self, config_id: str) -> list[RunAttempt]:
        return self.seen.tried.get(config_id, [])

    def explain_spent_budget(self) -> str:
        """Return a text if the node-hours of the study's budget are used up; empty if not."""
        return explain_spent(compute_spent_node_hours(self.seen.jobs), self.sweeps[-1].rules.budget.node_hours)

    def is_live(self, name: str, task: int | None) -> bool:
        """Return whether a job, or an array task, is still queued or running at the scheduler."""
        state = self.queue.get((name, task))
        return state is not None and state.live


def load_launcher(sweep: SweepDefinition) -> tuple[QueueingLauncherPlugin | None, SchedulingOptions]:
    """Return the launcher of a sweep and its options. The launcher is None if it has no queue."""
    plain = dict(sweep.launcher)
    launcher = launchers.load_queueing(str(plain.pop("name")))
    return launcher, launcher.Options.model_validate(plain) if launcher else SchedulingOptions()


def find_job_setup(sweep: SweepDefinition) -> JobSetup:
    """Return the environment in which a sweep's jobs run; the default one if its launcher has no queue."""
    launcher, options = load_launcher(sweep)
    return launcher.job_setup(options) if launcher else JobSetup()


def read_state(folder: Path, *, ask: bool = True, about_all: bool = False) -> StudyState:
    """Return the state of a study. If its jobs use an object store, files are first exchanged with the store.

    If `ask` is set, the scheduler is asked about every job that may still change the study. With `about_all`, it is
    asked about all jobs, the ended ones included.
    """
    sweeps = definition.read(folder)
    launcher, options = load_launcher(sweeps[-1]) if ask else (None, None)
    if isinstance(launcher, StoringLauncherPlugin):
        launcher.sync(folder, options)
        sweeps = definition.read(folder)  # another submitter may have extended the study
    seen, wanted = read_snapshot(folder), definition.merge_sweeps(sweeps)
    names = [job.name for job in seen.jobs if about_all or _may_go_on(job, seen, wanted)]
    with jobs.explain_failure(str(sweeps[-1].launcher["name"]), "ask", folder):
        queue = launcher.ask(names, options) if launcher and names else {}
    return StudyState(folder, sweeps, seen, queue, list_statuses(wanted, seen, queue, is_reached=ask), ask)


def _may_go_on(job: jobs.SubmittedJob, seen: StudySnapshot, wanted: Mapping[RunKey, RequestedRepeat]) -> bool:
    """Return whether a job may still change the study. This is so in three cases: one of the job's points has no answer
    (final outcome), one of the job's allocations has not ended, or the job or one of its array tasks has had no
    allocation yet."""
    if not job.points or any(attempt.job == job.name for attempts in seen.open.values() for attempt in attempts):
        return True
    for key, _ in job.points:
        if key not in wanted or not find_answer(seen.of(key), prune=wanted[key].sweep.rules.prune):
            return True
    ends = [allocation.ended_at for _, allocation in jobs.list_allocations(job.folder)]
    return len(ends) < len(job.tasks) or None in ends
