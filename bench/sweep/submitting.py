"""Submit a study's configurations without a final outcome to the scheduler, within the limits of cluster and budget.
Submit the autopilot, a job that later submits the rest. Cancel jobs."""

import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.core import store
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.job_environment import read_job
from bench.core.plugins import QueueingLauncherPlugin
from bench.core.scheduling import JobContext, LaunchPlan, SchedulerUnavailable, SchedulingOptions, Work
from bench.sweep import jobs, status
from bench.sweep.corrections import MeasuredCorrections, extend_time_limits
from bench.sweep.definition import RequestedRun, SweepDefinition, SweepPoint
from bench.sweep.jobs import Job, create_name
from bench.sweep.lost import finalize_lost, find_pending, keep_ends, write_outcomes_without_run
from bench.sweep.pruning import Siblings
from bench.sweep.status import PointStatus, StudyState, read_state

_LOGGER = logging.getLogger(__name__)
_AUTOPILOT_MIN = 15
_AUTOPILOTS = 2  # jobs of the autopilot in the queue at a time: a running autopilot submits the next one
_FULL_QUEUE_MIN = 10  # minutes until the next autopilot starts if the queue has no place for another job
PATIENCE_S = 30.0
"""Seconds to wait for a scheduler that does not respond. A restarted scheduler usually responds within this time."""
_REPEAT = "no job is known to be submitted; repeat the command when the scheduler responds"
_FIRST_RETRY_S, _LAST_RETRY_S = 2.0, 20.0
_TOO_MANY = re.compile(
    r"job submit limit|MaxSubmit|accounting/QOS policy|job array (index|size)|queue full", re.IGNORECASE
)
"""Pattern of error messages with which a scheduler refuses more jobs, or a longer job array, because of its limits."""


class SubmitResult(NamedTuple):
    """Result of one submission of a study's points (configurations)."""

    submitted: list[tuple[Job, str]]  # each with its job id at the scheduler
    concluded: int  # number of attempts that ended without a record and got a record now
    without_run: Mapping[str, int]  # number of points that need not run, by outcome
    left: list[PointStatus]  # points that still have to be submitted
    why_left: str  # reason why points are left; empty if none are
    autopilot: str | None  # id of the job that submits again later; None if there is none
    autopilot_refused: str = ""  # why the requested autopilot was not submitted
    queued: int = 0  # jobs with points in the queue now, including those just submitted
    answered: bool = False  # whether every point has its answer (a final outcome)
    cut_short: str = ""  # why the submission is incomplete: the scheduler failed after some jobs
    impossible: int = 0  # number of points whose nodes or devices this cluster cannot give to any job
    is_budget_spent: bool = False

    def __repr__(self) -> str:
        submitted = f"{format_count(len(self.submitted), 'job')} submitted"
        left = f"{format_count(len(self.left), 'run')} left" + (f" ({self.why_left})" if self.why_left else "")
        return f"<SubmitResult: {submitted}, {self.queued} in the queue, {left}>"

    @property
    def complete(self) -> bool:
        """Return True if the scheduler responded until the last job was submitted, and did not refuse the autopilot.
        The autopilot is a job that later submits the remaining points; it is submitted only on request."""
        return not (self.autopilot_refused or self.cut_short)

    @property
    def has_ended(self) -> bool:
        """Return whether the submission is complete, no job is queued or running, and no point is left to submit."""
        return self.complete and not (self.submitted or self.queued or self.left)

    @property
    def good(self) -> bool:
        """Return whether the submission is complete and every point that is left can still run: on this cluster, and
        within the study's budget."""
        stopped = self.is_budget_spent and not (self.submitted or self.queued)
        return self.complete and not self.impossible and not stopped


def submit_pending(
    folder: Path, *, autopilot: bool, notify: str | None = None, patience_s: float = PATIENCE_S
) -> SubmitResult:
    """Write missing records, and submit the points without an answer (a final outcome), within the limits of cluster
    and budget.

    If the scheduler does not respond, try again for at most `patience_s` seconds, with a warning before each try. The
    autopilot's job also tries again if the queue is full. `notify` is the command that the autopilot runs at its end.
    """
    until, pause_s, attempt = time.monotonic() + patience_s, _FIRST_RETRY_S, 1
    submitted: list[tuple[Job, str]] = []  # kept if the scheduler stops answering
    while True:
        try:
            return _submit_pending(folder, autopilot, notify, submitted)
        except UserError as away:
            if not _may_pass(away):
                raise
            if time.monotonic() + pause_s >= until:
                if submitted:
                    return SubmitResult(submitted, 0, {}, [], "", None, "", len(submitted), cut_short=str(away))
                if isinstance(away, SchedulerUnavailable):
                    raise SchedulerUnavailable(away.value, away.rule, _REPEAT) from away
                raise
            attempt, left_s = attempt + 1, until - time.monotonic()
            message = "%s: %s; attempt %d in %g s, the last within %.0f s; Ctrl-C stops, submitted jobs remain"
            _LOGGER.warning(message, away.value, away.rule, attempt, pause_s, left_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
        except OSError as error:
            raise store.build_unwritable_error(folder, error) from error


def _submit_pending(
    folder: Path, autopilot: bool, notify: str | None, submitted: list[tuple[Job, str]]
) -> SubmitResult:
    """Make one attempt to submit all points that have no final result. Each job is added to `submitted` as soon as it
    is submitted, so that a later error loses no job."""
    # Each step changes the folder for the next: missing records first, then points without a run, then jobs.
    view = read_state(folder)
    concluded, ended = finalize_lost(view), keep_ends(view)
    view = read_state(folder) if concluded or ended else view
    tried = (attempt for attempts in view.seen.tried.values() for attempt in attempts)
    corrections = MeasuredCorrections((point_status.point for point_status in view.statuses), tried)
    without_run = write_outcomes_without_run(view, corrections)
    view = read_state(folder) if without_run else view
    statuses, postponed = find_pending(view, corrections)
    pending = extend_time_limits(statuses, view, corrections)
    submitter = JobSubmitter(view, autopilot=autopilot)
    why_left = postponed or submitter.submit(pending, submitted)

    def list_left() -> list[PointStatus]:
        taken = {requested.key for job, _ in submitted for requested in job.points}
        return [one for one in pending if one.key not in taken]

    pilot, refused = None, ""
    if autopilot:
        try:
            pilot = submitter.submit_autopilot(submitted, waiting=bool(list_left()), notify=notify)
        except UserError as refusal:  # the other jobs stay submitted
            if _may_pass(refusal):
                raise
            refused = str(refusal)
    answered = all(point_status.final for point_status in view.statuses)
    why_left = why_left or ("the queue is full" if list_left() else "")
    return SubmitResult(
        submitted, concluded, without_run, list_left(), why_left, pilot, refused, submitter.queued, answered,
        impossible=submitter.impossible, is_budget_spent=bool(postponed),
    )  # fmt: skip


def _may_pass(error: UserError) -> bool:
    """Return whether the same request may succeed later. This is so if the scheduler did not respond, or if the queue
    is full and this process is the autopilot's job. If a user's command finds a full queue, the command fails at
    once."""
    is_full = _TOO_MANY.search(str(error)) is not None
    return isinstance(error, SchedulerUnavailable) or (is_full and read_job(os.environ) is not None)


def load_launcher(sweep: SweepDefinition) -> tuple[QueueingLauncherPlugin, SchedulingOptions]:
    """Return the launcher of a sweep and its options. Raise UserError if the launcher has no queue."""
    launcher, options = status.load_launcher(sweep)
    if not launcher:
        raise UserError(f"launcher={sweep.launcher['name']}", "has no queue", "run the sweep on this machine")
    return launcher, options


def plan_job(
    job: Job,
    folder: Path,
    options: SchedulingOptions,
    launcher: QueueingLauncherPlugin,
    after: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> LaunchPlan:
    """Return the commands and files with which a job starts. No side effects: a dry run prints the result. The job
    waits for the jobs with the ids `after` and avoids the nodes `exclude`."""
    work = Work(
        name=job.name,
        folder=folder,
        module="bench.sweep.allocation",
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
    """Submits jobs with the points of one study."""

    def __init__(self, view: StudyState, *, autopilot: bool) -> None:
        self._view = view
        sweep = view.sweeps[-1]
        self._launcher, self._options = load_launcher(sweep)
        self._name, self._rules = str(sweep.launcher["name"]), sweep.rules
        with jobs.explain_failure(self._name, "limits", view.folder):
            self._cluster = self._launcher.limits(self._options)
        self._max_queued, self._limit_text = self._find_limit(autopilot)
        self._exclude = [found.host for found in jobs.read_exclusions(view.folder)]
        # Tasks of each job with points in the queue, by the job's id, oldest first.
        self._handles = {job.handle: len(job.tasks) for job in view.live if job.points and job.handle}
        self.impossible = 0  # points that this cluster can never start

    @property
    def queued(self) -> int:
        """Return the number of jobs with points in the scheduler's queue, including those just submitted."""
        return len(self._handles)

    def submit(self, left: Sequence[PointStatus], submitted: list[tuple[Job, str]]) -> str:
        """Submit points in order, and add each job with its job id to `submitted`. Return the reason why points are
        left; empty if none are."""
        refused: dict[tuple[int, int], UserError] = {}  # by shape: nodes, devices per node
        in_queue = sum(bool(job.points) for job, _ in self._view.list_live())
        places = None if self._max_queued is None else self._max_queued - in_queue
        waiting = deque(self._batch_jobs(left))
        while waiting:
            job = waiting.popleft()
            needs, shape = job.task_count, _get_shape(job)
            if places is not None and needs > places:
                return self._limit_text
            if shape in refused:
                continue
            try:
                jobs.check_shape(job, self._cluster)
            except UserError as refusal:
                refused[shape] = refusal
                self.impossible += sum(len(one.points) for one in (job, *waiting) if _get_shape(one) == shape)
                continue
            try:
                submitted.append((job, self._submit(job)))
                places = None if places is None else places - needs
            except SchedulerUnavailable:
                raise
            except UserError as refusal:
                if job.mode == "array" and len(job.points) > 1 and _TOO_MANY.search(str(refusal)):
                    waiting.extendleft(reversed(_halve(job)))  # some limits are known to the scheduler alone
                else:
                    refused[shape] = refusal
        if refused and not self._handles:  # no job is under way whose end could make room
            raise next(iter(refused.values()))
        return "; ".join(map(str, refused.values()))

    def _batch_jobs(self, left: Sequence[PointStatus]) -> list[Job]:
        """Return the jobs that run these points. No job array exceeds the limits of the cluster or of the queue."""
        longest = min((limit for limit in (self._cluster.max_array_size, self._max_queued) if limit), default=None)
        kin = self._view.kin() if left else None
        return JobBatcher(self._options, longest, self._cluster.max_time_min, kin).jobs(left)

    def _find_limit(self, autopilot: bool) -> tuple[int | None, str]:
        """Return how many jobs with points may be in the queue, and a text with the limit of `--max-queued` or of the
        cluster. Return (None, "") if there is no limit. With `autopilot`, the cluster's limit is reduced by the number
        of the autopilot's own jobs."""
        ours, theirs, limits = self._rules.max_queued, self._cluster.max_submit_jobs, list[tuple[int, str]]()
        if ours:
            limits.append((ours, f"--max-queued allows at most {format_count(ours, 'job')} in the queue"))
        if theirs:
            kept = f", and the autopilot needs {_AUTOPILOTS} places" if autopilot else ""
            left = max(1, theirs - _AUTOPILOTS) if autopilot else theirs
            limits.append((left, f"the cluster allows at most {format_count(theirs, 'job')} in the queue{kept}"))
        return min(limits, default=(None, ""))

    def _submit(self, job: Job) -> str:
        # The folder is written first: a job that starts at once finds its points.
        folder = jobs.write(self._view.folder, job)
        after = jobs.list_predecessors(self._handles, job.task_count, self._options.throttle)
        made = plan_job(job, folder.resolve(), self._options, self._launcher, after, self._exclude)
        handle = self._hand_over(folder, made)
        self._handles[handle] = job.task_count
        return handle

    def _hand_over(self, folder: Path, made: LaunchPlan) -> str:
        """Submit a job and return its job id. The job's folder must already be written. If the job is refused, its
        definition is deleted."""
        return jobs.hand_over(folder, self._name, lambda: self._launcher.submit(made, self._options))

    def submit_autopilot(
        self, submitted: list[tuple[Job, str]], *, waiting: bool, notify: str | None = None
    ) -> str | None:
        """Submit the autopilot, a small job that submits the next points when other jobs have ended. Return its job id.

        Return None if no job is queued or running, or if an autopilot is in the queue already. `waiting` is True if
        points wait for room in the queue. The autopilot then starts after the first job has ended. If `waiting` is
        False, the autopilot starts after all jobs have ended.

        If the queue is full, the last job in `submitted` is cancelled to make room, and the autopilot is submitted
        again. If no other job remains, the autopilot starts after `_FULL_QUEUE_MIN` minutes.
        """
        # The first autopilot is useless without a job. A later one keeps the sweep going, unless the limit is too low
        # for the autopilot, the next autopilot and a job.
        limit, delay_min = self._cluster.max_submit_jobs, 0
        least = 1 if read_job(os.environ) and (limit is None or limit > _AUTOPILOTS) else 2
        while True:
            try:
                return self._submit_autopilot(waiting=waiting, notify=notify, delay_min=delay_min)
            except UserError as refusal:
                if not _TOO_MANY.search(str(refusal)) or len(submitted) < least:
                    raise
                job, handle = submitted.pop()
                self._launcher.cancel_all([handle], self._options)
                jobs.withdraw(self._view.folder / jobs.FOLDER / job.name)
                self._handles.pop(handle, None)
                waiting, delay_min = True, 0 if self._handles else _FULL_QUEUE_MIN

    def _submit_autopilot(self, *, waiting: bool, notify: str | None, delay_min: int) -> str | None:
        # The autopilot itself calls this from its own job, which does not count as waiting.
        own_job = read_job(os.environ) or JobContext()
        pilots = [job.name for job in self._view.live if not job.points and job.name != own_job.name]
        if pilots or not (self._handles or delay_min):
            return None
        name = jobs.create_name(f"{self._view.sweeps[-1].study}-autopilot")
        folder = self._view.folder.resolve() / jobs.FOLDER / name
        folder.mkdir(parents=True)
        after = tuple(self._handles)[: 1 if waiting else None]
        notice = () if notify is None else (f"--notify={notify}",)
        arguments = ("resume", str(folder.parents[1]), "--autopilot", *notice)
        work = Work(
            name, folder, "bench.cli", arguments, time_limit_min=_AUTOPILOT_MIN, after=after, delay_min=delay_min
        )
        return self._hand_over(folder, self._launcher.plan(work, self._options))


def _get_shape(job: Job) -> tuple[int, int]:
    return job.nodes, job.devices_per_node


def _halve(job: Job) -> list[Job]:
    """Return two job arrays, each with half of this job's points."""
    middle, study = len(job.points) // 2, job.points[0].circumstance.study
    halves = job.points[:middle], job.points[middle:]
    return [job.model_copy(update={"name": jobs.create_name(study), "points": points}) for points in halves]


def cancel_jobs(folder: Path) -> list[str]:
    """Cancel every queued or running job of a study, and no other job. Return the ids of the cancelled jobs.

    Raise UserError for a sweep that has no scheduler and whose command still runs.
    """
    view = read_state(folder, about_all=True)
    launcher, options = status.load_launcher(view.sweeps[-1])
    if not launcher:
        if any(one.state == "running" for one in view.statuses):
            rule = "this sweep runs in the command that started it"
            raise UserError(str(folder), rule, "press Ctrl-C in its terminal")
        return []
    numbers = sorted({state.handle for _, state in view.list_live()})
    if numbers:
        launcher.cancel_all(numbers, options)
    return numbers


_BEGIN_AND_END_MIN = 2  # minutes for the start and the end of an allocation
_LIMIT_STEP_MIN = 5  # points share a job array if their limits round up to the same multiple of this
SiblingsByPoint = Mapping[tuple[str, str], Siblings]


class JobBatcher:
    """Divides points into jobs by the launcher's mode: one job per point, job arrays, or packed jobs. The points of a
    job array have equal resources and similar time limits. A packed job runs its points one after the other on the same
    nodes.

    `options` are the launcher's options. The cluster's limits `max_array_size` and `max_time_min` are None if there is
    no limit. Raise UserError if the job of a point would exceed `max_time_min`.
    """

    def __init__(
        self,
        options: SchedulingOptions,
        max_array_size: int | None = None,
        max_time_min: int | None = None,
        kin: SiblingsByPoint | None = None,
    ) -> None:
        self._options, self._kin = options, kin or {}
        self._max_array_size, self._max_time_min = max_array_size, max_time_min

    def jobs(self, left: Sequence[PointStatus]) -> list[Job]:
        """Return the jobs for these points, grouped by `_compute_group_key`. No side effects; job names are random."""
        by_shape: dict[tuple[Any, ...], list[PointStatus]] = {}
        for point_status in left:
            by_shape.setdefault(self._compute_group_key(point_status), []).append(point_status)
        return [self._build_job(chunk) for members in by_shape.values() for chunk in self._split(members)]

    def _compute_group_key(self, point_status: PointStatus) -> tuple[Any, ...]:
        """Return the values in which all points of one job agree.

        The spread between repeats must include the differences between nodes. A packed job runs its points on the same
        nodes, so repeats of a point go to different packed jobs.
        """
        point, mode = point_status.point, self._options.mode
        limit = math.ceil((point.time_limit_min or 0) / _LIMIT_STEP_MIN) if mode == "array" else None
        repeat = point_status.key.repeat if mode == "packed" else None
        return point.nodes, point.devices_per_node, limit, repeat

    def _split(self, members: Sequence[PointStatus]) -> Iterator[list[PointStatus]]:
        """Divide points that agree in `_compute_group_key` into jobs: one point each, a job array of limited size, or
        (mode `packed`) as many points as can run one after the other within the longest time limit."""
        mode, array = self._options.mode, self._max_array_size or len(members)
        longest_min = min(self._options.job_max_min, self._max_time_min or math.inf)
        chunk: list[PointStatus] = []
        for point_status in members:
            max_points = {"point": 1, "array": array, "packed": len(members)}[mode]
            too_long = mode == "packed" and self._compute_time_limit_min([*chunk, point_status]) > longest_min
            if chunk and (len(chunk) == max_points or too_long):
                yield chunk
                chunk = []
            chunk.append(point_status)
        yield chunk

    def _compute_time_limit_min(self, members: Sequence[PointStatus]) -> int:
        """Return the time limit of a job in minutes.

        For a packed job, which runs points one after the other, it is the sum of the points' limits and twice the limit
        of the control point (a reference that runs first and last). For other jobs, it is the longest limit of a point.
        Time for the scheduler's warning and for the job's start and end is added.
        """
        first, limits = members[0], [point_status.point.time_limit_min or 0 for point_status in members]
        points = sum(limits) if self._options.mode == "packed" else max(limits)
        control = self._find_control(first)
        limits_min = points + 2 * ((control.time_limit_min or 0) if control else 0)
        warning_min = self._options.warning_s / 60
        return math.ceil(limits_min + warning_min) + _BEGIN_AND_END_MIN

    def _find_control(self, point_status: PointStatus) -> SweepPoint | None:
        """Return the control point (a reference configuration) for a point's job. A packed job runs it before and after
        its points. None for other jobs."""
        shape = point_status.point.nodes, point_status.point.devices_per_node
        return point_status.sweep.control(*shape) if self._options.mode == "packed" else None

    def _build_job(self, members: Sequence[PointStatus]) -> Job:
        first = members[0]
        sweep, point, control = first.sweep, first.point, self._find_control(first)
        minutes = self._compute_time_limit_min(members)
        if self._max_time_min is not None and minutes > self._max_time_min:
            rule = f"{point.config_id} may need a job of {minutes} min, but the partition allows {self._max_time_min}"
            raise UserError(f"launcher.time_limit_min={point.time_limit_min:.3g}", rule, "set a shorter time limit")
        return Job(
            name=create_name(sweep.study), mode=self._options.mode, nodes=point.nodes,
            devices_per_node=point.devices_per_node, time_limit_min=minutes, prune=sweep.rules.prune,
            attempts=sweep.rules.budget.attempts, span=self._options.span, points=tuple(map(self._request, members)),
            control=sweep.requested(control, 0, control=True) if control else None,
        )  # fmt: skip

    def _request(self, point_status: PointStatus) -> RequestedRun:
        key = point_status.key
        kin = self._kin.get((key.config_id, key.machine))
        return point_status.sweep.requested(point_status.point, key.repeat, again=point_status.final, kin=kin)
