"""Go through the points of a sweep on this machine, one after the other."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.core import store
from bench.core.formatting import describe_point, describe_result, format_duration
from bench.core.record import Outcome, OutcomeKind
from bench.core.terminal import Progress
from bench.measure.environment import classify, compute_environment_id, find_device_kind
from bench.sweep import definition, local_attempt, lost
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.definition import RequestedRepeat, RequestedRun, RunKey, SweepDefinition, Trial
from bench.sweep.policy import (
    AddTrial,
    Decision,
    PlannedRun,
    PostponeRun,
    Proposer,
    RecordWithoutRun,
    SkipRun,
    Snapshot,
    StartRun,
    SweepPlan,
    build_planned_run,
    find_skip,
    next_run,
    next_step,
)
from bench.sweep.pruning import Siblings, find_siblings
from bench.sweep.snapshot import TrialReader, find_rival_attempt

TextCallback = Callable[[str], None]
Follow = Callable[[Progress], None]


class LocalSearch(NamedTuple):
    """What adds trials to a sweep under way."""

    sweep: SweepDefinition
    proposer: Proposer


class SweepResult(NamedTuple):
    """How the points of a sweep ended."""

    folder: Path
    outcomes: Counter[str]  # those that had their answer before too
    skipped: int  # points that had their answer before
    unanswered: int = 0  # points that another process measures, and runs that were paused

    @property
    def good(self) -> bool:
        """Whether everything that was asked for has an answer, and ended `ok`."""
        return set(self.outcomes) == {"ok"} and not self.unanswered


class LocalSweep:
    """A sweep under way: carries out what the policy decides, and shows how long the rest may take."""

    def __init__(
        self,
        folder: Path,
        repeats: list[RequestedRepeat],
        *,
        retry: bool,
        tell: TextCallback,
        follow: Follow,
        search: LocalSearch | None = None,
    ) -> None:
        """`retry` goes on with points whose attempts are used up: somebody asked for them by name. `tell` hears every
        point that ends, `follow` how far the one under way is. `search` asks for further points."""
        self.folder, self._tell, self._follow, self._search = folder, tell, follow, search
        attempts = search.sweep.rules.budget.attempts if search else 0
        self._trials = TrialReader(folder, self._read_attempts, attempts)
        self._repeats = {one.key: one for one in repeats}
        kin = find_siblings((one.key, one.point.spec) for one in repeats)
        self.runs = [_plan_repeat(one, kin[one.key[:2]], retry) for one in repeats]
        self._attempts: dict[str, list[store.RunAttempt]] = {}
        tried = (
            attempt
            for config_id in {one.key.config_id for one in repeats}
            for attempt in self._read_attempts(config_id)
        )
        self._corrections_by_neighbours = MeasuredCorrections((one.point for one in repeats), tried)
        self._control: RequestedRun | None = None
        self._passed: list[Decision] = []
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self._skipped = self._unanswered = 0

    def run(self) -> SweepResult:
        """Measure what has no answer yet; return how everything that was asked for ended."""
        plan, number = self._plan(), 0
        while decision := next_step(plan, self.snapshot()):
            match decision:
                case AddTrial():
                    plan = self._add_trial(plan, decision)
                    continue
                case StartRun(run):
                    if not self._measure(plan, decision, number + 1, max(number + 1, len(plan.runs))):
                        continue  # others have been at it, so it is decided anew
                    number += 1
                case RecordWithoutRun(run, outcome):
                    self._conclude(run, outcome)
                case SkipRun():
                    self._skip(decision)
                case PostponeRun():
                    self._unanswered += 1
            self._passed.append(decision)
        return SweepResult(self.folder, Counter(self.kinds), self._skipped, self._unanswered)

    def _plan(self) -> SweepPlan:
        """Count what has its answer already; return the rest, with the control point of its first."""
        everything, snapshot = SweepPlan(self.runs), self.snapshot()
        left: list[PlannedRun] = []
        for run in self.runs:
            if leave := find_skip(run, everything, snapshot):
                self._skip(leave)
            else:
                left.append(run)
        sweep = self._repeats[left[0].key].sweep if left else None
        if sweep and sweep.controls:
            self._control = sweep.requested(sweep.controls[0], 0, control=True)
        control = PlannedRun(self._control.key) if self._control else None
        return SweepPlan(left, control, proposer=self._search.proposer if self._search else None)

    def _add_trial(self, plan: SweepPlan, added: AddTrial) -> SweepPlan:
        """Return the plan with a trial that was proposed; without it where another worker asked first for a trial of
        this number, which the next proposal knows then."""
        assert self._search
        if not definition.write_trial(self.folder, Trial(number=added.number, **added.proposal._asdict())):
            return plan
        point = added.proposal.point
        one = RequestedRepeat(RunKey(point.config_id, point.machine, 0), self._search.sweep, point)
        self._repeats[one.key] = one
        self._corrections_by_neighbours.add_point(point)
        return plan._replace(runs=[*plan.runs, _plan_repeat(one, None, retry=False)])

    def snapshot(self) -> Snapshot:
        """Return what the folder shows now, and what this sweep has gone through."""
        correction = self._corrections_by_neighbours.correction
        return Snapshot(
            self._read_attempts,
            correction,
            busy=self._find_rival,
            passed=self._passed,
            results=self._trials.read_results,
        )

    def _find_rival(self, key: RunKey) -> str:
        """Return who else measures a point now; empty for nobody, and where everybody waits for their turn."""
        if local_attempt.waits(self._repeats[key].request()):
            return ""
        return "is under way in another process" if find_rival_attempt(self.folder / key.config_id, key) else ""

    def _request(self, run: PlannedRun) -> RequestedRun:
        """Return the attempt that is to be made at a run."""
        if run.role == "control" and self._control:
            return self._control
        return self._repeats[run.key].request()

    def _conclude(self, run: PlannedRun, outcome: Outcome) -> None:
        """Record that a point need not run."""
        lost.write_outcome(self.folder, self._request(run), outcome)
        self._attempts.pop(run.key.config_id, None)
        self.kinds.append(outcome.kind)
        line = self._repeats[run.key].point.line
        self._tell(f"{line}  repeat {run.key.repeat}\n    {outcome.kind}: {outcome.reason}")

    def _skip(self, leave: SkipRun) -> None:
        """Count a point by the answer that it has already, or say who has it."""
        if leave.attempt:
            self._count(leave.attempt.outcome, leave.attempt.paused_s)
            self._skipped += 1
        else:
            self._unanswered += 1
            self._tell(f"{self._repeats[leave.run.key].point.line}  repeat {leave.run.key.repeat}\n    {leave.why}")

    def _count(self, kind: OutcomeKind | None, paused_s: float) -> None:
        """Count how a point ended. The times of a run that was paused are no answer."""
        self.kinds.append(str(kind))
        self._unanswered += kind == "ok" and paused_s > 0

    def _read_attempts(self, config_id: str) -> list[store.RunAttempt]:
        """Return the attempts at a configuration, read again only after another."""
        if config_id not in self._attempts:
            self._attempts[config_id] = store.list_attempts(self.folder / config_id)
        return self._attempts[config_id]

    def _left(self, runs: int, since_s: float) -> str:
        """Return how long this run and so many more may take, by those before; empty where there were none."""
        if not self.seconds:
            return ""
        each_s = statistics.median(self.seconds)
        return f"about {format_duration(max(each_s - since_s, 0.0) + runs * each_s)} left"

    def _measure(self, plan: SweepPlan, decision: StartRun, number: int, count: int) -> bool:
        """Measure a run when its turn comes; return whether it was still to be measured then."""
        requested, begin = self._request(decision.run), time.monotonic()
        line = describe_point(requested.spec, requested.config_id)

        def follow(run: Progress) -> None:
            done, more = number - 1 + (run.share or 0.0), count - number
            left = self._left(more, time.monotonic() - begin) or (run.left if more == 0 else "")
            self._follow(Progress(f"[{number}/{count}] {run.what}  {line}", done / count, left))

        with local_attempt.take_turn(requested, follow):
            self._attempts.pop(requested.config_id, None)  # others may have measured it meanwhile
            if next_run(plan, self.snapshot()) != decision:
                return False
            begin = time.monotonic()
            _, record = local_attempt.make_attempt(requested, self.folder, follow)
        self._attempts.pop(requested.config_id, None)
        self._corrections_by_neighbours.add(record)
        self.seconds.append(time.monotonic() - begin)
        self._count(record.outcome.kind, record.outcome.paused_s)
        what = "control" if requested.control else f"repeat {record.circumstance.repeat}"
        self._tell(f"[{number}/{count}] {line}  {what}\n    {describe_result(record)}")
        return True


def _plan_repeat(one: RequestedRepeat, kin: Siblings | None, retry: bool) -> PlannedRun:
    """Return one repeat of one point as the policy sees it: an answer holds on this machine in this environment. That
    of a trial holds wherever its search is gone on with, for its proposer has gone on from it."""
    environment = None
    if one.sweep.search is None:
        device = one.sweep.machines[one.key.machine].device or find_device_kind()
        environment = compute_environment_id(classify(device, one.point.devices_per_node))
    attempts = None if retry else one.sweep.rules.budget.attempts
    return build_planned_run(one.sweep, one.key, one.point, kin, attempts, environment)
