"""Go through the points of a sweep on this machine, one after the other."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import store
from bench.local import attempt
from bench.measure.environment import classify, device_kind, environment_id
from bench.record import Outcome
from bench.sweep import unrun
from bench.sweep.asked import Key, Point, Sweep, Todo
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.policy import (
    Conclude,
    Decision,
    Leave,
    PlannedRun,
    Snapshot,
    Start,
    SweepPlan,
    known,
    next_run,
    planned_run,
)
from bench.sweep.pruning import Kin, kinships
from bench.terminal import Progress
from bench.wording import describe, duration, result

Heard = Callable[[str], None]
Follow = Callable[[Progress], None]


class Asked(NamedTuple):
    """One repeat of one point."""

    key: Key
    sweep: Sweep
    point: Point


class Ended(NamedTuple):
    """How the points of a sweep ended."""

    folder: Path
    outcomes: Counter[str]  # those that had their answer before too
    skipped: int  # points that had their answer before

    @property
    def good(self) -> bool:
        """Whether everything that was asked for ended `ok`."""
        return set(self.outcomes) == {"ok"}


class Here:
    """A sweep under way: carries out what the policy decides, and shows how long the rest may take."""

    def __init__(self, folder: Path, asked: list[Asked], *, retry: bool, tell: Heard, follow: Follow) -> None:
        """`retry` goes on with points whose attempts are used up: somebody asked for them by name. `tell` hears every
        point that ends, `follow` how far the one under way is."""
        self.folder, self._tell, self._follow = folder, tell, follow
        self._asked = {one.key: one for one in asked}
        kin = kinships((one.key, one.point.spec) for one in asked)
        self.runs = [_planned(one, kin[one.key[:2]], retry) for one in asked]
        self._attempts: dict[str, list[store.Attempt]] = {}
        tried = (attempt for config_id in {one.key.config_id for one in asked} for attempt in self._tried(config_id))
        self._neighbourhood = Neighbourhood((one.point for one in asked), tried)
        self._control: Todo | None = None
        self._passed: list[Decision] = []
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self._skipped = 0

    def run(self) -> Ended:
        """Measure what has no answer yet; return how everything that was asked for ended."""
        plan, number = self._plan(), 0
        while decision := next_run(plan, self.snapshot()):
            self._passed.append(decision)
            match decision:
                case Start(run):
                    number += 1
                    self._measure(self._todo(run), number, max(number, len(plan.runs)))
                case Conclude(run, outcome):
                    self._conclude(run, outcome)
                case Leave():
                    self._skip(decision)
        return Ended(self.folder, Counter(self.kinds), self._skipped)

    def _plan(self) -> SweepPlan:
        """Count what has its answer already; return the rest, with the control point of its first."""
        everything, snapshot = SweepPlan(self.runs), self.snapshot()
        left: list[PlannedRun] = []
        for run in self.runs:
            if leave := known(run, everything, snapshot):
                self._skip(leave)
            else:
                left.append(run)
        sweep = self._asked[left[0].key].sweep if left else None
        if sweep and sweep.controls:
            self._control = sweep.todo(sweep.controls[0], 0, control=True)
        return SweepPlan(left, PlannedRun(self._control.key) if self._control else None)

    def snapshot(self) -> Snapshot:
        """Return what the folder shows now, and what this sweep has gone through."""
        return Snapshot(self._tried, self._neighbourhood.correction, passed=self._passed)

    def _todo(self, run: PlannedRun) -> Todo:
        """Return the attempt that is to be made at a run."""
        if run.role == "control" and self._control:
            return self._control
        one = self._asked[run.key]
        return one.sweep.todo(one.point, run.key.repeat)

    def _conclude(self, run: PlannedRun, outcome: Outcome) -> None:
        """Record that a point need not run."""
        unrun.conclude(self.folder, self._todo(run), outcome)
        self._attempts.pop(run.key.config_id, None)
        self.kinds.append(outcome.kind)
        line = self._asked[run.key].point.line
        self._tell(f"{line}  repeat {run.key.repeat}\n    {outcome.kind}: {outcome.reason}")

    def _skip(self, leave: Leave) -> None:
        """Count a point by the answer that it has already."""
        if leave.attempt:
            self.kinds.append(str(leave.attempt.outcome))
        self._skipped += 1

    def _tried(self, config_id: str) -> list[store.Attempt]:
        """Return the attempts at a configuration, read again only after another."""
        if config_id not in self._attempts:
            self._attempts[config_id] = store.attempts(self.folder / config_id)
        return self._attempts[config_id]

    def _left(self, runs: int, since_s: float) -> str:
        """Return how long this run and so many more may take, by those before; empty where there were none."""
        if not self.seconds:
            return ""
        each_s = statistics.median(self.seconds)
        return f"about {duration(max(each_s - since_s, 0.0) + runs * each_s)} left"

    def _measure(self, todo: Todo, number: int, count: int) -> None:
        line, begin = describe(todo.spec, todo.config_id), time.monotonic()

        def follow(run: Progress) -> None:
            done, more = number - 1 + (run.share or 0.0), count - number
            left = self._left(more, time.monotonic() - begin) or (run.left if more == 0 else "")
            self._follow(Progress(f"[{number}/{count}] {run.what}  {line}", done / count, left))

        _, record = attempt.measure(todo, self.folder, follow)
        self._attempts.pop(todo.config_id, None)
        self._neighbourhood.add(record)
        self.seconds.append(time.monotonic() - begin)
        self.kinds.append(record.outcome.kind)
        what = "control" if todo.control else f"repeat {record.circumstance.repeat}"
        self._tell(f"[{number}/{count}] {line}  {what}\n    {result(record)}")


def _planned(one: Asked, kin: Kin, retry: bool) -> PlannedRun:
    """Return one repeat of one point as the policy sees it: an answer holds on this machine in this environment."""
    device = one.sweep.machines[one.key.machine].device or device_kind()
    environment = environment_id(classify(device, one.point.devices_per_node))
    attempts = None if retry else one.sweep.rules.budget.attempts
    return planned_run(one.sweep, one.key, one.point, kin, attempts, environment)
