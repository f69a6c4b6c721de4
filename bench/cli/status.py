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
from bench.dispatch.view import View
from bench.errors import printable
from bench.sweep import exclusions
from bench.sweep.standing import Standing
from bench.wording import count

_WAIT_S = 5.0


def arguments(parser: argparse.ArgumentParser) -> None:
    options.study_folder(parser)
    parser.add_argument("--wait", action="store_true", help="return only when nothing is pending or running any more")
    options.as_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point is answered."""
    status = _looked(args.folder)
    if args.wait:
        with terminal.progress(quiet=args.json) as follow:
            while status.under_way:
                follow(_summary(status.view))
                time.sleep(_WAIT_S)
                status = _looked(args.folder)
    notes.name_unreadable(status.view.seen.unreadable)
    print(_json(status.view) if args.json else _text(status.view))
    return 0 if status.answered else 1


def _looked(folder: Path) -> api.Status:
    status = api.status(folder)
    if status.scheduler_away:
        print(f"zeroscale: {status.scheduler_away}; shown is what the folder says", file=sys.stderr)
    return status


def _text(view: View) -> str:
    lines = [_line(standing) for standing in view.standings]
    lines += [
        f"node {found.host} is not used any more: {found.reason} (runs {', '.join(found.runs)})"
        for found in exclusions.read(view.folder)
    ]
    return "\n".join([*lines, _summary(view)])


def _line(standing: Standing) -> str:
    shown = standing.outcome if standing.final else standing.state
    why = f"  {standing.why}" if standing.why else ""
    return printable(f"{shown:<10}  {standing.point.line}  repeat {standing.key.repeat}{why}")


def _summary(view: View) -> str:
    shown = Counter(standing.outcome if standing.final else standing.state for standing in view.standings)
    told = ", ".join(f"{number} {kind}" for kind, number in shown.most_common())
    hours, queued = view.spent_node_hours(), len(view.live)
    spent = f"; {hours:.2f} node-hours spent, {count(queued, 'job')} in the queue" if view.seen.jobs else ""
    return f"{count(len(view.standings), 'point')}: {told}{spent}"


def _json(view: View) -> str:
    plain = {
        "folder": str(view.folder),
        "node_hours": view.spent_node_hours(),
        "jobs": [job.handle for job in view.live],
        "excluded_nodes": [found.model_dump() for found in exclusions.read(view.folder)],
        "unreadable": [{"file": str(error.path), "why": error.why} for error in view.seen.unreadable],
        "points": [
            {
                **standing.key._asdict(),
                "state": standing.state,
                "outcome": standing.outcome or None,
                "why": standing.why,
                "attempts": standing.attempts,
                "run": standing.folder or None,
                "line": standing.point.line,
            }
            for standing in view.standings
        ],
    }
    return json.dumps(plain, indent=1)
