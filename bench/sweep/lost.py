"""Write records for attempts that ended without a record, and for points (configurations) that need not run. Find the
points to start."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.core import files, store
from bench.core.record import Outcome, OutcomeKind
from bench.core.scheduling import JobState
from bench.runtime.outcome import format_signal
from bench.sweep import jobs
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.definition import RequestedRun
from bench.sweep.jobs import find_last_line
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
from bench.sweep.snapshot import UnfinishedAttempt, compute_spent_node_hours
from bench.sweep.status import JobTask, PointStatus, StudyState, find_failed_starts

LeftBehind = dict[str, Any]
"""Content of the files that an attempt without a record left behind, for the field `evidence` of its outcome: a note
about the signal that interrupted it (`interrupted`), and its last heartbeat (`last_heartbeat`)."""


def read_left_behind(folder: Path) -> LeftBehind:
    """Return the content of the files that an attempt without a record left behind. Missing files are omitted."""
    names = {"interrupted": store.INTERRUPTED, "last_heartbeat": store.HEARTBEAT}
    return {key: plain for key, name in names.items() if (plain := files.read_json(folder / name))}


def reconcile_outcome(left_behind: LeftBehind, ending: JobState | None, *, restarted: bool) -> Outcome:
    """Return the outcome (kind, reason and evidence) of an attempt that ran in a scheduler's job and left no record.
    The job has ended, or was put back into the queue (`restarted`).

    `ending` is the job's last state at the scheduler; None if the scheduler no longer knows the job.
    """
    kind, reason = _decide_kind(left_behind, ending, restarted)
    evidence: dict[str, Any] = {}
    if ending:
        evidence["scheduler"] = {"state": ending.state, "words": ending.words, "source": ending.source}
        evidence["scheduler"] |= {"exit": ending.exit} if ending.exit else {}
    return Outcome(kind=kind, reason=reason, evidence=evidence | left_behind)


def reconcile_local_outcome(left_behind: LeftBehind) -> Outcome:
    """Return the outcome (kind, reason and evidence) of an attempt that ran without a scheduler. Its supervisor, the
    process that starts the ranks, died before it wrote a record."""
    if interrupted := left_behind.get("interrupted"):
        by = format_signal(interrupted.get("signal", "a signal"))
        return Outcome(kind="cancelled", reason=f"interrupted by {by}, and left no record", evidence=left_behind)
    who, at = "", ""
    if heartbeat := left_behind.get("last_heartbeat"):
        who = f", process {heartbeat.get('supervisor')} on {heartbeat.get('host')},"
        at = f"; its last heartbeat was at {heartbeat.get('at')}"
    reason = f"its supervisor{who} died and left no record{at}; see run.log"
    return Outcome(kind="error", reason=reason, evidence=left_behind)


def _decide_kind(left_behind: LeftBehind, ending: JobState | None, restarted: bool) -> tuple[OutcomeKind, str]:
    interrupted = left_behind.get("interrupted")
    if restarted:
        if interrupted:
            return "preempted", "the scheduler ended the job and requeued it"
        return "node_failure", "the scheduler requeued the job without a signal, as after a node failure"
    if ending and ending.outcome not in (None, "error"):
        return ending.outcome, ending.why
    if interrupted and _is_warned(interrupted):
        return "timeout", "the job reached its time limit, after the scheduler's warning signal"
    ended = f"the job ended as {ending.state}" + (f" ({ending.exit})" if ending.exit else "") if ending else ""
    if interrupted and ending and ending.outcome:
        name = interrupted.get("signal", "a signal")
        return "error", f"{ended}, and {name} ended the remaining processes; see the job's log"
    if interrupted:
        by = format_signal(interrupted.get("signal", "a signal"))
        return "cancelled", f"interrupted by {by}; the scheduler gives no reason"
    if ending:
        return "error", f"{ended} and left no record; see the job's log"
    return "error", "no record was left, and the scheduler no longer knows the job"


def _is_warned(interrupted: dict[str, Any]) -> bool:
    """Return whether the signal that interrupted a run was the scheduler's warning before the time limit. The warning
    may come up to a minute early."""
    left_s, warning_s = interrupted.get("left_s"), interrupted.get("warning_s")
    return isinstance(left_s, int | float) and isinstance(warning_s, int | float) and left_s <= warning_s + 60


def write_outcome(study_folder: Path, requested: RequestedRun, outcome: Outcome) -> None:
    """Write a record with this outcome for a point (configuration) that need not run, because other runs (`pruned`) or
    a prediction (`infeasible`) show that it does not fit into memory."""
    attempt = store.open_attempt(study_folder / requested.config_id, requested.spec, requested.circumstance)
    store.finalize(attempt.folder, outcome, "predicted" if outcome.kind == "infeasible" else "measured")


_NEVER_BEGAN = "its supervisor never began: the command that was to start it was ended first"


def finalize_lost(view: StudyState) -> int:
    """Write a record for every attempt that ended without a record. Return the number of records written. If a killed
    job could not write the time at which its allocation ended, that time is written as well."""
    concluded = 0
    # An attempt's folder without a description cannot get a record, since nothing else is known about it.
    for folder in view.seen.undescribed:
        store.drop_claim(folder)
    for attempt in [attempt for attempts in view.seen.open.values() for attempt in attempts]:
        if (outcome := _decide_lost_outcome(attempt, view.queue)) is not None:
            with contextlib.suppress(store.Unreadable):  # another process wrote a bad record just now
                store.finalize(attempt.attempt.folder, outcome)
                concluded += 1
    for job in view.seen.jobs:
        periods = sorted(jobs.list_allocations(job.folder), key=lambda found: found[1].began_at)
        latest = {allocation.task: allocation for _, allocation in periods}
        for path, allocation in periods:
            state, newest = view.queue.get((job.name, allocation.task)), latest[allocation.task]
            resubmitted = newest.job_id != allocation.job_id  # by hand: the scheduler's state is that of the new job
            restarted = resubmitted or (state is not None and (state.restarts or 0) > allocation.restart)
            # A job that was killed could not write its end. The time of its last written file is used instead.
            if allocation.ended_at is None and (restarted or not view.is_live(job.name, allocation.task)):
                # hidden files are temporary files that will be renamed
                written = (file for file in job.folder.iterdir() if not file.name.startswith("."))
                until = newest.began_at if resubmitted else math.inf
                last_write = max((at for file in written if (at := file.stat().st_mtime) < until), default=0.0)
                known = state.ended_at if state and not restarted else None
                jobs.end_allocation(path, known or max(last_write, allocation.began_at))
    return concluded


def keep_ends(view: StudyState) -> bool:
    """Write files that describe how jobs ended, because the scheduler forgets ended jobs after a while. A job or array
    task gets a file only if at least one of its points (configurations) was never tried in this job or array task.

    Return whether any file was written.
    """
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
    """Return the outcome of an attempt without a record. None if the attempt may still be running."""
    left_behind = read_left_behind(attempt.attempt.folder)
    if not attempt.job and attempt.dead_here:
        return reconcile_local_outcome(left_behind)
    if not attempt.job:  # its process may have ended before it started a supervisor
        is_silent = not (attempt.attempt.folder / store.HEARTBEAT).exists()
        return Outcome(kind="cancelled", reason=_NEVER_BEGAN) if is_silent and not attempt.fresh else None
    state = queue.get((attempt.job, attempt.task))
    if state is None:
        return None if attempt.fresh else reconcile_outcome(left_behind, None, restarted=False)
    restarted = (state.restarts or 0) > attempt.restart
    if state.live:
        # The scheduler reports a requeue before it signals the job's processes: they may still write a note.
        silent = attempt.fresh and "interrupted" not in left_behind
        return reconcile_outcome(left_behind, state, restarted=True) if restarted and not silent else None
    # After a restart, the scheduler's state is that of a later start and does not concern this attempt.
    return reconcile_outcome(left_behind, None if restarted else state, restarted=restarted)


def write_outcomes_without_run(view: StudyState, corrections: MeasuredCorrections) -> Counter[str]:
    """Write a record for every point that need not run (`pruned` or `infeasible`). Return the number of records by
    outcome."""
    count: Counter[str] = Counter()
    for one, decision in _decide_all(view, corrections):
        if isinstance(decision, RecordWithoutRun):
            write_outcome(view.folder, one.sweep.requested(one.point, one.key.repeat), decision.outcome)
            count[decision.outcome.kind] += 1
    return count


def find_pending(view: StudyState, corrections: MeasuredCorrections) -> tuple[list[PointStatus], str]:
    """Return the points to start, in order, and the reason why they may not start now. An empty reason means that they
    may start. The points are of three sorts:

    - points without an answer (a final outcome),
    - points that ran out of memory and run a second time to confirm that,
    - points recorded as `infeasible` whose prediction has changed since, because of measured runs of similar points.
    """
    decided = _decide_all(view, corrections)
    waits = (decision.why for _, decision in decided if isinstance(decision, PostponeRun))
    return [one for one, decision in decided if isinstance(decision, StartRun | PostponeRun)], next(waits, "")


def _decide_all(view: StudyState, corrections: MeasuredCorrections) -> list[tuple[PointStatus, Decision]]:
    """Return every point of a study with the decision about it: start, postpone or skip it, or record an outcome
    without a run. `corrections` adjusts predictions by the study's measured runs."""
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
        spent_node_hours=0.0 if node_hours is None else compute_spent_node_hours(view.seen.jobs),
    )
    plan = SweepPlan(runs, confirm_answered=True, node_hours=node_hours)
    return list(zip(view.statuses, list_decisions(plan, snapshot), strict=True))
