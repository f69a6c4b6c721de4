"""Submit what is left, within what the cluster takes and the study may cost; chain the autopilot; cancel."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import launchers, store
from bench.errors import UserError
from bench.launching import LaunchPlan, Work
from bench.plugins import QueueingLauncherPlugin
from bench.scheduling import JobContext, SchedulerAway, SchedulingOptions
from bench.store import RunAttempt
from bench.sweep import exclusions, jobs
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.definition import SweepDefinition
from bench.sweep.jobs import Job
from bench.sweep.status import PointStatus
from bench.sweep.submission.batching import JobBatcher
from bench.sweep.submission.lost import finalize_lost, find_pending, write_outcomes_without_run
from bench.sweep.submission.state import StudyState, read_state
from bench.sweep.submission.time_limits import extend_time_limits

_AUTOPILOT_MIN = 15
_RETRY_S = 20.0


class SubmitResult(NamedTuple):
    """What feeding the queue once did."""

    submitted: list[tuple[Job, str]]  # with the scheduler's number
    concluded: int  # attempts that got the record they had not left
    without_run: Mapping[str, int]  # points that need not run, by outcome
    left: list[PointStatus]  # still to be submitted
    why_left: str
    autopilot: str | None  # the number of the job that goes on by itself


def submit_pending(folder: Path, *, autopilot: bool, patience_s: float = 0.0) -> SubmitResult:
    """Settle what has ended and submit what has no answer, as far as the limits allow; return at once, or after at most
    `patience_s` where the scheduler does not answer."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return _submit_pending(folder, autopilot)
        except SchedulerAway:
            if time.monotonic() >= until:
                raise
            time.sleep(_RETRY_S)
        except OSError as error:
            raise store.build_unwritable_error(folder, error) from error


def _submit_pending(folder: Path, autopilot: bool) -> SubmitResult:
    view = read_state(folder)
    concluded = finalize_lost(view)
    view = read_state(folder) if concluded else view
    corrections = MeasuredCorrections((point_status.point for point_status in view.statuses), _list_attempts(view))
    without_run = write_outcomes_without_run(view, corrections)
    view = read_state(folder) if without_run else view
    statuses, why_left = find_pending(view, corrections)
    left = extend_time_limits(statuses, view, corrections)
    submitter = JobSubmitter(view, autopilot=autopilot)
    submitted: list[tuple[Job, str]] = []
    if not why_left:
        submitted, why_left = submitter.submit(left)
    taken = {requested.key for job, _ in submitted for requested in job.points}
    left = [point_status for point_status in left if point_status.key not in taken]
    pilot = submitter.submit_autopilot(waiting=bool(left)) if autopilot else None
    return SubmitResult(submitted, concluded, without_run, left, why_left, pilot)


def _list_attempts(view: StudyState) -> Iterator[RunAttempt]:
    return (attempt for attempts in view.seen.tried.values() for attempt in attempts)


def load_launcher(sweep: SweepDefinition) -> tuple[QueueingLauncherPlugin, SchedulingOptions]:
    """Return the launcher that a sweep is submitted by, and its options; UserError for one that does not queue."""
    plain = dict(sweep.launcher)
    name = str(plain.pop("name"))
    launcher = launchers.load_queueing(name)
    if not launcher:
        raise UserError(f"launcher={name}", "has no queue", "run the sweep here")
    return launcher, launcher.Options.model_validate(plain)


def plan_job(
    job: Job,
    folder: Path,
    options: SchedulingOptions,
    launcher: QueueingLauncherPlugin,
    after: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> LaunchPlan:
    """Return how a job starts; pure, so that a dry run prints it."""
    work = Work(
        name=job.name,
        folder=folder,
        module="bench.allocation",
        arguments=(str(folder),),
        nodes=job.nodes,
        devices_per_node=job.devices_per_node,
        time_limit_min=job.time_limit_min,
        tasks=len(job.points) if job.mode == "array" else None,
        after=tuple(after),
        exclude=tuple(exclude),
    )
    return launcher.plan(work, options)


class JobSubmitter:
    """Submits jobs of one study."""

    def __init__(self, view: StudyState, *, autopilot: bool) -> None:
        self._view = view
        sweep = view.sweeps[-1]
        self._launcher, self._options = load_launcher(sweep)
        self._rules = sweep.rules
        self._cluster = self._launcher.limits(self._options)
        self._max_queued, self._whose = self._find_limit(autopilot)
        self._exclude = [found.host for found in exclusions.read(view.folder)]
        self._handles = [job.handle for job in view.live if job.points and job.handle]

    def submit(self, left: Sequence[PointStatus]) -> tuple[list[tuple[Job, str]], str]:
        """Submit points in order; return the jobs, and why some points may have to wait."""
        submitted: list[tuple[Job, str]] = []
        refused: dict[tuple[int, int], UserError] = {}  # by shape: no nodes may be left for one, and some for another
        places = None if self._max_queued is None else self._max_queued - self._count_in_queue()
        for job in self._batch_jobs(left):
            needs, shape = len(job.points) if job.mode == "array" else 1, (job.nodes, job.devices_per_node)
            if places is not None and needs > places:
                return submitted, f"{self._whose} allows {self._max_queued} jobs in the queue"
            if shape in refused:
                continue
            try:
                submitted.append((job, self._submit(job)))
                places = None if places is None else places - needs
            except SchedulerAway:
                raise
            except UserError as refusal:
                refused[shape] = refusal
        if refused and not self._handles:  # nothing is under way that could make room
            raise next(iter(refused.values()))
        return submitted, "; ".join(map(str, refused.values()))

    def _batch_jobs(self, left: Sequence[PointStatus]) -> list[Job]:
        """Return the jobs for points; an array is never longer than the queue has places for its tasks."""
        longest = min((limit for limit in (self._cluster.max_array_size, self._max_queued) if limit), default=None)
        kin = self._view.kin() if left else None
        return JobBatcher(self._options, longest, self._cluster.max_time_min, kin).jobs(left)

    def _find_limit(self, autopilot: bool) -> tuple[int | None, str]:
        """Return how many jobs with points may be in the queue at a time, and whose rule that is. Where the cluster
        counts, the autopilot's small job takes a place, and another one while it submits the next."""
        ours, theirs = self._rules.max_queued, self._cluster.max_submit_jobs
        theirs = max(1, theirs - 2) if theirs and autopilot else theirs
        return min(
            ((limit, rule) for limit, rule in ((ours, "--max-queued"), (theirs, "the cluster")) if limit),
            default=(None, ""),
        )

    def _count_in_queue(self) -> int:
        jobs_with_points = (job for job in self._view.live if job.points)
        return sum(self._view.is_live(job.name, task) for job in jobs_with_points for task in job.tasks)

    def _submit(self, job: Job) -> str:
        folder = jobs.write(self._view.folder, job)
        throttle = self._options.throttle if job.mode != "array" else None
        after = self._handles[-throttle:][:1] if throttle and len(self._handles) >= throttle else []
        made = plan_job(job, folder.resolve(), self._options, self._launcher, after, self._exclude)
        handle = self._launcher.submit(made)
        jobs.write_handle(folder, handle)
        self._handles.append(handle)
        return handle

    def submit_autopilot(self, *, waiting: bool) -> str | None:
        """Submit the small job that goes on when jobs have ended, unless nothing is under way or one waits already.

        While points wait for room in the queue it is to run as soon as the first job has ended, else after the last.
        """
        own_job = self._launcher.context(os.environ) or JobContext()
        pilots = [job.name for job in self._view.live if not job.points and job.name != own_job.name]
        if pilots or not self._handles:
            return None
        name = jobs.create_name(f"{self._view.sweeps[-1].study}-autopilot")
        folder = self._view.folder / jobs.FOLDER / name
        folder.mkdir(parents=True)
        after = tuple(self._handles[:1] if waiting else self._handles)
        study_folder = str(self._view.folder.resolve())
        arguments = ("resume", study_folder, "--autopilot")
        work = Work(name, folder.resolve(), "bench.cli", arguments, time_limit_min=_AUTOPILOT_MIN, after=after)
        handle = self._launcher.submit(self._launcher.plan(work, self._options))
        jobs.write_handle(folder, handle)
        return handle


def cancel_jobs(folder: Path) -> list[str]:
    """Cancel every job of a study that the scheduler still has, and no other; return their numbers."""
    view = read_state(folder, about_all=True)
    launcher = launchers.load_queueing(str(view.sweeps[-1].launcher["name"]))
    if not launcher:
        raise UserError(str(folder), "its points are run by the command that was called", "press Ctrl-C there")
    numbers = sorted(
        {view.queue[job.name, task].handle for job in view.live for task in job.tasks if view.is_live(job.name, task)}
    )
    if numbers:
        launcher.cancel_all(numbers)
    return numbers
