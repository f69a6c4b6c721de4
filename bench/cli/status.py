"""Show the outcomes of a sweep, and every point that is pending, running or not `ok`, with the
reason.

  zeroscale status results/runs/smoke
  zeroscale status results/runs/smoke --all
  zeroscale status results/runs/paper --wait
  zeroscale report results/runs/paper --out reports/paper

Attempts that ended without a record get a record, with the scheduler's job state as evidence. For
up to 300 runs, the flags of `zeroscale table` are shown. The exit code is 0 if every point has a
final outcome.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import api, launchers
from bench.cli import options
from bench.core import store, terminal
from bench.core.errors import UserError, make_printable
from bench.core.formatting import format_count, format_duration
from bench.core.quantities import compute_node_hours
from bench.core.scheduling import JobState
from bench.core.store import RECORD, read_record
from bench.sweep import jobs
from bench.sweep.jobs import SubmittedJob
from bench.sweep.snapshot import compute_spent_node_hours
from bench.sweep.status import PointStatus, StudyState, describe_wait, find_job_setup

_WAIT_S = 5.0
# Seconds for which `--wait` tolerates jobs that cannot start: a job that has just ended may still block them.
_STUCK_S = 30.0
_MOST_READ = 300  # with more `ok` runs, no flags are shown: each record takes a millisecond or more to decode


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser)
    parser.add_argument("--all", action="store_true", help="also list points (configurations) with the outcome ok")
    parser.add_argument("--wait", action="store_true", help="wait until no point is pending or running")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of a study's points (configurations). Return 0 if every point has its final outcome, otherwise
    1."""
    status = _wait(args.folder, quiet=args.json) if args.wait else _read_status(args.folder)
    options.print_unreadable(status.view.seen.unreadable)
    print(_format_json(status) if args.json else _format_text(status.view, every=args.all))
    return 0 if status.answered else 1


def _wait(folder: Path, *, quiet: bool) -> api.Status:
    """Wait until no job and no local run can change the study any more, and return its state."""
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
        print(f"zeroscale: {status.scheduler_away}; states are shown without the scheduler's queue", file=sys.stderr)
    return status


def _format_text(view: StudyState, *, every: bool) -> str:
    flags = _read_flags(view)
    shown = [one for one in view.statuses if every or not (one.final and one.outcome == "ok")]
    lines = [terminal.wrap_columns(_format_line(one, flags.get(one.folder, ()))) for one in shown]
    lines += [
        f"node {found.host} is excluded: {found.reason} (runs {', '.join(found.runs)})"
        for found in jobs.read_exclusions(view.folder)
    ]
    lines += [make_printable(line) for line in _list_job_lines(view)]
    states = {one.state for one in view.statuses}
    is_interrupted = "waiting" in states and "running" not in states
    if is_interrupted and not launchers.load(str(view.sweeps[-1].launcher["name"])).QUEUES:
        resume = f"zeroscale resume {shlex.quote(str(view.folder))}"
        lines.append(f"no process runs this sweep now; to run the waiting points: {resume}")
    progress = format_progress(view, Counter(name for raised in flags.values() for name in raised))
    return "\n".join([*lines, terminal.wrap(progress)])


def _read_flags(view: StudyState) -> dict[str, tuple[str, ...]]:
    """Return the quality flags (such as `busy`) of every run that ended `ok`, by run folder. Empty if more than
    `_MOST_READ` runs ended `ok`, because decoding their records would take long."""
    from analysis.flags import list_flags  # here: it imports numpy

    folders = [one.folder for one in view.statuses if one.final and one.outcome == "ok"]
    flags = {}
    for folder in folders if len(folders) <= _MOST_READ else ():
        with contextlib.suppress(OSError, store.Unreadable):
            flags[folder] = list_flags(store.read_record(view.folder / folder / store.RECORD))
    return flags


def _list_job_lines(view: StudyState) -> Iterator[str]:
    """Yield a line for each of the study's jobs in the scheduler's queue. If jobs are no longer needed or cannot start,
    yield a line with the command that cancels them."""
    for job, state in view.list_live():
        what = describe_wait(state) if state.pending else state.state.lower()
        log = view.find_log(job, state.task)
        shown = f"  {log}" if log and log.exists() else f"  {job.folder}"
        yield f"job {state.number}  {'autopilot, ' if not job.points else ''}{what}{shown}"
    cancel = f"to cancel them: zeroscale cancel {shlex.quote(str(view.folder))}"
    if any(job.points for job in view.live) and all(point_status.final for point_status in view.statuses):
        yield f"every point has a final result, but jobs are still in the queue; {cancel}"
    elif any(state.stuck for _, state in view.list_live()):
        yield f"jobs in the queue cannot start; {cancel}"
    yield from _list_next_steps(view)


def _list_next_steps(view: StudyState) -> Iterator[str]:
    """Yield lines with the commands that continue a sweep whose points wait without a job or are given up. Empty for a
    launcher without a queue, and if the scheduler did not respond."""
    if not view.is_reached or not launchers.load(str(view.sweeps[-1].launcher["name"])).QUEUES:
        return
    states = Counter(one.state for one in view.statuses)
    resume = f"continue with: zeroscale resume {shlex.quote(str(view.folder))}"
    had_autopilot = any(not job.points for job in view.seen.jobs)
    if states["waiting"] and (spent := view.explain_spent_budget()):
        yield terminal.wrap(f"{spent}; {options.RAISE_BUDGET}")
    elif states["waiting"] and had_autopilot and all(job.points for job in view.live):
        yield f"the autopilot has ended; {resume} --autopilot"
    elif states["waiting"] and not view.live and not states["running"]:
        yield f"nothing is queued; {resume}"
    if states["given up"]:
        yield terminal.wrap(f"given up: {format_count(states['given up'], 'run')}; {options.TRY_AGAIN}")


def _format_line(one: PointStatus, flags: Sequence[str]) -> str:
    why = f"  {one.why}" if one.why else ""
    flagged = f"  flags: {', '.join(flags)}" if flags else ""
    return make_printable(f"{one.shown:<10}  {one.point.line}  repeat {one.key.repeat}{why}{flagged}")


def format_summary(view: StudyState, flags: Mapping[str, int] = {}) -> str:
    """Return the number of points in each state and the node-hours spent, in one line. `flags` has, for each quality
    flag such as `busy`, the number of `ok` runs with this flag."""
    counts = options.format_outcomes(Counter(one.shown for one in view.statuses), flags)
    # Without asking the scheduler, the status is also printed if its launcher is not installed.
    price = find_job_setup(view.sweeps[-1]).price_per_node_hour if view.is_reached else None
    hours = compute_spent_node_hours(view.seen.jobs)
    cost = f" at a cost of {price * hours:.2f}" if price else ""
    spent = f"; {hours:.2f} node-hours spent{cost}, {view.describe_queue()}" if view.seen.jobs else ""
    return f"{format_count(len(view.statuses), 'run')}: {counts}{spent}"


def format_progress(view: StudyState, flags: Mapping[str, int] = {}) -> str:
    """Return a sweep's summary line, followed by an estimate of the time left if there is one. `flags` has the number
    of `ok` runs with each quality flag."""
    left = estimate_time_left(view)
    return format_summary(view, flags) + (f"; {left.describe()}" if left else "")


class TimeLeft(NamedTuple):
    """Estimate of the time until every point (configuration) of a sweep has been run. Waiting time in the queue is not
    included."""

    minutes: float
    finished: int  # number of finished points whose median run time is used; 0: the plan's time limits are used

    def describe(self) -> str:
        """Return the estimate of the time left as text, with the data on which it is based."""
        shown = format_duration(60 * self.minutes)
        if self.finished:
            return f"about {shown} left, from the median of {format_count(self.finished, 'finished run')}"
        return f"at most {shown} left, from the time limits of the plan"


_LATEST = 50
"""Number of latest finished points whose records are read for the median run time. Reading more would be slow in a
sweep of thousands of points."""


def estimate_time_left(view: StudyState) -> TimeLeft | None:
    """Estimate the time left from the median run time of finished points with the same number of nodes. Without
    finished points, use the plan's time limits.

    The estimate assumes that the number of points that run at the same time stays as it is now, and is at least one.
    Return None if no point is left, or if the time of a point is unknown. In a sweep with a scheduler, also return None
    if the queue has no job of the sweep, or if the scheduler did not respond.
    """
    if view.seen.jobs and not (view.is_reached and view.live):
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
    view, flags = status.view, _read_flags(status.view)
    plain = {
        "folder": str(view.folder),
        "node_hours": compute_spent_node_hours(view.seen.jobs),
        "minutes_left": left.minutes if (left := estimate_time_left(view)) else None,
        "scheduler_away": status.scheduler_away or None,
        "jobs": None if status.scheduler_away else list(dict.fromkeys(state.handle for _, state in view.list_live())),
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
                "flags": flags.get(point_status.folder),
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
