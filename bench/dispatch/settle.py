"""Points that get their record without a run: attempts that ended without leaving one, and points that need not run."""

import contextlib
from collections import Counter
from collections.abc import Mapping

from bench import store
from bench.dispatch.view import View
from bench.record import Outcome
from bench.scheduling import JobState
from bench.sweep import jobs, reconcile, unrun
from bench.sweep.feasible import far_out, infeasible
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.policy import given_up
from bench.sweep.pruning import pruned, to_confirm
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
    """Record which of the waiting points need not run; return how many of each outcome."""
    count: Counter[str] = Counter()
    kin = view.kin()
    for standing in view.standings:
        if standing.state == "waiting" and standing.sweep.rules.prune:
            outcome = pruned(kin[standing.key[:2]], view.tried) or _infeasible(standing, neighbourhood)
            if outcome:
                unrun.conclude(view.folder, standing.sweep.todo(standing.point, standing.key.repeat), outcome)
                count[outcome.kind] += 1
    return count


def _infeasible(standing: Standing, neighbourhood: Neighbourhood) -> Outcome | None:
    point = standing.point
    machine = standing.sweep.machines[point.machine]
    return infeasible(point.spec, point.forecast, machine, neighbourhood.correction(point))


def to_start(view: View, neighbourhood: Neighbourhood) -> list[Standing]:
    """Return the points to be started: those that wait, those that a second run shall confirm, and those that were
    called infeasible before measured neighbours took that back."""
    kin = view.kin()

    def again(standing: Standing) -> bool:
        if not standing.final or standing.job or not standing.sweep.rules.prune:
            return False
        if standing.outcome == "infeasible":
            return _taken_back(standing, view, neighbourhood)
        return standing.outcome == "oom" and to_confirm(kin[standing.key[:2]], view.tried)

    return [standing for standing in view.standings if standing.state == "waiting" or again(standing)]


def _taken_back(standing: Standing, view: View, neighbourhood: Neighbourhood) -> bool:
    """Whether a point that a prediction called infeasible is to run after all, as often as any other may."""
    machine = standing.sweep.machines[standing.point.machine]
    correction = neighbourhood.correction(standing.point)
    may = not given_up(view.seen.of(standing.key), standing.sweep.rules.budget.attempts)
    return may and not far_out(standing.point.forecast, machine, correction)
