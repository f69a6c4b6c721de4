"""Leader of an allocation: the supervisor process on the first node. It runs the points (configurations) of a job one
after the other, each with new rank processes."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from bench.core import store
from bench.core.errors import UserError
from bench.core.files import is_disk_full
from bench.core.quantities import find_slow_links
from bench.core.record import Circumstance, Outcome, RunRecord
from bench.core.scheduling import JobContext, SchedulerUnavailable
from bench.core.study_store import StudyStore, check_spec
from bench.measure.environment import classify, compute_environment_id, find_device_kind
from bench.runtime.coordinator import RunCoordinator
from bench.runtime.node import count_supervisors
from bench.runtime.outcome import RankState, list_survivors
from bench.runtime.process import ForkServer
from bench.sweep import jobs, lost, snapshot
from bench.sweep.allocation.agents import JobAgents
from bench.sweep.allocation.uploads import JobUploads
from bench.sweep.definition import RequestedRun, RunKey
from bench.sweep.jobs import Exclusion
from bench.sweep.policy import (
    Decision,
    PlannedRun,
    PostponeRun,
    RecordWithoutRun,
    SkipRun,
    Snapshot,
    StartRun,
    SweepPlan,
    next_run,
)
from bench.sweep.snapshot import UnfinishedAttempt

_CONFIRMED = 2  # runs in a row that must show a defect; in a single run, traffic of other jobs may be the cause
_SLOWED_SHARE = 0.02  # a device that was throttled for more than this share of the measurement window has a defect
_SLOWED_BY_HARDWARE = 0x08 | 0x40 | 0x80  # NVML's reasons: hardware slowdown, thermal, power brake
_END_MARGIN_S = 20.0  # kept free between a point's latest end and the scheduler's warning before the time limit


class NodeHealth:
    """Excludes unfit nodes from the study's later jobs.

    A node is excluded if two runs in a row show a defect of this node, such as a slow link. It is excluded at once if a
    rank process on it cannot be killed.
    """

    def __init__(self, study_folder: Path) -> None:
        self._folder = study_folder
        self._seen: dict[str, list[str]] = {}
        self._excluded: list[Exclusion] = []

    def examine(self, record: RunRecord | None, left: Sequence[RankState], attempt_folder: Path) -> None:
        """Examine the record of one attempt, and exclude nodes that prove unfit. `left` has the ranks whose processes
        could not be killed after the attempt."""
        run = f"{attempt_folder.parent.name}/{attempt_folder.name}"
        for state in left:
            self._exclude(state.host, f"the process {state.pid} of rank {state.rank} cannot be killed", [run])
        shown = find_defects(record) if record else {}
        self._seen = {host: [*self._seen.get(host, []), run] for host in shown}
        for host, reason in shown.items():
            if len(self._seen[host]) >= _CONFIRMED:
                self._exclude(host, reason, self._seen[host])

    def _exclude(self, host: str, reason: str, runs: Sequence[str]) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._excluded.append(Exclusion(host=host, reason=reason, runs=tuple(runs), at=at))
        jobs.write_exclusion(self._folder, self._excluded[-1])

    def format_excluded(self) -> str | None:
        """Return a text with the excluded nodes of this allocation and the reasons; None if no node was excluded."""
        return "; ".join(f"{found.host}: {found.reason}" for found in self._excluded) or None


def find_defects(record: RunRecord) -> dict[str, str]:
    """Return the defect of each unfit host of a run as a text, by host name. One defect is a link with less than half
    of the median bandwidth. Another is a device that was slowed down by its temperature or by its hardware."""
    if not record.environment or not record.observations:
        return {}
    hosts, found = record.environment.hosts, {}
    if link := record.observations.link:
        best = max((rate for rate in link.nodes_bytes_per_s if rate is not None), default=0.0)
        for node in find_slow_links(link.nodes_bytes_per_s):
            rate = link.nodes_bytes_per_s[node] or 0.0
            others = f"links of other nodes reached up to {best / 1e6:.1f} MB/s"
            found[hosts[node]] = f"its link reached {rate / 1e6:.1f} MB/s; {others}"
    window_s = record.observations.steps.window_s if record.observations.steps else 0.0
    for use in record.observations.device_use or ():
        if (use.thermal_throttled_s or 0.0) > _SLOWED_SHARE * window_s > 0:
            slowed = f"was throttled by its temperature for {use.thermal_throttled_s:.1f} s"
            found[hosts[use.rank // record.spec.devices_per_node]] = f"the device of rank {use.rank} {slowed}"
    for number, device in enumerate(record.environment.devices_after):  # read on the first node only
        if (reasons := device.get("throttle_reasons") or 0) & _SLOWED_BY_HARDWARE:
            found[hosts[0]] = f"the hardware throttled its device {number} (throttle reasons {reasons:#x})"
    return found


class JobLeader:
    """Runs the points (configurations) of a job in one allocation. After a point that fails, its record is written and
    the next point runs."""

    def __init__(
        self, folder: Path, context: JobContext, study: StudyStore | None = None, uploads: JobUploads | None = None
    ) -> None:
        """`study` is the study's object store; it is given if the nodes share no folder. `uploads` uploads the progress
        of each attempt to that store."""
        self.job, self.context, self.folder = jobs.read(folder), context, folder
        self.study, self.uploads = study, uploads
        self.study_folder = folder.parent.parent
        self.requested = self.job.requested(context.task)
        self.began_at = time.time()
        if context.system == "slurm" and context.ends_at is None:  # Slurm 22.05 does not set this variable
            from bench.launchers.slurm.queue import find_end  # here: jobs of other systems do not need it

            context = context._replace(ends_at=find_end(context))
        self.ends_at = context.end(self.job.time_limit_min, self.began_at)
        if study:
            for requested in self.requested:
                check_spec(requested.spec)
            # A finished record must not be lost because the store is unavailable for a while.
            study.objects.give_up_at = self.ends_at - _END_MARGIN_S
        first = self.requested[0].circumstance
        self.device = first.machine.device or find_device_kind()
        self.environment_id = compute_environment_id(classify(self.device, self.job.devices_per_node))
        self.server = ForkServer(self.device, self.job.list_specs(context.task))
        self.host = socket.gethostname()
        self.patience_s = first.limits.startup_s
        self.health = NodeHealth(self.study_folder)
        self.interrupted_by: int | None = None
        self.supervisor: RunCoordinator | None = None
        self.agents: JobAgents | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def run(self) -> int:
        """Run the points of the job. Return 0 after the last point, whatever the outcomes. Return `EXIT_LATER` if a
        disk is full, and 1 if a signal or another error ended the allocation before the last point."""
        spent = jobs.AllocationPeriod(
            self.context.job_id, self.context.task, self.context.restart, self.job.nodes, self.began_at, None
        )
        note = jobs.begin_allocation(self.folder, spent)
        try:
            self._push(note)
            with contextlib.closing(self.server):
                self._finalize_earlier()
                self.server.wait_until_ready()
                return self._go_through()
        except (OSError, UserError) as error:  # a full disk, a node that never connected
            if self.interrupted_by:  # the signal may also be the cause of the error
                return _report_failure(f"interrupted by {signal.Signals(self.interrupted_by).name}")
            return _report_failure(str(error), jobs.EXIT_LATER if is_disk_full(error) else 1)
        finally:
            if self.agents:
                self.agents.send_end()
            with contextlib.suppress(OSError, UserError):
                jobs.end_allocation(note, time.time())
                self._push(note)

    def _go_through(self) -> int:
        first = self.requested[0]
        others = count_supervisors(first.spec, self.job.span) - 1
        address = first.circumstance.network.address(self.host)
        patience = self.patience_s, lambda: self.interrupted_by is not None
        self.agents = JobAgents(others, address, self.folder, self.context.allocation, *patience, self.study)
        plan = self._plan()
        passed: list[Decision] = []
        # The folder is read again for each decision: other jobs of the study add answers meanwhile.
        while decision := next_run(plan, self._snapshot(passed)):
            if self.interrupted_by:
                break
            if newer := self._find_newer_start():
                return _report_failure(newer)
            passed.append(decision)
            if reason := self._carry_out(decision):
                return _report_failure(reason)
        return 1 if self.interrupted_by else 0

    def _plan(self) -> SweepPlan:
        """Return the plan of this allocation's runs. Points that are predicted not to fit were excluded at submission,
        so the plan has no predictions."""

        def build(requested: RequestedRun) -> PlannedRun:
            return PlannedRun(
                requested.key,
                requested.kin,
                self.job.prune,
                attempts=None if requested.again else self.job.attempts,
                limit_min=requested.circumstance.limits.time_limit_min or 0.0,
                environment_id=self.environment_id,
                reopened=requested.again,
            )

        return SweepPlan([*map(build, self.requested)], build(self.job.control) if self.job.control else None)

    def _snapshot(self, passed: Sequence[Decision]) -> Snapshot:
        """Return the state on which the next decision is based: the attempts in the study's folder, the decisions of
        this allocation so far (`passed`), and the seconds left in this allocation."""
        warning_s = float(self.requested[0].circumstance.launcher.get("warning_s", 0))
        left_s = self.ends_at - time.time() - _END_MARGIN_S - warning_s
        return Snapshot(
            self._list_attempts,
            busy=self._busy,
            left_s=left_s,
            passed=passed,
        )

    def _list_attempts(self, config_id: str) -> list[store.RunAttempt]:
        """Return all attempts at a configuration, including those of other jobs."""
        if self.study:
            self.study.pull_attempts(config_id)
        return store.list_attempts(self.study_folder / config_id)

    def _open_attempt(self, requested: RequestedRun) -> store.RunAttempt:
        """Create the folder of the next attempt (one try) at a point. Because the folder exists, no other process can
        use the same attempt number."""
        open_attempt = self.study.open_attempt if self.study else store.open_attempt
        config_folder = self.study_folder / requested.config_id
        circumstance = self._circumstance(requested)
        return open_attempt(config_folder, requested.spec, circumstance, new_repeat=requested.control)

    def _finalize(self, folder: Path, outcome: Outcome) -> None:
        """Write the record of an attempt for which this process runs no ranks, for example because the attempt was
        interrupted or is not needed. `folder` is the folder of the attempt."""
        store.finalize(folder, outcome, "predicted" if outcome.kind == "infeasible" else "measured")
        if self.study:
            self.study.push_attempt(folder)

    def _push(self, *paths: Path) -> None:
        """Copy files of the study's folder to the object store, if there is one."""
        if self.study:
            self.study.push(*paths)

    def _carry_out(self, decision: Decision) -> str:
        """Carry out a decision on a run. Return the reason why the allocation has to end; empty if it continues."""
        run = decision.run
        requested = self.job.control if run.role == "control" else None
        requested = requested or next(requested for requested in self.requested if requested.key == run.key)
        match decision:
            case StartRun():
                if self.server.has_ended:
                    self.server.restart()
                self._run_attempt(requested)
                if self.agents and (gone := self.agents.wait()):
                    return f"lost connection to {', '.join(gone)}"
                if reason := self.health.format_excluded():
                    self._push(*(self.study_folder / jobs.EXCLUDED).glob("*.json"))
                    return f"{reason}; jobs exclude this node from now on"
            case RecordWithoutRun(outcome=outcome):
                self._finalize(self._open_attempt(requested).folder, outcome)
                _print_progress(requested, outcome.reason)
            case PostponeRun(why=why) | SkipRun(why=why):
                _print_progress(requested, why)
        return ""

    def _busy(self, key: RunKey) -> str:
        """If another job is measuring a point now, return a text that names this job. Otherwise return an empty
        text."""
        elsewhere = snapshot.find_rival_attempt(self.study_folder / key.config_id, key, ours=self._is_of_this_job)
        return f"runs in job {elsewhere.job or 'of another scheduler'} now" if elsewhere else ""

    def _run_attempt(self, requested: RequestedRun) -> None:
        """Make one attempt at a point, with ranks on all nodes of the allocation."""
        assert self.agents
        attempt = self._open_attempt(requested)
        config_folder, key, ours = attempt.folder.parent, requested.key, self._is_of_this_job
        if not requested.control and (rival := snapshot.find_rival_attempt(config_folder, key, attempt.attempt, ours)):
            reason = f"job {rival.job} started this point a moment earlier, as attempt {rival.attempt.folder.name}"
            self._finalize(attempt.folder, Outcome(kind="cancelled", reason=reason))
            return
        self.supervisor = RunCoordinator(
            attempt.folder,
            announce=partial(self.agents.run, attempt.folder.relative_to(self.study_folder).as_posix()),
            span=self.job.span,
            start=self.server.start,
            scheduled=True,
            ends_at=self.ends_at,
            is_lost=self._find_newer_start,
            handle_signals=False,
        )
        # A signal may have arrived before `self.supervisor` was set.
        if self.interrupted_by:
            self.supervisor.interrupt(self.interrupted_by)
        with self.uploads.of_attempt(attempt.folder) if self.uploads else contextlib.nullcontext():
            record = self.supervisor.run()
        left = list_survivors(self.supervisor.states())
        self.supervisor = None
        self.server.reap()
        if self.study:
            self.study.push_attempt(attempt.folder)
        _print_progress(requested, _format_end(record))
        self.health.examine(record, left, attempt.folder)

    def _circumstance(self, requested: RequestedRun) -> Circumstance:
        """Return the circumstances of an attempt that starts now: a part of its record that says where and how the
        point is measured. They consist of the planned values and, in addition, the job, the job's restart count, the
        device and the time of the start."""
        place = {"job": self.job.name, "job_id": self.context.job_id, "task": self.context.task}
        more = {**place, "restart": self.context.restart, "started": "forked", "control": requested.control}
        update = {
            "launcher": requested.circumstance.launcher | more,
            "machine": requested.circumstance.machine.on(self.device),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return requested.circumstance.model_copy(update=update)

    def _finalize_earlier(self) -> None:
        """Write the missing records of attempts that this job began before the scheduler put the job back into the
        queue. Do nothing in a job that was not requeued."""
        for requested in filter(None, [*self.requested, self.job.control] if self.context.restart else ()):
            for attempt in self._list_attempts(requested.config_id):
                found = None if attempt.outcome else snapshot.read_unfinished(requested.config_id, attempt)
                if found and self._is_of_this_job(found):
                    left_behind = lost.read_left_behind(attempt.folder)
                    self._finalize(attempt.folder, lost.reconcile_outcome(left_behind, None, restarted=True))

    def _is_of_this_job(self, attempt: UnfinishedAttempt) -> bool:
        """Return whether this job began `attempt`, an attempt (one try at a point) without a record. Attempts that this
        job began before the scheduler requeued the job are included; attempts of other jobs are not.

        An attempt of this job does not prevent its point from running again. If the attempt was begun before the
        requeue, its allocation has ended, and its processes will end soon.
        """
        return (attempt.job, attempt.task) == (self.job.name, self.context.task)

    def _find_newer_start(self) -> str:
        """Return a message if the scheduler has started this job again since this process began; empty if it has not.

        After losing a node, a scheduler may restart a job while processes of its first start still run. Runs of those
        old processes no longer belong to the job.
        """
        if self.study:
            with contextlib.suppress(SchedulerUnavailable):
                self.study.without_patience().pull_job(self.folder)
        latest = jobs.find_latest_restart(self.folder, self.context.task, self.context.job_id)
        newer = latest > self.context.restart
        return f"the scheduler has requeued this job, and start {latest} of it runs now" if newer else ""

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted_by = number
        if self.supervisor:
            self.supervisor.interrupt(number)


def _print_progress(requested: RequestedRun, what: str) -> None:
    key = requested.key
    _write_line(f"{datetime.now(UTC):%H:%M:%S}  {key.config_id} repeat {key.repeat}: {what}", sys.stdout)


def _write_line(text: str, stream: TextIO) -> None:
    """Write a line to the job's log. If the disk is full, the line is lost, but the current point and the job
    continue."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # the rest of the buffer must not fail again at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _format_end(record: RunRecord | None) -> str:
    if record is None:
        return "interrupted; the scheduler knows the reason"
    outcome = record.outcome
    return f"{outcome.kind}: {outcome.reason}" if outcome.reason else str(outcome.kind)


def _report_failure(reason: str, exit_code: int = 1) -> int:
    _write_line(f"the job ends: {reason}", sys.stderr)
    return exit_code
