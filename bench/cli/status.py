"""Show where every point of a sweep stands: pending, running, or how it ended and why.

  zeroscale status results/runs/smoke
  zeroscale status results/runs/paper --wait && zeroscale report results/runs/paper --out reports/paper

Attempts that ended without a record get one, with the scheduler's words as evidence. Exit code 0 if every point is
answered.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from bench import api, terminal
from bench.cli import notes, options
from bench.errors import make_printable
from bench.formatting import format_count
from bench.sweep import exclusions
from bench.sweep.status import PointStatus
from bench.sweep.submission.state import StudyState

_WAIT_S = 5.0


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser)
    parser.add_argument("--wait", action="store_true", help="return only when nothing is pending or running any more")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point is answered."""
    status = _read_status(args.folder)
    if args.wait:
        with terminal.progress(quiet=args.json) as follow:
            while status.under_way:
                follow(_format_summary(status.view))
                time.sleep(_WAIT_S)
                status = _read_status(args.folder)
    notes.print_unreadable(status.view.seen.unreadable)
    print(_format_json(status.view) if args.json else _format_text(status.view))
    return 0 if status.answered else 1


def _read_status(folder: Path) -> api.Status:
    status = api.status(folder)
    if status.scheduler_away:
        print(f"zeroscale: {status.scheduler_away}; shown is what the folder says", file=sys.stderr)
    return status


def _format_text(view: StudyState) -> str:
    lines = [_format_line(point_status) for point_status in view.statuses]
    lines += [
        f"node {found.host} is not used any more: {found.reason} (runs {', '.join(found.runs)})"
        for found in exclusions.read(view.folder)
    ]
    return "\n".join([*lines, _format_summary(view)])


def _format_line(point_status: PointStatus) -> str:
    shown = point_status.outcome if point_status.final else point_status.state
    why = f"  {point_status.why}" if point_status.why else ""
    return make_printable(f"{shown:<10}  {point_status.point.line}  repeat {point_status.key.repeat}{why}")


def _format_summary(view: StudyState) -> str:
    shown = Counter(
        point_status.outcome if point_status.final else point_status.state for point_status in view.statuses
    )
    counts = ", ".join(f"{number} {kind}" for kind, number in shown.most_common())
    hours, queued = view.spent_node_hours(), len(view.live)
    spent = f"; {hours:.2f} node-hours spent, {format_count(queued, 'job')} in the queue" if view.seen.jobs else ""
    return f"{format_count(len(view.statuses), 'point')}: {counts}{spent}"


def _format_json(view: StudyState) -> str:
    plain = {
        "folder": str(view.folder),
        "node_hours": view.spent_node_hours(),
        "jobs": [job.handle for job in view.live],
        "excluded_nodes": [found.model_dump() for found in exclusions.read(view.folder)],
        "unreadable": [{"file": str(error.path), "why": error.why} for error in view.seen.unreadable],
        "points": [
            {
                **point_status.key._asdict(),
                "state": point_status.state,
                "outcome": point_status.outcome or None,
                "why": point_status.why,
                "attempts": point_status.attempts,
                "run": point_status.folder or None,
                "line": point_status.point.line,
            }
            for point_status in view.statuses
        ],
    }
    return json.dumps(plain, indent=1)
