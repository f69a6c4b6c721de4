"""Records without a run, for attempts that ended without leaving one and for points that need not run, and what is due
after that."""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from bench import store
from bench.record import Outcome
from bench.scheduling import JobState
from bench.sweep import jobs, reconcile, skipped
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.job_logs import find_last_line
from bench.sweep.policy import (
    Decision,
    PostponeRun,
    RecordWithoutRun,
    Snapshot,
    StartRun,
    SweepPlan,
    build_planned_run,
    list_decisions,
)
from bench.sweep.snapshot import UnfinishedAttempt
from bench.sweep.status import JobTask, PointStatus, find_failed_starts
from bench.sweep.submission.state import StudyState

_NEVER_BEGAN = "its supervisor never began: the command that was about to start it was ended"


def finalize_lost(view: StudyState) -> int:
    """Give every attempt that ended without a record the one it should have left; return how many."""
    concluded = 0
    for folder in view.seen.nobodys:
        store.drop_claim(folder)
    for attempt in [attempt for attempts in view.seen.open.values() for attempt in attempts]:
        if (outcome := _decide_lost_outcome(attempt, view.queue)) is not None:
            with contextlib.suppress(store.Unreadable):  # somebody has just written a bad one; the next look names it
                store.finalize(attempt.attempt.folder, outcome)
                concluded += 1
    for job in view.seen.jobs:
        for path, allocation in jobs.list_allocations(job.folder):
            state = view.queue.get((job.name, allocation.task))
            restarted = state is not None and (state.restarts or 0) > allocation.restart
            if allocation.ended_at is None and (restarted or not view.is_live(job.name, allocation.task)):
                # hidden ones are about to be renamed, and may be gone
                written = (file for file in job.folder.iterdir() if not file.name.startswith("."))
                last_write = max(file.stat().st_mtime for file in written)
                known = state.ended_at if state and not restarted else None
                jobs.end_allocation(path, known or max(last_write, allocation.began_at))
    return concluded


def keep_ends(view: StudyState) -> bool:
    """Keep how jobs ended that left points without an attempt, before the scheduler forgets it; return whether any was
    new."""
    new, started = False, view.seen.list_started_jobs()
    for job in view.seen.jobs:
        begun: dict[int | None, list[bool]] = {}
        for key, task in job.points:
            begun.setdefault(task, []).append(view.seen.has_attempt(key, job.name))
        for task, attempts in begun.items():
            state, kept = view.queue.get((job.name, task)), view.seen.ends.get((job.name, task))
            if state is None or state.live or all(attempts) or (kept and kept.state == state.state):
                continue
            with contextlib.suppress(OSError):
                is_begun = any(attempts) or (task is None and job.name in started)
                jobs.write_end(job.folder, _build_end(view, job, state, begun=is_begun))
                new = True
    return new


def _build_end(view: StudyState, job: jobs.SubmittedJob, state: JobState, *, begun: bool) -> jobs.JobEnd:
    log = view.find_log(job, state.task)
    lasted_s = state.ended_at - state.started_at if state.ended_at and state.started_at else None
    return jobs.JobEnd(
        number=state.number,
        task=state.task,
        state=state.state,
        outcome=state.outcome,
        exit=state.exit or (state.reason if state.outcome else ""),
        exit_code=state.exit_code,
        lasted_s=lasted_s,
        ended_at=state.ended_at or time.time(),
        log=str(log.relative_to(view.folder)) if log and log.exists() else "",
        last_line=find_last_line(log),
        begun=begun,
    )


def _decide_lost_outcome(attempt: UnfinishedAttempt, queue: Mapping[JobTask, JobState]) -> Outcome | None:
    """Return how an attempt without a record ended, or None while it may still go on."""
    left_behind = reconcile.LeftBehind.read(attempt.attempt.folder)
    if not attempt.job:
        return _decide_lost_here(attempt, left_behind)
    state = queue.get((attempt.job, attempt.task))
    if state is None:
        return None if attempt.fresh else reconcile.reconcile_outcome(left_behind, None, restarted=False)
    restarted = (state.restarts or 0) > attempt.restart
    if state.live:
        # A job counts as put back before its processes are asked to end: they may still have something to say.
        silent = attempt.fresh and not left_behind.interrupted
        return reconcile.reconcile_outcome(left_behind, state, restarted=True) if restarted and not silent else None
    return reconcile.reconcile_outcome(
        left_behind, None if restarted else state, restarted=restarted
    )  # of a later start


def _decide_lost_here(attempt: UnfinishedAttempt, left_behind: reconcile.LeftBehind) -> Outcome | None:
    """Return how an attempt outside of any queue ended: its supervisor is gone, or whoever claimed it was ended before
    there was one, and left nothing that could say more."""
    if attempt.dead_here:
        return reconcile.reconcile_local_outcome(left_behind)
    is_silent = not (attempt.attempt.folder / store.HEARTBEAT).exists()
    return Outcome(kind="cancelled", reason=_NEVER_BEGAN) if is_silent and not attempt.fresh else None


def write_outcomes_without_run(view: StudyState, corrections: MeasuredCorrections) -> Counter[str]:
    """Record which points need not run; return how many of each outcome."""
    count: Counter[str] = Counter()
    for point_status, decision in _decide_all(view, corrections):
        if isinstance(decision, RecordWithoutRun):
            skipped.write_outcome(
                view.folder, point_status.sweep.requested(point_status.point, point_status.key.repeat), decision.outcome
            )
            count[decision.outcome.kind] += 1
    return count


class PendingPoints(NamedTuple):
    """The points to be started, in order, and why none of them may be now; empty if they may."""

    statuses: list[PointStatus]
    why_not_now: str


def find_pending(view: StudyState, corrections: MeasuredCorrections) -> PendingPoints:
    """Return the points to be started: those that wait, those that a second run shall confirm, and those that were
    called infeasible before measured neighbours took that back."""
    decided = [
        (s, decision) for s, decision in _decide_all(view, corrections) if isinstance(decision, StartRun | PostponeRun)
    ]
    waits = (decision.why for _, decision in decided if isinstance(decision, PostponeRun))
    return PendingPoints([point_status for point_status, _ in decided], next(waits, ""))


def _decide_all(view: StudyState, corrections: MeasuredCorrections) -> list[tuple[PointStatus, Decision]]:
    """Return what the policy decides about every point of a study as it stands."""
    kin, node_hours = view.kin(), view.sweeps[-1].rules.budget.node_hours
    runs = [
        build_planned_run(s.sweep, s.key, s.point, kin[s.key[:2]], s.sweep.rules.budget.attempts) for s in view.statuses
    ]
    taken = {s.key: s.why or "in a job" for s in view.statuses if s.job or s.state in ("running", "pending")}
    snapshot = Snapshot(
        view.tried,
        corrections.correction,
        busy=lambda key: taken.get(key, ""),
        submitted=Counter(key for job in view.seen.jobs for key, _ in job.points),
        failed_starts=find_failed_starts({s.key: s.sweep for s in view.statuses}, view.seen),
        spent_node_hours=0.0 if node_hours is None else view.spent_node_hours(),
    )
    plan = SweepPlan(runs, confirm_answered=True, node_hours=node_hours)
    return list(zip(view.statuses, list_decisions(plan, snapshot), strict=True))
