"""Measure the points (configurations) of a sweep on this machine, one after the other."""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.core import store
from bench.core.errors import UserError
from bench.core.formatting import (
    QUIET_SEARCH_REMEDY,
    describe_point,
    describe_quiet_remedy,
    describe_result,
    format_count,
    format_duration,
    format_number,
)
from bench.core.quantities import compute_work, derive_quantities, was_busy
from bench.core.record import FINAL, Outcome, OutcomeKind, RunRecord
from bench.core.spec import RunSpec
from bench.core.study import SearchSection
from bench.core.terminal import Progress
from bench.measure.environment import classify, compute_environment_id, find_device_kind
from bench.sweep import definition, local_attempt, lost
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.definition import RequestedRepeat, RequestedRun, RunKey, SweepDefinition, Trial
from bench.sweep.inputs import add_host_memory
from bench.sweep.local_attempt import SweepSupervisor
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
    TrialResult,
    build_planned_run,
    find_skip,
    next_run,
    next_step,
)
from bench.sweep.pruning import Siblings, find_siblings
from bench.sweep.search.verdict import SearchOutlook, describe_best
from bench.sweep.snapshot import TrialReader, find_rival_attempt


class LocalSearch(NamedTuple):
    """A search that adds trials (proposed configurations) to a sweep while it runs."""

    sweep: SweepDefinition
    proposer: Proposer
    foresee: Callable[[Sequence[TrialResult], TrialResult], SearchOutlook]
    """Function that returns the trials and the time that the search still needs, from the results so far and the trial
    that starts now."""

    @property
    def section(self) -> SearchSection:
        """Settings of the search, such as its objective."""
        assert self.sweep.search and self.sweep.search.study.search
        return self.sweep.search.study.search


class RunPosition(NamedTuple):
    """Position of a run in its sweep or search, and the expected time until the sweep or search ends."""

    label: str
    done: int  # runs before it
    runs: int  # all runs
    run_s: float | None = None  # expected time of this run; None if unknown
    after_s: float = 0.0  # expected time of all further runs
    bound: str = "about"  # "at most" if a search may end earlier

    def describe_left(self, since_s: float) -> str:
        """Return a text with the expected time until the sweep ends, if this run began `since_s` seconds ago. Empty if
        the time is unknown."""
        if self.run_s is None:
            return ""
        return f"{self.bound} {format_duration(max(self.run_s - since_s, 0.0) + self.after_s)} left"


class SweepResult(NamedTuple):
    """Numbers of a sweep's points by outcome."""

    folder: Path
    outcomes: Counter[str]  # number of points by outcome, including points with an answer from before this call
    skipped: int  # points that had an answer, a final outcome, before this call
    unanswered: int = 0  # points without a valid answer: skipped without an outcome, postponed, or paused
    attempts: frozenset[Path] = frozenset()  # folders of the attempts whose outcomes are counted
    points: frozenset[tuple[str, str]] = frozenset()  # config_id and machine of each point, trials of a search included

    @property
    def good(self) -> bool:
        """Return True if every point has a final outcome and all of these outcomes are `ok`."""
        return set(self.outcomes) == {"ok"} and not self.unanswered


class BestSoFar:
    """Keeps the fastest runs of a sweep so far. Two runs are compared only if their specs differ in nothing but engine
    and batch."""

    def __init__(self) -> None:
        self._best: dict[str, tuple[float, RunRecord]] = {}  # the fastest run and its samples/s

    def add(self, record: RunRecord) -> str:
        """Add one run. Return a text about the fastest comparable run so far: its engine, micro-batch and samples per
        second.

        Comparable runs differ only in engine and batch. The text is empty if this is the first of them. The speed of a
        run on a busy machine is ignored.
        """
        found = derive_quantities(record)
        rate = found.get("samples_per_s") if found else None
        shared = record.spec.model_dump_json(exclude={"engine", "batch"})
        before = self._best.get(shared)
        if rate and not was_busy(record):
            self._best[shared] = max(before or (rate, record), (rate, record), key=lambda one: one[0])
        if before is None:
            return ""
        best_rate, best = self._best[shared]
        shown = f"{format_number(best_rate, 4)} samples/s"
        return f"best so far: {best.spec.engine.name} micro {best.spec.batch.micro}, {shown}"


class LocalSweep:
    """A sweep that runs on this machine. It carries out the decisions of the module `policy` and reports the time
    left."""

    def __init__(
        self,
        folder: Path,
        repeats: list[RequestedRepeat],
        *,
        retry: bool,
        tell: Callable[[str], None],
        follow: Callable[[Progress], None],
        describe: Callable[[RunRecord], str] = describe_result,
        search: LocalSearch | None = None,
    ) -> None:
        """`retry` starts points even if they already had as many failed attempts as their budget allows.

        `tell` is called with a text when a point ends, `follow` with the progress of the current run. `describe`
        returns a run's result in one line. `search` proposes further points.
        """
        self.folder, self._tell, self._follow, self._describe, self._search = folder, tell, follow, describe, search
        attempts = search.sweep.rules.budget.attempts if search else 0
        self._trials = TrialReader(folder, self._read_attempts, attempts)
        self._repeats = {one.key: one for one in repeats}
        kin = find_siblings((one.key, one.point.spec) for one in repeats)
        self.runs = [_plan_repeat(one, kin[one.key[:2]], retry) for one in repeats]
        self._attempts: dict[str, list[store.RunAttempt]] = {}
        config_ids = {one.key.config_id for one in repeats}
        tried = (attempt for config_id in config_ids for attempt in self._read_attempts(config_id))
        self._corrections_by_neighbours = MeasuredCorrections((one.point for one in repeats), tried)
        self._control: RequestedRun | None = None
        self._supervisor: SweepSupervisor | None = None
        self._passed: list[Decision] = []
        self._best = BestSoFar()
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self._skipped = self._unanswered = 0
        self._counted: list[Path] = []

    def run(self) -> SweepResult:
        """Measure the points that have no answer (final outcome) from an earlier run. Return the outcomes of all
        points."""
        plan, number = self._plan(), 0
        try:
            while decision := next_step(plan, self.snapshot()):
                match decision:
                    case AddTrial():
                        plan = self._add_trial(plan, decision)
                        continue
                    case StartRun(run):
                        position = self._find_position(run.key, number, max(number + 1, len(plan.runs)))
                        if not self._measure(plan, decision, position):
                            continue  # another process has changed the state of this point: decide again
                        number += 1
                    case RecordWithoutRun(run, outcome):
                        self._conclude(run, outcome)
                    case SkipRun():
                        self._skip(decision)
                    case PostponeRun():
                        self._unanswered += 1
                self._passed.append(decision)
        finally:
            if self._supervisor:
                self._supervisor.close()
        counted, points = frozenset(self._counted), frozenset((key.config_id, key.machine) for key in self._repeats)
        return SweepResult(self.folder, Counter(self.kinds), self._skipped, self._unanswered, counted, points)

    def _plan(self) -> SweepPlan:
        """Return a plan of the points that have no answer (no final outcome) yet. The study's first control point is
        added: a reference configuration whose runs show a drift of the machine.

        Points that have an answer are counted as skipped.
        """
        skips = self._list_skips()
        left = [run for run, leave in zip(self.runs, skips, strict=True) if not leave]
        if left and (answers := _select_answers(skips)):
            shown = f"{len(answers)} of {format_count(len(self.runs), 'run')} already had a result, {len(left)} to run"
            self._tell("; ".join(filter(None, [shown, self.describe_busy(answers.values())])))
        for leave in filter(None, skips):
            self._skip(leave)
        # A local sweep has no allocations: the control point of the first shape serves for all.
        sweep = self._repeats[left[0].key].sweep if left else None
        if sweep and sweep.controls:
            self._control = sweep.requested(sweep.controls[0], 0, control=True)
        control = PlannedRun(self._control.key) if self._control else None
        return SweepPlan(left, control, proposer=self._search.proposer if self._search else None)

    def _list_skips(self) -> list[SkipRun | None]:
        """Return, for each run, the decision to skip it; None for a run that has to be measured."""
        everything, snapshot = SweepPlan(self.runs), self.snapshot()
        return [find_skip(run, everything, snapshot) for run in self.runs]

    def find_answers(self) -> dict[RunKey, store.RunAttempt]:
        """Return, by run key, the attempts that gave a final outcome before this sweep."""
        return _select_answers(self._list_skips())

    def describe_busy(self, answers: Iterable[store.RunAttempt]) -> str:
        """Return a text that says how many of the attempts `answers` ran on a busy machine, and how to measure them
        again. Empty if none did."""
        busy = sum(_read_busy(one.folder) for one in answers if one.outcome == "ok")
        if not busy or (self._search and compute_work(self._search.section.objective, 1, 1.0, 1) is None):
            return ""
        made = f"{format_count(busy, 'answer')} {'was' if busy == 1 else 'were'} made on a busy machine"
        if self._search:
            return f"{made}: the search relies less on them; {QUIET_SEARCH_REMEDY}"
        # Planned repeats count, too: at the end of this sweep the same remedy is printed with all of its runs.
        numbers = [one.repeat for run in self.runs for one in self._read_attempts(run.key.config_id)]
        repeats = 1 + max([*numbers, *(run.key.repeat for run in self.runs)])
        return f"{made}: times of such runs decide nothing; {describe_quiet_remedy(repeats)}"

    def _add_trial(self, plan: SweepPlan, added: AddTrial) -> SweepPlan:
        """Write a proposed trial to the study's folder, and return the plan with this trial added.

        If another process has already written a trial with this number, the plan is returned unchanged. The next
        proposal then takes that trial into account.
        """
        assert self._search
        if not definition.write_trial(self.folder, Trial(number=added.number, **added.proposal._asdict())):
            return plan
        point = added.proposal.point
        one = RequestedRepeat(RunKey(point.config_id, point.machine, 0), self._search.sweep, point)
        self._repeats[one.key] = one
        self._corrections_by_neighbours.add_point(point)
        return plan._replace(runs=[*plan.runs, _plan_repeat(one, None, retry=False)])

    def snapshot(self) -> Snapshot:
        """Return the current state of the study's folder, and the decisions of this sweep so far."""
        return Snapshot(
            self._read_attempts,
            self._corrections_by_neighbours.correction,
            busy=self._find_rival,
            passed=self._passed,
            results=self._trials.read_results,
        )

    def _find_rival(self, key: RunKey) -> str:
        """Return the reason why a point must not start: another process is measuring it. Empty if the point may start.

        The text is always empty if the launcher's lock is used, since local runs then wait for each other.
        """
        if local_attempt.waits(self._repeats[key].request()):
            return ""
        return "is under way in another process" if find_rival_attempt(self.folder / key.config_id, key) else ""

    def _request(self, run: PlannedRun) -> RequestedRun:
        """Return the request for one attempt at a run."""
        if run.role == "control" and self._control:
            return self._control
        return self._repeats[run.key].request()

    def _conclude(self, run: PlannedRun, outcome: Outcome) -> None:
        """Write a record for a point that need not run, and print its outcome: `pruned` or `infeasible`."""
        lost.write_outcome(self.folder, self._request(run), outcome)
        self._attempts.pop(run.key.config_id, None)
        self.kinds.append(outcome.kind)
        line = self._repeats[run.key].point.line
        self._tell(f"{line}  repeat {run.key.repeat}\n    {outcome.kind}: {outcome.reason}")

    def _skip(self, leave: SkipRun) -> None:
        """Count a skipped point by its existing outcome. If it has no outcome, count it as unanswered and print why it
        is skipped."""
        if leave.attempt:
            self._count(leave.attempt.folder, leave.attempt.outcome, leave.attempt.paused_s)
            self._skipped += 1
        else:
            self._unanswered += 1
            self._tell(f"{self._repeats[leave.run.key].point.line}  repeat {leave.run.key.repeat}\n    {leave.why}")

    def _count(self, folder: Path, kind: OutcomeKind | None, paused_s: float) -> None:
        """Count the outcome of the attempt in `folder`. An `ok` run that was paused also counts as unanswered, because
        its times are not valid."""
        self.kinds.append(str(kind))
        self._counted.append(folder)
        self._unanswered += kind == "ok" and paused_s > 0

    def _read_attempts(self, config_id: str) -> list[store.RunAttempt]:
        """Return the attempts at a configuration. The list is cached until this sweep makes a new attempt."""
        if config_id not in self._attempts:
            self._attempts[config_id] = store.list_attempts(self.folder / config_id)
        return self._attempts[config_id]

    def _find_position(self, key: RunKey, done: int, count: int) -> RunPosition:
        """Return the position of a run in this sweep. `done` is the number of runs before it and `count` the number of
        all planned runs. For a trial of a search, return its position in the whole search instead, which may have begun
        in an earlier call."""
        results = self._trials.read_results() if self._search else []
        current = next((one for one in results if one.trial.point.config_id == key.config_id), None)
        if self._search and current:
            rest, number = self._search.foresee(results, current), current.trial.number + 1
            label = f"trial {number} of {'' if rest.bound == 'exactly' else f'{rest.bound} '}{rest.trials}"
            after_s = (rest.left_s or 0.0) - (rest.run_s or 0.0)
            done = sum(one.outcome is not None for one in results)
            bound = "at most" if rest.bound == "at most" else "about"
            return RunPosition(label, done, done + rest.left, rest.run_s, after_s, bound)
        label, each_s = f"{done + 1}/{count}", statistics.median(self.seconds) if self.seconds else None
        return RunPosition(label, done, count, each_s, (count - done - 1) * (each_s or 0.0))

    def _find_supervisor(self, requested: RequestedRun) -> SweepSupervisor | None:
        """Return the supervisor process that runs all attempts of the sweep. Return None if the launcher is not
        `local`: every other launcher starts a new supervisor for each attempt."""
        if requested.circumstance.launcher.get("name") != "local":
            return None
        if self._supervisor is None:
            device = requested.circumstance.machine.device or find_device_kind()
            specs = [RunSpec.model_validate(one.point.spec) for one in self._repeats.values()]
            self._supervisor = SweepSupervisor(device, [requested.spec, *specs])
        return self._supervisor

    def _measure(self, plan: SweepPlan, decision: StartRun, position: RunPosition) -> bool:
        """Wait for other local runs, then measure a run and return True. Return False without measuring if the run is
        no longer needed after the wait. `position` is shown to the user together with the progress of the run."""
        requested, begin = self._request(decision.run), time.monotonic()
        repeat = "control" if requested.control else f"repeat {requested.circumstance.repeat}"
        known = self._repeats.get(decision.run.key)
        line = known.point.line if known else describe_point(requested.spec, requested.config_id)
        subject = f"[{position.label}] {line}  {repeat}"

        def follow(run: Progress) -> None:
            is_last = position.done + 1 == position.runs
            left = position.describe_left(time.monotonic() - begin) or (run.left if is_last else "")
            self._follow(Progress(run.what, (position.done + (run.share or 0.0)) / position.runs, left, subject))

        with local_attempt.take_turn(requested, follow) as note:
            self._attempts.pop(requested.config_id, None)  # another process may have measured it meanwhile
            if next_run(plan, self.snapshot()) != decision:
                return False
            begin = time.monotonic()  # without the wait for the lock, for the estimate of the time left
            follow(Progress("starting"))
            supervisor = self._find_supervisor(requested)
            made, record = local_attempt.make_attempt(requested, self.folder, note, supervisor)
        self._attempts.pop(requested.config_id, None)
        self._corrections_by_neighbours.add(record)
        self.seconds.append(time.monotonic() - begin)
        self._count(made, record.outcome.kind, record.outcome.paused_s)
        if self._search:
            best = describe_best(self._search.section, self._trials.read_results())
        else:
            best = self._best.add(record)
        lines = [subject, self._describe(record), best]
        self._tell("\n    ".join(filter(None, lines)))
        return True


def _select_answers(skips: Iterable[SkipRun | None]) -> dict[RunKey, store.RunAttempt]:
    """Return the attempts whose final outcome is the reason for skipping a run, by the key of that run. Runs that are
    skipped for another reason, such as used-up attempts, are not included."""
    known = {leave.run.key: leave.attempt for leave in skips if leave and leave.attempt}
    return {key: attempt for key, attempt in known.items() if attempt.outcome in FINAL}


def _read_busy(folder: Path) -> bool:
    """Return whether the run in a folder was measured on a busy machine. False also if its record cannot be read."""
    with contextlib.suppress(OSError, UserError):
        return was_busy(store.read_record(folder / store.RECORD))
    return False


def _plan_repeat(one: RequestedRepeat, kin: Siblings | None, retry: bool) -> PlannedRun:
    """Return one repeat of a point as a `PlannedRun`, from which the module `policy` decides whether the repeat starts.
    `kin` are the configurations that differ from the point in the micro-batch alone. If `kin` is None, other
    configurations do not affect the decision. With `retry`, any number of failed attempts is allowed.

    A final outcome from an earlier run counts only if it was measured in the current environment (device and software
    versions). For a trial of a search, a final outcome from any environment counts, because later trials were proposed
    from it.
    """
    environment, machine = None, add_host_memory(one.sweep.machines[one.key.machine], one.sweep.launcher["name"])
    if one.sweep.search is None:
        device = machine.device or find_device_kind()
        environment = compute_environment_id(classify(device, one.point.devices_per_node))
    attempts = None if retry else one.sweep.rules.budget.attempts
    return build_planned_run(one.sweep, one.key, one.point, kin, attempts, environment, machine)
