"""Records without a run, for attempts that ended without leaving one and for points that need not run, and what is due
after that."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from bench import store
from bench.dispatch.view import View
from bench.record import Outcome
from bench.scheduling import JobState
from bench.sweep import jobs, reconcile, unrun
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.policy import Conclude, Decision, Snapshot, Start, SweepPlan, Wait, decisions, planned_run
from bench.sweep.standing import Place, Standing
from bench.sweep.survey import Open


def settle(view: View) -> int:
    """Give every attempt that ended without a record the one it should have left; return how many."""
    concluded = 0
    for attempt in [attempt for attempts in view.seen.open.values() for attempt in attempts]:
        if (outcome := _ended(attempt, view.queue)) is not None:
            with contextlib.suppress(store.Unreadable):  # somebody has just written a bad one; the next look names it
                store.conclude(attempt.attempt.folder, outcome)
                concluded += 1
    for job in view.seen.jobs:
        for path, allocation in jobs.allocations(job.folder):
            state = view.queue.get((job.name, allocation.task))
            restarted = state is not None and (state.restarts or 0) > allocation.restart
            if allocation.ended_at is None and (restarted or not view.is_live(job.name, allocation.task)):
                # hidden ones are about to be renamed, and may be gone
                written = (file for file in job.folder.iterdir() if not file.name.startswith("."))
                last_write = max(file.stat().st_mtime for file in written)
                known = state.ended_at if state and not restarted else None
                jobs.end(path, known or max(last_write, allocation.began_at))
    return concluded


def _ended(attempt: Open, queue: Mapping[Place, JobState]) -> Outcome | None:
    """Return how an attempt without a record ended, or None while it may still go on."""
    traces = reconcile.Traces.read(attempt.attempt.folder)
    if not attempt.job:
        return reconcile.outcome(traces, None, restarted=False) if attempt.dead_here else None
    state = queue.get((attempt.job, attempt.task))
    if state is None:
        return None if attempt.fresh else reconcile.outcome(traces, None, restarted=False)
    restarted = (state.restarts or 0) > attempt.restart
    if state.live:
        # A job counts as put back before its processes are asked to end: they may still have something to say.
        silent = attempt.fresh and not traces.interrupted
        return reconcile.outcome(traces, state, restarted=True) if restarted and not silent else None
    return reconcile.outcome(traces, None if restarted else state, restarted=restarted)  # of a later start


def prune(view: View, neighbourhood: Neighbourhood) -> Counter[str]:
    """Record which points need not run; return how many of each outcome."""
    count: Counter[str] = Counter()
    for standing, decision in _decided(view, neighbourhood):
        if isinstance(decision, Conclude):
            unrun.conclude(view.folder, standing.sweep.todo(standing.point, standing.key.repeat), decision.outcome)
            count[decision.outcome.kind] += 1
    return count


class Due(NamedTuple):
    """The points to be started, in order, and why none of them may be now; empty if they may."""

    standings: list[Standing]
    why_not_now: str


def due(view: View, neighbourhood: Neighbourhood) -> Due:
    """Return the points to be started: those that wait, those that a second run shall confirm, and those that were
    called infeasible before measured neighbours took that back."""
    decided = [(s, decision) for s, decision in _decided(view, neighbourhood) if isinstance(decision, Start | Wait)]
    waits = (decision.why for _, decision in decided if isinstance(decision, Wait))
    return Due([standing for standing, _ in decided], next(waits, ""))


def _decided(view: View, neighbourhood: Neighbourhood) -> list[tuple[Standing, Decision]]:
    """Return what the policy decides about every point of a study as it stands."""
    kin, node_hours = view.kin(), view.sweeps[-1].rules.budget.node_hours
    runs = [planned_run(s.sweep, s.key, s.point, kin[s.key[:2]], s.sweep.rules.budget.attempts) for s in view.standings]
    taken = {s.key: s.why or "in a job" for s in view.standings if s.job or s.state in ("running", "pending")}
    snapshot = Snapshot(
        view.tried,
        neighbourhood.correction,
        busy=lambda key: taken.get(key, ""),
        submitted=Counter(key for job in view.seen.jobs for key, _ in job.points),
        spent_node_hours=0.0 if node_hours is None else view.spent_node_hours(),
    )
    plan = SweepPlan(runs, confirm_answered=True, node_hours=node_hours)
    return list(zip(view.standings, decisions(plan, snapshot), strict=True))
