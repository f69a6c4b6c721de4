"""Decide which run of a sweep starts next: in a local sweep, in an allocation that runs several points
(configurations), or when points are submitted to a scheduler. No side effects.

A local sweep and an allocation take one decision at a time with `next_run`, and go through their plan once. A
submission takes all decisions that are possible now, with `list_decisions`. Both call `decide`. No function here reads
or writes files or reads the clock. The caller passes the state (`Snapshot`) and carries out the decision.
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
"""Outcomes of points that were not run. `pruned` follows from runs of smaller micro-batches, `infeasible` from a
prediction."""
TOTAL_ATTEMPTS_FACTOR = 5
"""Maximum number of attempts at a point, as a multiple of the number of failures that it may have. Only failures with a
cause in the point itself count as failures. In contrast, all attempts count here, also those ended by preemption."""


class PlannedRun(NamedTuple):
    """One repeat of one point (configuration) in a plan, with the rules that decide whether it starts."""

    key: RunKey
    kin: Siblings | None = None  # points that differ in the micro-batch alone; None: other runs never prune this one
    prune: bool = True  # whether an outcome without a run (`pruned`, `infeasible`) counts as an answer
    attempts: int | None = None  # failures allowed; None: any number
    limit_min: float = 0.0  # time limit of one attempt, in minutes; 0: none
    environment_id: str | None = None  # environment whose answers count; None: answers of every environment count
    point: SweepPoint | None = None  # if point and machine are given, a prediction may make the run infeasible
    machine: Machine | None = None
    reopened: bool = False  # the run starts although it has an answer
    role: Literal["point", "confirm", "control"] = "point"


class TrialResult(NamedTuple):
    """A trial (a point that a search has proposed), with its outcome and measured values."""

    trial: Trial
    outcome: OutcomeKind | None = None  # None: no answer yet
    quantities: RunQuantities | None = None  # measured values of a run that ended `ok`
    node_hours: float = 0.0  # of all attempts whose times are known
    environment_id: str | None = None  # environment of the run that gave the answer


class Proposal(NamedTuple):
    """The next point that a search proposes, with its values by dimension of the search space."""

    point: SweepPoint
    values: dict[str, Any]
    why: str = ""
    sampler_state: dict[str, Any] = {}


class Proposer(Protocol):
    """Proposes the trials of a search. No side effects: equal results lead to equal proposals."""

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the next trial; None if the search has ended."""
        ...


class SweepPlan(NamedTuple):
    """Runs of a sweep, in the order in which decisions on them are taken."""

    runs: Sequence[PlannedRun]
    control: PlannedRun | None = None  # runs before the first and after the last point, to show a drift of the machine
    confirm_answered: bool = False  # also run points again whose out-of-memory answer is from an earlier pass
    node_hours: float | None = None  # budget of the study; None: no limit
    proposer: Proposer | None = None  # proposes further runs after the last planned run


class StartRun(NamedTuple):
    """Decision: start this run now."""

    run: PlannedRun


class RecordWithoutRun(NamedTuple):
    """Decision: write a record with this outcome without running the point."""

    run: PlannedRun
    outcome: Outcome


class PostponeRun(NamedTuple):
    """Decision: do not start the run now. It may start later, for example in another job."""

    run: PlannedRun
    why: str


class SkipRun(NamedTuple):
    """Decision: do not start the run. It has an answer (a final outcome), another process runs it now, or its allowed
    attempts are used up."""

    run: PlannedRun
    why: str
    attempt: RunAttempt | None = None  # the attempt because of which the run is skipped; None if there is none


class AddTrial(NamedTuple):
    """Decision: write the proposal as the trial with this number, and add its run to the plan.

    If another process has already written a trial with this number, the proposal is dropped, because it was made
    without knowing that trial.
    """

    proposal: Proposal
    number: int


Decision = StartRun | RecordWithoutRun | PostponeRun | SkipRun


class Snapshot(NamedTuple):
    """State of the study's folder, the scheduler and the clock at one point in time."""

    tried: Tried
    correction: Callable[[SweepPoint], Correction] = lambda point: UNCORRECTED  # by measured neighbours
    busy: Callable[[RunKey], str] = lambda key: ""  # reason why a point cannot start now; empty if it can
    submitted: Mapping[RunKey, int] = {}  # number of jobs submitted so far, by point
    failed_starts: Mapping[RunKey, Sequence[str]] = {}  # ends of jobs that failed before any attempt, in words
    left_s: float | None = None  # seconds until the allocation ends; None: no end
    spent_node_hours: float = 0.0  # of the study, compared with the plan's budget
    passed: Sequence[Decision] = ()  # decisions of this pass so far, oldest first
    results: Callable[[], Sequence[TrialResult]] = lambda: ()  # results of a search's trials, in order


def build_planned_run(
    sweep: SweepDefinition,
    key: RunKey,
    point: SweepPoint,
    kin: Siblings | None,
    attempts: int | None,
    environment_id: str | None = None,
    machine: Machine | None = None,
) -> PlannedRun:
    """Return one repeat of a sweep's point as a `PlannedRun`. It includes the point and its machine, so that the module
    `policy` can decide from the predicted memory that the run is infeasible.

    `kin` has the configurations that differ from the point in the micro-batch alone. `attempts` is the number of
    failures after which the run is given up. `environment_id` identifies an environment (device and software versions).
    Only results from this environment count as answers. If `environment_id` is None, results from all environments
    count. `machine` replaces the machine of the sweep's definition.
    """
    return PlannedRun(
        key,
        kin,
        sweep.rules.prune,
        attempts,
        point.time_limit_min or 0.0,
        environment_id,
        point,
        machine or sweep.machines[point.machine],
    )


def next_run(plan: SweepPlan, snapshot: Snapshot) -> Decision | None:
    """Return the decision on the next run of a plan: start, postpone or skip it, or record an outcome without running
    it. None at the plan's end. A plan is gone through once.

    The control point, a reference configuration that shows a drift of the machine, runs first and last. If a point runs
    out of memory for the first time, it may run a second time immediately. The second run confirms the result, so that
    larger micro-batches can be skipped. A run that does not fit into the time left is postponed; a shorter run may
    still fit.
    """
    passed = snapshot.passed
    control = plan.control._replace(role="control") if plan.control and plan.runs else None
    if control and not passed:
        return _start_or_postpone(control, plan, snapshot)
    last = passed[-1] if passed else None
    if isinstance(last, StartRun) and last.run.role == "point" and _is_unconfirmed(last.run, snapshot):
        return _start_or_postpone(last.run._replace(role="confirm"), plan, snapshot)
    # Runs of the control point and confirmations are extra decisions: they do not advance the position.
    position = sum(decision.run.role == "point" for decision in passed)
    if position < len(plan.runs):
        return decide(plan.runs[position], plan, snapshot)
    if control and sum(decision.run.role == "control" for decision in passed) == 1:
        return _start_or_postpone(control, plan, snapshot)
    return None


def next_step(plan: SweepPlan, snapshot: Snapshot) -> Decision | AddTrial | None:
    """Return the decision on the next run of a plan, from `next_run`. After the last planned run, return a new trial
    from the plan's proposer, which chooses the trials of a search. None if there is no proposer or it proposes nothing
    more."""
    if decision := next_run(plan, snapshot):
        return decision
    if plan.proposer is None:
        return None
    results = snapshot.results()
    proposal = plan.proposer.propose(results)
    return AddTrial(proposal, len(results)) if proposal else None


def list_decisions(plan: SweepPlan, snapshot: Snapshot) -> list[Decision]:
    """Return the decision for every run of a plan, in the plan's order. Runs of the control point, a reference
    configuration that shows a drift of the machine, are not included, because each job adds them itself."""
    return [decide(run, plan, snapshot) for run in plan.runs]


def decide(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot) -> Decision:
    """Return the decision for one run of a plan. The options are tried in this order: skip the run, record an outcome
    without running it, postpone it, start it."""
    if skip := find_skip(run, plan, snapshot):
        return skip
    if run.prune and not _is_to_reopen(run, plan, snapshot, _list_recorded(run, snapshot)):
        outcome = find_pruned_outcome(run.kin, snapshot.tried) if run.kin else None
        if outcome is None and run.point and run.machine:
            outcome = find_infeasible_outcome(run.point, run.machine, snapshot.correction(run.point))
        if outcome:
            return RecordWithoutRun(run, outcome)
    return _start_or_postpone(run, plan, snapshot)


def find_skip(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot) -> SkipRun | None:
    """Return the decision to skip a run, with its reason; None if the run is not skipped. There are three reasons: the
    run has a final outcome, another process or job is running it, or its allowed attempts are used up."""
    done = _list_recorded(run, snapshot)
    confirm = _is_to_reopen(run, plan, snapshot, done)
    if not run.reopened and not confirm and (final := _find_final(run, snapshot, done)):
        return SkipRun(run, "already has a final result", final)
    if reason := snapshot.busy(run.key):
        return SkipRun(run, reason)
    if run.attempts is None or confirm:
        return None
    submitted, failed_starts = snapshot.submitted.get(run.key, 0), snapshot.failed_starts.get(run.key, ())
    reason = explain_given_up(done, run.attempts, submitted, failed_starts)
    return SkipRun(run, reason, done[-1] if done else None) if reason else None


def find_answer(done: Sequence[RunAttempt], *, prune: bool) -> RunAttempt | None:
    """Return the attempt whose outcome is the final answer of a point (configuration); None if there is none. An
    attempt that ran takes precedence over an outcome without a run (`pruned` or `infeasible`). Outcomes without a run
    count only if `prune` is set.

    An attempt with an injected fault is no answer. Nor is an `ok` attempt that was paused, since its times are not
    valid.
    """
    accept = FINAL if prune else FINAL - NEVER_RAN
    answers = [a for a in done if a.outcome in accept and not a.drill and not (a.outcome == "ok" and a.paused_s)]
    return next((attempt for attempt in answers if attempt.outcome not in NEVER_RAN), next(iter(answers), None))


def explain_given_up(
    done: Sequence[RunAttempt], limit: int, submitted: int = 0, failed_starts: Sequence[str] = ()
) -> str:
    """Return the reason why a point (configuration) gets no further attempt; empty if it gets another attempt.

    `done` are the point's attempts with a record. `limit` is the maximum number of failures with a cause in the point
    itself. Causes outside of the point are preemption, cancellation, a failed node, a full disk, a machine that stayed
    busy, a pause and an injected fault. Each job in `failed_starts` counts as one more failure in the point itself.
    These jobs failed before they began an attempt, and would fail again.

    Two other numbers may be at most `TOTAL_ATTEMPTS_FACTOR` times `limit`: the number of all attempts, whatever their
    causes, and the number of jobs `submitted` with this point.
    """
    own = [attempt for attempt in done if _is_own_fault(attempt)]
    if len(done) >= TOTAL_ATTEMPTS_FACTOR * limit or (len(own) >= limit and not failed_starts):
        last = f"paused for {done[-1].paused_s:g} s" if done[-1].outcome == "ok" else done[-1].reason
        return f"after {format_count(len(done), 'attempt')}; the last: {last}"
    if len(own) + len(failed_starts) >= limit:
        jobs = f"{len(failed_starts)} job{'s' if len(failed_starts) > 1 else ''} failed before an attempt"
        return f"{len(own)} attempts failed, and {jobs}; the last: {failed_starts[-1]}"
    if submitted >= TOTAL_ATTEMPTS_FACTOR * limit:
        return f"{submitted} jobs were submitted for this point, and none left a final result"
    return ""


def _is_own_fault(attempt: RunAttempt) -> bool:
    """Return whether an attempt failed for a cause in the point (its configuration) itself."""
    # The causes must match those named in `explain_given_up`.
    never = attempt.outcome in ("preempted", "cancelled", "node_failure", *NEVER_RAN)
    return not never and not attempt.excused and not attempt.drill and not attempt.paused_s


def _list_recorded(run: PlannedRun, snapshot: Snapshot) -> list[RunAttempt]:
    """Return the attempts at a run that have a record, oldest first."""
    place = run.key.repeat, run.key.machine
    return [a for a in snapshot.tried(run.key.config_id) if a.outcome and (a.repeat, a.machine) == place]


def _find_final(run: PlannedRun, snapshot: Snapshot, done: Sequence[RunAttempt]) -> RunAttempt | None:
    """Return the final answer of a run in its environment (its device and software versions); None if it has none.

    The outcome `infeasible` rests on a prediction. It is no answer if measured runs of similar points have since
    changed that prediction.
    """
    in_environment = [a for a in done if run.environment_id is None or a.environment_id in (None, run.environment_id)]
    valid = [a for a in in_environment if a.outcome != "infeasible" or not _is_prediction_revoked(run, snapshot)]
    return find_answer(valid, prune=run.prune)


def _is_prediction_revoked(run: PlannedRun, snapshot: Snapshot) -> bool:
    """Return whether a point recorded as infeasible must run after all, because measured runs have changed the
    prediction."""
    if run.point is None or run.machine is None:
        return False
    return not is_far_out_of_memory(run.point, run.machine, snapshot.correction(run.point))


def _is_to_reopen(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot, done: Sequence[RunAttempt]) -> bool:
    """Return whether a run has to start again to confirm an out-of-memory answer that was recorded earlier."""
    if not plan.confirm_answered or run.reopened or not any(attempt.outcome == "oom" for attempt in done):
        return False
    final = _find_final(run, snapshot, done)
    return final is not None and final.outcome == "oom" and _is_unconfirmed(run, snapshot)


def _is_unconfirmed(run: PlannedRun, snapshot: Snapshot) -> bool:
    return run.prune and run.kin is not None and is_to_confirm(run.kin, snapshot.tried)


def explain_spent(spent: float, budget: float | None) -> str:
    """Return a text if these node-hours use up a study's budget; empty if they do not, or without a budget."""
    return "" if budget is None or spent < budget else f"the budget is spent: {spent:.3g} of {budget:g} node-hours"


def _start_or_postpone(run: PlannedRun, plan: SweepPlan, snapshot: Snapshot) -> StartRun | PostponeRun:
    """Return the decision to start a run if the budget and the time left suffice, else the decision to postpone it.

    Of the time left, enough is reserved for the last run of the control point, which is measured repeatedly to detect
    drift.
    """
    if reason := explain_spent(snapshot.spent_node_hours, plan.node_hours):
        return PostponeRun(run, reason)
    if snapshot.left_s is not None:
        kept_min = plan.control.limit_min if plan.control and run.role != "control" else 0.0
        left_s = snapshot.left_s - 60 * kept_min
        if 60 * run.limit_min > left_s:
            left = f"the job has {left_s / 60:.1f} min left"
            return PostponeRun(run, f"may take {run.limit_min:g} min, but {left}: it waits for another job")
    return StartRun(run)
