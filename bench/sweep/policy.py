"""What a sweep runs next: decided here alone, for local runs, packed allocations and submission. Pure.

A local run and an allocation go through their plan once, one decision at a time (`next_run`); submission takes all
decisions that can be taken now (`list_decisions`). Both come from `decide`, and nothing here reads, writes or asks the
time: the caller shows what there is (`Snapshot`) and carries out what is decided.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from bench.core.formatting import format_count
from bench.core.machine import Machine
from bench.core.quantities import RunQuantities
from bench.core.record import FINAL, Outcome, OutcomeKind
from bench.core.store import RunAttempt
from bench.predict.neighbours import UNCORRECTED, Correction
from bench.sweep.definition import RunKey, SweepDefinition, SweepPoint, Trial
from bench.sweep.pruning import (
    Siblings,
    Tried,
    find_infeasible_outcome,
    find_pruned_outcome,
    is_far_out_of_memory,
    is_to_confirm,
)

NEVER_RAN: frozenset[OutcomeKind] = frozenset({"pruned", "infeasible"})
"""Outcomes without a run: `pruned` by what other runs show, `infeasible` by a prediction."""
TOTAL_ATTEMPTS_FACTOR = 5
"""So many times the attempts allowed end a point, where the failures were not its own fault."""


class PlannedRun(NamedTuple):
    """One repeat of one point that is to have an answer."""

    key: RunKey
    kin: Siblings | None = None  # None: other runs say nothing about it
    prune: bool = True  # whether a record without a run is an answer
    attempts: int | None = None  # that it may have; None: any number
    limit_min: float = 0.0  # time of one attempt
    environment_id: str | None = None  # answers from other classes of environment do not count; None: all do
    point: SweepPoint | None = None  # with `machine`: its prediction is to be looked at
    machine: Machine | None = None
    reopened: bool = False  # it has an answer, and is to run all the same
    role: Literal["point", "confirm", "control"] = "point"


class TrialResult(NamedTuple):
    """A trial of a search, and what came of it."""

    trial: Trial
    outcome: OutcomeKind | None = None  # None: it has no answer yet
    quantities: RunQuantities | None = None  # of a run that ended well
    node_hours: float = 0.0  # of all attempts, as far as they say
    environment_id: str | None = None  # in which it has its answer


class Proposal(NamedTuple):
    """A point that a search asks for next."""

    point: SweepPoint
    values: dict[str, Any]
    why: str = ""
    sampler_state: dict[str, Any] = {}


class Proposer(Protocol):
    """What adds runs to a plan. Pure: the same results, the same proposal."""

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return what is to be tried next; None where the search is at its end."""
        ...


class SweepPlan(NamedTuple):
    """What is to be gone through, in order."""

    runs: Sequence[PlannedRun]
    control: PlannedRun | None = None  # run first and last, so that a drift of the machine shows
    confirm_answered: bool = False  # whether answers of earlier passes are to be confirmed too, not only those of this
    node_hours: float | None = None  # that may be spent; None: no limit
    proposer: Proposer | None = None  # adds runs once all are gone through


class StartRun(NamedTuple):
    """Run it now."""

    run: PlannedRun


class RecordWithoutRun(NamedTuple):
    """Record this outcome: it need not run."""

    run: PlannedRun
    outcome: Outcome


class PostponeRun(NamedTuple):
    """It is to run, but not now."""

    run: PlannedRun
    why: str


class SkipRun(NamedTuple):
    """It is not to run: it has an answer, somebody has it now, or its attempts are used up."""

    run: PlannedRun
    why: str
    attempt: RunAttempt | None = None  # that says so


class AddTrial(NamedTuple):
    """Write this down as the trial with this number, and add its run to the plan; a trial of this number that is there
    by then was not known when this was proposed."""

    proposal: Proposal
    number: int


Decision = StartRun | RecordWithoutRun | PostponeRun | SkipRun


class Snapshot(NamedTuple):
    """What folder, scheduler and clock show at one moment."""

    tried: Tried
    correction: Callable[[SweepPoint], Correction] = lambda point: UNCORRECTED  # of predictions, by measured neighbours
    busy: Callable[[RunKey], str] = lambda key: ""  # who has a point now, in words; empty: nobody
    submitted: Mapping[RunKey, int] = {}  # number of jobs that have had a point …
    failed_starts: Mapping[RunKey, Sequence[str]] = {}  # … and how those ended that failed before any attempt, in words
    left_s: float | None = None  # of the allocation; None: it has no end
    spent_node_hours: float = 0.0
    passed: Sequence[Decision] = ()  # of this pass, oldest first
    results: Callable[[], Sequence[TrialResult]] = lambda: ()  # of a search's trials, in order


def build_planned_run(
    sweep: SweepDefinition,
    key: RunKey,
    point: SweepPoint,
    kin: Siblings | None,
    attempts: int | None,
    environment_id: str | None = None,
) -> PlannedRun:
    """Return one repeat of a sweep's point, its prediction to be looked at."""
    return PlannedRun(
        key,
        kin,
        sweep.rules.prune,
        attempts,
        point.time_limit_min or 0.0,
        environment_id,
        point,
        sweep.machines[point.machine],
    )


def next_run(plan: SweepPlan, snapshot: Snapshot) -> Decision | None:
    """Return the next decision of a pass; None at its end.

    The control point comes first and last. A point that has just run out of memory for the first time runs once more,
    where that can save larger ones. A run that does not fit the time left waits, and a shorter one may still fit.
    """
    passed = snapshot.passed
    control = plan.control._replace(role="control") if plan.control and plan.runs else None
    if control and not passed:
        return _start_or_postpone(control, plan, snapshot)
    last = passed[-1] if passed else None
    if isinstance(last, StartRun) and last.run.role == "point" and _is_unconfirmed(last.run, snapshot):
        return _start_or_postpone(last.run._replace(role="confirm"), plan, snapshot)
    position = sum(decision.run.role == "point" for decision in passed)
    if position < len(plan.runs):
        return decide(plan.runs[position], plan, snapshot)
    if control and sum(decision.run.role == "control" for decision in passed) == 1:
        return _start_or_postpone(control, plan, snapshot)
    return None


def next_step(plan: SweepPlan, snapshot: Snapshot) -> Decision | AddTrial | None:
    """Return the next decision of a pass or, once all runs are gone through, what the plan's proposer adds."""
    if decision := next_run(plan, snapshot):
        return decision
    if plan.proposer is None:
        return None
    results = snapshot.results()
    proposal = plan.proposer.propose(results)
    return AddTrial(proposal, len(results)) if proposal else None


def list_decisions(plan: SweepPlan, snapshot: Snapshot) -> list[Decision]:
    """Return what is to be done about every run of a plan, in its order; the control point is its jobs' affair."""
    return [decide(run, plan, snapshot) for run in plan.runs]


def decide(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot) -> Decision:
    """Return what is to be done about one run of a plan."""
    if skip := find_skip(run, plan, snapshot):
        return skip
    if run.prune and not _is_to_reopen(run, plan, snapshot, _list_recorded(run, snapshot)):
        outcome = find_pruned_outcome(run.kin, snapshot.tried) if run.kin else None
        if outcome is None and run.point and run.machine:
            correction = snapshot.correction(run.point)
            outcome = find_infeasible_outcome(run.point.spec, run.point.forecast, run.machine, correction)
        if outcome:
            return RecordWithoutRun(run, outcome)
    return _start_or_postpone(run, plan, snapshot)


def find_skip(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot) -> SkipRun | None:
    """Return why nothing is to be done about a run; None if something is."""
    done = _list_recorded(run, snapshot)
    confirm = _is_to_reopen(run, plan, snapshot, done)
    if not run.reopened and not confirm and (final := _find_final(run, snapshot, done)):
        return SkipRun(run, "has its answer already", final)
    if reason := snapshot.busy(run.key):
        return SkipRun(run, reason)
    if run.attempts is None or confirm:
        return None
    submitted, failed_starts = snapshot.submitted.get(run.key, 0), snapshot.failed_starts.get(run.key, ())
    reason = explain_given_up(done, run.attempts, submitted, failed_starts)
    return SkipRun(run, reason, done[-1] if done else None) if reason else None


def find_answer(done: Sequence[RunAttempt], *, prune: bool) -> RunAttempt | None:
    """Return the attempt that answers a point for good: a real run before one that needed none, and never one with an
    injected fault. A run that was paused has no valid times, and runs again."""
    accept = FINAL if prune else FINAL - NEVER_RAN  # where everything is to be measured, real runs alone
    answers = [
        attempt
        for attempt in done
        if attempt.outcome in accept and not attempt.drill and not (attempt.outcome == "ok" and attempt.paused_s)
    ]
    return next((attempt for attempt in answers if attempt.outcome not in NEVER_RAN), next(iter(answers), None))


def explain_given_up(
    done: Sequence[RunAttempt], limit: int, submitted: int = 0, failed_starts: Sequence[str] = ()
) -> str:
    """Return why a point may have no further attempt; empty if it may. Preemption, cancellation, a node that failed, a
    full disk, a pause and an injected fault are not its fault, but have an end too; what never ran was no attempt. A
    job that failed before it began an attempt (`failed_starts`) counts as one: what it failed of is the same the next
    time."""
    own = [attempt for attempt in done if _is_own_fault(attempt)]
    if len(done) >= TOTAL_ATTEMPTS_FACTOR * limit or (len(own) >= limit and not failed_starts):
        last = f"paused for {done[-1].paused_s:g} s" if done[-1].outcome == "ok" else done[-1].reason
        return f"after {format_count(len(done), 'attempt')}; the last: {last}"
    if len(own) + len(failed_starts) >= limit:
        jobs = f"{len(failed_starts)} job{'s' if len(failed_starts) > 1 else ''} before any attempt"
        return f"failed {len(own)} times, and {jobs}; the last: {failed_starts[-1]}"
    if submitted >= TOTAL_ATTEMPTS_FACTOR * limit:
        return f"{submitted} jobs had it, and none of them came to an answer"
    return ""


def _is_own_fault(attempt: RunAttempt) -> bool:
    never = attempt.outcome in ("preempted", "cancelled", "node_failure", *NEVER_RAN)
    return not never and not attempt.disk_full and not attempt.drill and not attempt.paused_s


def _list_recorded(run: PlannedRun, snapshot: Snapshot) -> list[RunAttempt]:
    """Return the attempts at a run that have a record, oldest first."""
    place = run.key.repeat, run.key.machine
    return [a for a in snapshot.tried(run.key.config_id) if a.outcome and (a.repeat, a.machine) == place]


def _find_final(run: PlannedRun, snapshot: Snapshot, done: Sequence[RunAttempt]) -> RunAttempt | None:
    """Return the attempt that answers a run in its environment, but no prediction that neighbours have taken back."""
    in_environment = [a for a in done if run.environment_id is None or a.environment_id in (None, run.environment_id)]
    valid = [a for a in in_environment if a.outcome != "infeasible" or not _is_prediction_revoked(run, snapshot)]
    return find_answer(valid, prune=run.prune)


def _is_prediction_revoked(run: PlannedRun, snapshot: Snapshot) -> bool:
    """Whether a point that a prediction called infeasible is to run after all."""
    if run.point is None or run.machine is None:
        return False
    return not is_far_out_of_memory(run.point.forecast, run.machine, snapshot.correction(run.point))


def _is_to_reopen(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot, done: Sequence[RunAttempt]) -> bool:
    """Whether a run has an answer from an earlier pass that is to be confirmed."""
    if not plan.confirm_answered or run.reopened or not any(attempt.outcome == "oom" for attempt in done):
        return False
    final = _find_final(run, snapshot, done)
    return final is not None and final.outcome == "oom" and _is_unconfirmed(run, snapshot)


def _is_unconfirmed(run: PlannedRun, snapshot: Snapshot) -> bool:
    return run.prune and run.kin is not None and is_to_confirm(run.kin, snapshot.tried)


def _start_or_postpone(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot) -> StartRun | PostponeRun:
    """Start a run unless money or time is short; the time of the last control point is not for others."""
    spent = snapshot.spent_node_hours
    if plan.node_hours is not None and spent >= plan.node_hours:
        return PostponeRun(run, f"{spent:.1f} of {plan.node_hours:g} node-hours are spent")
    if snapshot.left_s is not None:
        kept_min = plan.control.limit_min if plan.control and run.role != "control" else 0.0
        left_s = snapshot.left_s - 60 * kept_min
        if 60 * run.limit_min > left_s:
            left = f"{left_s / 60:.1f} min are left"
            return PostponeRun(run, f"may take {run.limit_min:g} min, and {left}: it waits for another job")
    return StartRun(run)
