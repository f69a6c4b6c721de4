"""The supervisor on an allocation's first node: goes through the points of a job, each in fresh processes."""

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from bench import store
from bench.allocation.health import Health
from bench.allocation.members import Members
from bench.errors import UserError
from bench.measure.environment import classify, device_kind, environment_id
from bench.record import Circumstance, Outcome, RunRecord
from bench.scheduling import JobContext
from bench.supervisor.crew import MeetingPoint
from bench.supervisor.forking import ForkServer
from bench.supervisor.lead import Supervisor
from bench.supervisor.node import supervisors
from bench.supervisor.verdict import survivors
from bench.sweep import jobs, reconcile, survey
from bench.sweep.asked import Key, Todo
from bench.sweep.policy import (
    Conclude,
    Decision,
    Leave,
    PlannedRun,
    Snapshot,
    Start,
    SweepPlan,
    Wait,
    next_run,
)

_PARTING_S = 20.0  # between the end of a point's time and the scheduler's warning that the allocation ends


class Conductor:
    """Leads one allocation of a job. Whatever happens to one point is its record, and the next one follows."""

    def __init__(self, folder: Path, context: JobContext) -> None:
        self.job, self.context, self.folder = jobs.read(folder), context, folder
        self.study_folder = folder.parent.parent
        self.todo = self.job.todo(context.task)
        self.began_at = time.time()
        self.ends_at = context.end(self.job.time_limit_min, self.began_at)
        first = self.todo[0].circumstance
        self.device = first.machine.device or device_kind()
        self.environment_id = environment_id(classify(self.device, self.job.devices_per_node))
        self.server = ForkServer(self.device)
        self.host = socket.gethostname()
        self.patience_s = first.limits.startup_s
        self.health = Health(self.study_folder)
        self.interrupted_by: int | None = None
        self.supervisor: Supervisor | None = None
        self.members: Members | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def run(self) -> int:
        """Go through the points; return 0 unless the allocation itself came to a bad end."""
        spent = jobs.Allocation(
            self.context.job_id, self.context.task, self.context.restart, self.job.nodes, self.began_at, None
        )
        note = jobs.begin(self.folder, spent)
        try:
            with contextlib.closing(self.server):
                self._settle_earlier()
                self.server.wait_until_ready()
                return self._go_through()
        except (OSError, UserError) as error:  # a full disk, a node that never came
            return _complain(str(error))
        finally:
            if self.members:
                self.members.dismiss()
            with contextlib.suppress(OSError):
                jobs.end(note, time.time())

    def _go_through(self) -> int:
        network = self.todo[0].circumstance.network
        others = supervisors(self.todo[0].spec, self.job.span) - 1
        address, allocation = network.address(self.host), self.context.allocation
        self.members = Members(others, address, self.folder, allocation, self.patience_s)
        plan = self._plan()
        passed: list[Decision] = []
        while decision := next_run(plan, self._snapshot(passed)):
            if self.interrupted_by:
                break
            passed.append(decision)
            if reason := self._carry_out(decision):
                return _complain(reason)
        return 1 if self.interrupted_by else 0

    def _plan(self) -> SweepPlan:
        """Return what this allocation goes through; predictions were looked at when it was submitted."""
        control = self.job.control
        return SweepPlan([self._planned(todo) for todo in self.todo], self._planned(control) if control else None)

    def _planned(self, todo: Todo) -> PlannedRun:
        return PlannedRun(
            todo.key,
            todo.kin,
            prune=self.job.prune,
            limit_min=todo.circumstance.limits.time_limit_min or 0.0,
            environment_id=self.environment_id,
            reopened=todo.again,
        )

    def _snapshot(self, passed: Sequence[Decision]) -> Snapshot:
        """Return what the study's folder and the clock show now."""
        warning_s = float(self.todo[0].circumstance.launcher.get("warning_s", 0))
        left_s = self.ends_at - time.time() - _PARTING_S - warning_s
        return Snapshot(self._tried, busy=self._busy, left_s=left_s, passed=passed)

    def _carry_out(self, decision: Decision) -> str:
        """Do what was decided; return why the allocation has to end, empty if it goes on."""
        run = decision.run
        todo = self.job.control if run.role == "control" else None
        todo = todo or next(todo for todo in self.todo if todo.key == run.key)
        match decision:
            case Start():
                self._answer(todo)
                if self.members and (lost := self.members.wait()):
                    return f"{', '.join(lost)} cannot be reached any more"
                if reason := self.health.complaint():
                    return f"{reason}; its node is left out from now on"
            case Conclude(outcome=outcome):
                folder = self.study_folder / todo.config_id
                store.conclude(store.open_attempt(folder, todo.spec, self._circumstance(todo)).folder, outcome)
                _say(todo, outcome.reason)
            case Wait(why=why) | Leave(why=why):
                _say(todo, why)
        return ""

    def _busy(self, key: Key) -> str:
        """Return who else measures a point now; empty: nobody."""
        elsewhere = survey.busy_elsewhere(self.study_folder / key.config_id, key)
        return f"is under way in job {elsewhere.job or 'of another scheduler'}" if elsewhere else ""

    def _answer(self, todo: Todo) -> None:
        """Make one attempt at a point, on all nodes."""
        config_folder = self.study_folder / todo.config_id
        attempt = store.open_attempt(config_folder, todo.spec, self._circumstance(todo), new_repeat=todo.control)
        if not todo.control and (rival := survey.busy_elsewhere(config_folder, todo.key, before=attempt.attempt)):
            reason = f"job {rival.job} was faster by a moment: {rival.attempt.folder.name}"
            store.conclude(attempt.folder, Outcome(kind="cancelled", reason=reason))
            return
        self.supervisor = Supervisor(
            attempt.folder,
            announce=lambda point: self._announce(attempt.folder, point),
            span=self.job.span,
            start=self.server.start,
            scheduled=True,
            ends_at=self.ends_at,
            handle_signals=False,
        )
        if self.interrupted_by:
            self.supervisor.interrupt(self.interrupted_by)
        record = self.supervisor.run()
        left = survivors(self.supervisor.states())
        self.supervisor = None
        self.server.reap()
        _say(todo, _ended(record))
        self.health.examine(record, left, attempt.folder)

    def _announce(self, folder: Path, point: MeetingPoint) -> None:
        if self.members:
            self.members.run(folder, point)

    def _circumstance(self, todo: Todo) -> Circumstance:
        """Return a point's circumstances with what is known only here."""
        place = {"job": self.job.name, "job_id": self.context.job_id, "task": self.context.task}
        more = {**place, "restart": self.context.restart, "started": "forked", "control": todo.control}
        launcher = todo.circumstance.launcher | more
        machine = todo.circumstance.machine.on(self.device)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        return todo.circumstance.model_copy(update={"launcher": launcher, "machine": machine, "started_at": started_at})

    def _settle_earlier(self) -> None:
        """Conclude what this job began before it was put back into the queue."""
        begun = [*self.todo, *([self.job.control] if self.job.control else [])] if self.context.restart else []
        for todo in begun:
            for attempt in store.attempts(self.study_folder / todo.config_id):
                found = None if attempt.outcome else survey.look(todo.config_id, attempt)
                if found and (found.job, found.task) == (self.job.name, self.context.task):
                    traces = reconcile.Traces.read(attempt.folder)
                    store.conclude(attempt.folder, reconcile.outcome(traces, None, restarted=True))

    def _tried(self, config_id: str) -> list[store.Attempt]:
        return store.attempts(self.study_folder / config_id)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted_by = number
        if self.supervisor:
            self.supervisor.interrupt(number)


def _say(todo: Todo, what: str) -> None:
    key = todo.key
    print(f"{datetime.now(UTC):%H:%M:%S}  {key.config_id} repeat {key.repeat}: {what}", flush=True)


def _ended(record: RunRecord | None) -> str:
    if record is None:
        return "interrupted; the scheduler knows why"
    outcome = record.outcome
    return f"{outcome.kind}: {outcome.reason}" if outcome.reason else str(outcome.kind)


def _complain(reason: str) -> int:
    print(f"this allocation ends: {reason}", file=sys.stderr, flush=True)
    return 1
