"""Show how many points of a sweep ended how, and which of them are pending, running or did not end ok, and why.

  zeroscale status results/runs/smoke
  zeroscale status results/runs/smoke --all
  zeroscale status results/runs/paper --wait && zeroscale report results/runs/paper --out reports/paper

Attempts that ended without a record get one, with the scheduler's words as evidence. Exit code 0 if every point is
answered.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import api
from bench.cli import options
from bench.core import terminal
from bench.core.errors import UserError, make_printable
from bench.core.formatting import duration, format_count
from bench.core.quantities import compute_node_hours
from bench.core.scheduling import JobState
from bench.core.store import RECORD, read_record
from bench.sweep import jobs
from bench.sweep.jobs import SubmittedJob
from bench.sweep.status import PointStatus, StudyState, describe_wait

_WAIT_S = 5.0
_STUCK_S = (
    30.0  # of nothing but jobs that cannot start, before `--wait` gives up: a job that has just ended is not seen
)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser)
    parser.add_argument("--all", action="store_true", help="show the points that ended ok as well")
    parser.add_argument("--wait", action="store_true", help="return only when nothing is pending or running any more")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point is answered."""
    status = _wait(args.folder, quiet=args.json) if args.wait else _read_status(args.folder)
    options.print_unreadable(status.view.seen.unreadable)
    print(_format_json(status) if args.json else _format_text(status.view, every=args.all))
    return 0 if status.answered else 1


def _wait(folder: Path, *, quiet: bool) -> api.Status:
    """Return where a study stands once nothing of it can change by itself any more."""
    status, stuck_since = _read_status(folder), time.monotonic()
    with terminal.progress(quiet=quiet) as follow:
        while status.under_way or (status.stuck and time.monotonic() < stuck_since + _STUCK_S):
            stuck_since = time.monotonic() if status.under_way else stuck_since
            follow(format_progress(status.view))
            time.sleep(_WAIT_S)
            status = _read_status(folder)
    return status


def _read_status(folder: Path) -> api.Status:
    status = api.status(folder)
    if status.scheduler_away:
        print(f"zeroscale: {status.scheduler_away}; shown is what the folder says", file=sys.stderr)
    return status


def _format_text(view: StudyState, *, every: bool) -> str:
    lines = [_format_line(one) for one in view.statuses if every or not (one.final and one.outcome == "ok")]
    lines += [
        f"node {found.host} is not used any more: {found.reason} (runs {', '.join(found.runs)})"
        for found in jobs.read_exclusions(view.folder)
    ]
    lines += [make_printable(line) for line in _list_job_lines(view)]
    return "\n".join([*lines, format_progress(view)])


def _list_job_lines(view: StudyState) -> Iterator[str]:
    """Yield the jobs that the scheduler still has, and what may be done about them."""
    for job, state in view.list_live():
        what = describe_wait(state) if state.pending else state.state.lower()
        log = view.find_log(job, state.task)
        shown = f"  {log}" if log and log.exists() else f"  {job.folder}"
        yield f"job {state.number}  {'autopilot, ' if not job.points else ''}{what}{shown}"
    cancel = f"to take them back: zeroscale cancel {shlex.quote(str(view.folder))}"
    if any(job.points for job in view.live) and all(point_status.final for point_status in view.statuses):
        yield f"every point has its answer, and jobs are left; {cancel}"
    elif any(state.stuck for _, state in view.list_live()):
        yield f"jobs that cannot start stay in the queue; {cancel}"


def _format_line(point_status: PointStatus) -> str:
    shown = point_status.outcome if point_status.final else point_status.state
    why = f"  {point_status.why}" if point_status.why else ""
    return make_printable(f"{shown:<10}  {point_status.point.line}  repeat {point_status.key.repeat}{why}")


def format_summary(view: StudyState) -> str:
    """Return how many points stand where, and what was spent on them, in one line."""
    shown = Counter(
        point_status.outcome if point_status.final else point_status.state for point_status in view.statuses
    )
    counts = ", ".join(f"{number} {kind}" for kind, number in shown.most_common())
    queued = f"{format_count(len(view.live), 'job')} in the queue" if view.is_reached else "the queue is not known"
    spent = f"; {view.spent_node_hours():.2f} node-hours spent, {queued}" if view.seen.jobs else ""
    return f"{format_count(len(view.statuses), 'point')}: {counts}{spent}"


def format_progress(view: StudyState) -> str:
    """Return the summary of a sweep, and an estimate of the time left."""
    left = estimate_time_left(view)
    return format_summary(view) + (f"; {left.describe()}" if left else "")


class TimeLeft(NamedTuple):
    """Estimate of the time until every point of a sweep has been tried, without waiting in the queue."""

    minutes: float
    finished: int  # points whose median it is; 0: from the time limits in the plan

    def describe(self) -> str:
        """Return the estimate in words, with its source."""
        shown = duration(60 * self.minutes)
        if self.finished:
            return f"about {shown} left, by the median of {format_count(self.finished, 'finished point')}"
        return f"at most {shown} left, by the time limits in the plan"


_LATEST = 50
"""Finished points whose records are read for a median: enough for it, and quick also in a sweep of thousands."""


def estimate_time_left(view: StudyState) -> TimeLeft | None:
    """Estimate the time left from the median of finished points, per number of nodes, or from the plan's time limits.

    As many points are assumed to run at a time as run now, and at least one. None if no point is left, if the time of
    a point is unknown, or if the scheduler did not answer.
    """
    if view.seen.jobs and not view.is_reached:
        return None
    left = [one.point for one in view.statuses if one.state not in ("answered", "given up")]
    done = [one for one in view.statuses if one.final and one.outcome == "ok"][-_LATEST:]
    by_nodes: dict[int, list[float]] = {}
    for one in done if left else ():
        with contextlib.suppress(UserError):  # a record of a later version, say
            hours = compute_node_hours(read_record(view.folder / one.folder / RECORD))
            by_nodes.setdefault(one.point.nodes, []).extend([60 * hours / one.point.nodes] if hours else [])
    medians = {nodes: statistics.median(minutes) for nodes, minutes in by_nodes.items() if minutes}
    typical = statistics.median(medians.values()) if medians else None
    minutes = [medians.get(point.nodes, typical or point.time_limit_min) for point in left]
    known = [one for one in minutes if one is not None]
    if not known or len(known) < len(minutes):
        return None
    at_a_time = max(1, sum(one.state == "running" for one in view.statuses))
    return TimeLeft(max(sum(known) / at_a_time, max(known)), sum(map(len, by_nodes.values())))


def _format_json(status: api.Status) -> str:
    view = status.view
    plain = {
        "folder": str(view.folder),
        "node_hours": view.spent_node_hours(),
        "minutes_left": left.minutes if (left := estimate_time_left(view)) else None,
        "scheduler_away": status.scheduler_away or None,
        "jobs": None if status.scheduler_away else [job.handle for job in view.live],
        "queue": None
        if status.scheduler_away
        else [_build_plain_job(view, job, state) for job, state in view.list_live()],
        "excluded_nodes": [found.model_dump() for found in jobs.read_exclusions(view.folder)],
        "unreadable": [{"file": str(error.path), "why": error.why} for error in view.seen.unreadable],
        "points": [
            {
                **point_status.key._asdict(),
                "state": point_status.state,
                "outcome": point_status.outcome or None,
                "why": point_status.why,
                "job": (state := view.queue.get((point_status.job, point_status.task))) and state.number,
                "attempts": point_status.attempts,
                "run": point_status.folder or None,
                "line": point_status.point.line,
            }
            for point_status in view.statuses
        ],
    }
    return json.dumps(plain, indent=1)


def _build_plain_job(view: StudyState, job: SubmittedJob, state: JobState) -> dict[str, Any]:
    log = view.find_log(job, state.task)
    starts_at = datetime.fromtimestamp(state.started_at, UTC).isoformat() if state.started_at else None
    return {
        "job": state.number,
        "name": job.name,
        "points": sum(task == state.task for _, task in job.points),
        "state": state.state,
        "reason": state.reason or None,
        "stuck": state.stuck or None,
        "starts_at": starts_at,  # or started
        "log": str(log) if log and log.exists() else None,
    }
