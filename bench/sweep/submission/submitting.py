"""Submit what is left, within what the cluster takes and the study may cost; chain the autopilot; cancel."""

import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import launchers, store
from bench.errors import UserError
from bench.formatting import format_count
from bench.launching import LaunchPlan, Work
from bench.plugins import QueueingLauncherPlugin
from bench.scheduling import ClusterLimits, JobContext, SchedulerAway, SchedulingOptions
from bench.sweep import exclusions, jobs
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.definition import SweepDefinition
from bench.sweep.jobs import Job
from bench.sweep.status import PointStatus
from bench.sweep.submission.batching import JobBatcher
from bench.sweep.submission.lost import finalize_lost, find_pending, keep_ends, write_outcomes_without_run
from bench.sweep.submission.state import StudyState, read_state
from bench.sweep.submission.time_limits import extend_time_limits

_AUTOPILOT_MIN = 15
PATIENCE_S = 30.0
"""So long a scheduler that does not answer is waited for: one that restarts, or is busy, is back by then."""
_FIRST_RETRY_S, _LAST_RETRY_S = 2.0, 20.0
_TOO_MANY = re.compile(
    r"job submit limit|MaxSubmit|accounting/QOS policy|job array (index|size)|queue full", re.IGNORECASE
)
"""Words with which a scheduler refuses more jobs, or a longer array, than it takes now."""


class SubmitResult(NamedTuple):
    """What feeding the queue once did."""

    submitted: list[tuple[Job, str]]  # with the scheduler's number
    concluded: int  # attempts that got the record they had not left
    without_run: Mapping[str, int]  # points that need not run, by outcome
    left: list[PointStatus]  # still to be submitted
    why_left: str
    autopilot: str | None  # the number of the job that goes on by itself
    autopilot_refused: str = ""  # why there is none though it was asked for
    queued: int = 0  # jobs in the queue now, those submitted included
    answered: bool = False  # whether every point has its answer
    cut_short: str = ""  # why nobody knows what is left: the scheduler went away when it had taken some jobs
    impossible: int = 0  # points among `left` that this cluster can never start

    @property
    def complete(self) -> bool:
        """Whether all that could be done now was done."""
        return not self.autopilot_refused and not self.cut_short

    @property
    def good(self) -> bool:
        """Whether it is complete, and every point that is left can still be submitted."""
        return self.complete and not self.impossible


def submit_pending(
    folder: Path, *, autopilot: bool, notify: str | None = None, patience_s: float = PATIENCE_S
) -> SubmitResult:
    """Settle what has ended and submit what has no answer, as far as the limits allow; return at once, or after at most
    `patience_s` where the scheduler does not answer. `notify` is the command that the autopilot calls at its end."""
    until, pause_s = time.monotonic() + patience_s, _FIRST_RETRY_S
    submitted: list[tuple[Job, str]] = []  # kept when the scheduler goes away in the midst of it
    while True:
        try:
            return _submit_pending(folder, autopilot, notify, submitted)
        except SchedulerAway as away:
            if time.monotonic() + pause_s >= until:
                if submitted:
                    return SubmitResult(submitted, 0, {}, [], "", None, "", len(submitted), cut_short=str(away))
                raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
        except OSError as error:
            raise store.build_unwritable_error(folder, error) from error


def _submit_pending(
    folder: Path, autopilot: bool, notify: str | None, submitted: list[tuple[Job, str]]
) -> SubmitResult:
    """Go through all of it once; what is `submitted` is added to the list."""
    view = read_state(folder)
    concluded, ended = finalize_lost(view), keep_ends(view)
    view = read_state(folder) if concluded or ended else view
    tried = (attempt for attempts in view.seen.tried.values() for attempt in attempts)
    corrections = MeasuredCorrections((point_status.point for point_status in view.statuses), tried)
    without_run = write_outcomes_without_run(view, corrections)
    view = read_state(folder) if without_run else view
    statuses, why_left = find_pending(view, corrections)
    left = extend_time_limits(statuses, view, corrections)
    submitter = JobSubmitter(view, autopilot=autopilot)
    why_left = why_left or submitter.submit(left, submitted)
    taken = {requested.key for job, _ in submitted for requested in job.points}
    all_left = left
    left = [point_status for point_status in all_left if point_status.key not in taken]
    pilot, refused = None, ""
    if autopilot:
        try:
            pilot = submitter.submit_autopilot(submitted, waiting=bool(left), notify=notify)
        except SchedulerAway:
            raise
        except UserError as refusal:  # the rest is submitted all the same
            refused = str(refusal)
        taken = {requested.key for job, _ in submitted for requested in job.points}
        left = [point_status for point_status in all_left if point_status.key not in taken]
    answered = all(point_status.final for point_status in view.statuses)
    return SubmitResult(
        submitted, concluded, without_run, left, why_left, pilot, refused, submitter.queued, answered,
        impossible=submitter.impossible,
    )  # fmt: skip


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
        self._exclude = [found.host for found in exclusions.read_exclusions(view.folder)]
        self._handles = [job.handle for job in view.live if job.points and job.handle]
        self.impossible = 0  # points that this cluster can never start

    @property
    def queued(self) -> int:
        """How many jobs with points are in the queue, those submitted just now included."""
        return len(self._handles)

    def submit(self, left: Sequence[PointStatus], submitted: list[tuple[Job, str]]) -> str:
        """Submit points in order, adding the jobs to `submitted`; return why some points may have to wait."""
        refused: dict[tuple[int, int], UserError] = {}  # by shape: no nodes may be left for one, and some for another
        tasks = ((job.name, task) for job in self._view.live if job.points for task in job.tasks)
        in_queue = sum(self._view.is_live(*task) for task in tasks)
        places = None if self._max_queued is None else self._max_queued - in_queue
        waiting = deque(self._batch_jobs(left))
        while waiting:
            job = waiting.popleft()
            needs, shape = len(job.points) if job.mode == "array" else 1, _get_shape(job)
            if places is not None and needs > places:
                return f"{self._whose} allows {self._max_queued} jobs in the queue"
            if shape in refused:
                continue
            try:
                _check_shape(job, self._cluster)
            except UserError as refusal:
                refused[shape] = refusal
                self.impossible += sum(len(one.points) for one in (job, *waiting) if _get_shape(one) == shape)
                continue
            try:
                submitted.append((job, self._submit(job)))
                places = None if places is None else places - needs
            except SchedulerAway:
                raise
            except UserError as refusal:
                if job.mode == "array" and len(job.points) > 1 and _TOO_MANY.search(str(refusal)):
                    waiting.extendleft(reversed(_halve(job)))  # some limits are known to the scheduler alone
                else:
                    refused[shape] = refusal
        if refused and not self._handles:  # nothing is under way that could make room
            raise next(iter(refused.values()))
        return "; ".join(map(str, refused.values()))

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

    def _submit(self, job: Job) -> str:
        folder = jobs.write(self._view.folder, job)
        throttle = self._options.throttle if job.mode != "array" else None
        after = self._handles[-throttle:][:1] if throttle and len(self._handles) >= throttle else []
        made = plan_job(job, folder.resolve(), self._options, self._launcher, after, self._exclude)
        try:
            handle = self._launcher.submit(made)
        except SchedulerAway:
            raise  # it may have taken the job
        except UserError:
            jobs.withdraw(folder)
            raise
        jobs.write_handle(folder, handle)
        self._handles.append(handle)
        return handle

    def submit_autopilot(
        self, submitted: list[tuple[Job, str]], *, waiting: bool, notify: str | None = None
    ) -> str | None:
        """Submit the small job that goes on when jobs have ended, unless nothing is under way or one waits already.

        While points wait for room in the queue it is to run as soon as the first job has ended, else after the last. If
        the queue is full by a limit that only the scheduler knows, the last of the jobs just `submitted` make room.
        """
        while True:
            try:
                return self._submit_autopilot(waiting=waiting, notify=notify)
            except SchedulerAway:
                raise
            except UserError as refusal:
                if not _TOO_MANY.search(str(refusal)) or len(submitted) < 2:
                    raise
                job, handle = submitted.pop()
                self._launcher.cancel_all([handle])
                jobs.withdraw(self._view.folder / jobs.FOLDER / job.name)
                self._handles.remove(handle)
                waiting = True

    def _submit_autopilot(self, *, waiting: bool, notify: str | None) -> str | None:
        own_job = self._launcher.context(os.environ) or JobContext()
        pilots = [job.name for job in self._view.live if not job.points and job.name != own_job.name]
        if pilots or not self._handles:
            return None
        name = jobs.create_name(f"{self._view.sweeps[-1].study}-autopilot")
        folder = self._view.folder / jobs.FOLDER / name
        folder.mkdir(parents=True)
        after = tuple(self._handles[:1] if waiting else self._handles)
        study_folder = str(self._view.folder.resolve())
        notice = () if notify is None else (f"--notify={notify}",)
        arguments = ("resume", study_folder, "--autopilot", *notice)
        work = Work(name, folder.resolve(), "bench.cli", arguments, time_limit_min=_AUTOPILOT_MIN, after=after)
        try:
            handle = self._launcher.submit(self._launcher.plan(work, self._options))
        except SchedulerAway:
            raise  # it may have taken the job
        except UserError:
            jobs.withdraw(folder)
            raise
        jobs.write_handle(folder, handle)
        return handle


def _get_shape(job: Job) -> tuple[int, int]:
    return job.nodes, job.devices_per_node


def _halve(job: Job) -> list[Job]:
    """Return two arrays of half the points each."""
    middle, study = len(job.points) // 2, job.points[0].circumstance.study
    halves = job.points[:middle], job.points[middle:]
    return [job.model_copy(update={"name": jobs.create_name(study), "points": points}) for points in halves]


def _check_shape(job: Job, cluster: ClusterLimits) -> None:
    """Raise UserError for a job that the cluster could never start, and would only keep in its queue."""
    if cluster.max_nodes is not None and job.nodes > cluster.max_nodes:
        most = format_count(cluster.max_nodes, "node")
        rule = f"the partition gives a job {most} at the most"
        raise UserError(f"nodes={job.nodes}", rule, "ask for fewer, or choose another partition")
    if cluster.max_devices_per_node is not None and job.devices_per_node > cluster.max_devices_per_node:
        rule = "no node of the partition has the cores that launcher.cpus_per_device asks for"
        raise UserError(f"devices_per_node={job.devices_per_node}", rule, "ask for fewer cores or devices")
    if cluster.max_gpus_per_node is not None and job.devices_per_node > cluster.max_gpus_per_node:
        rule = f"a node of the partition has {cluster.max_gpus_per_node} of the GPUs that launcher.gpus asks for"
        raise UserError(f"devices_per_node={job.devices_per_node}", rule, "ask for fewer, or choose another partition")


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
