"""Show where every point of a sweep stands: pending, running, or how it ended and why.

  zeroscale status results/runs/smoke
  zeroscale status results/runs/paper --wait && zeroscale report results/runs/paper --out reports/paper

Attempts that ended without a record get one, with the scheduler's words as evidence. Exit code 0 if every point is
answered.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

from bench.cli import live, wording
from bench.cli.wording import count
from bench.dispatch.settle import settle
from bench.dispatch.view import View, look
from bench.errors import UserError, printable
from bench.sweep import exclusions
from bench.sweep.standing import Standing

_WAIT_S = 5.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a study, e.g. results/runs/smoke")
    parser.add_argument("--wait", action="store_true", help="return only when nothing is pending or running any more")
    parser.add_argument("--json", action="store_true", help="print JSON for another program")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point is answered."""
    view, answers = _settled(args.folder)
    if args.wait:
        with live.line(quiet=args.json) as follow:
            while _under_way(view, answers):
                follow(_summary(view))
                time.sleep(_WAIT_S)
                view, answers = _settled(args.folder)
    wording.name_unreadable(view.seen.unreadable)
    print(_json(view) if args.json else _text(view))
    return 0 if all(standing.final for standing in view.standings) else 1


def _under_way(view: View, answers: bool) -> bool:
    """Whether something may still change by itself; of a scheduler that does not answer nobody knows."""
    if not answers:
        return not all(standing.final for standing in view.standings)
    return bool(view.live) or any(standing.state in ("running", "pending") for standing in view.standings)


def _settled(folder: Path) -> tuple[View, bool]:
    """Look at a study after settling what can be, and whether its scheduler answered; without it nothing can be told
    dead."""
    try:
        view = look(folder)
    except UserError as error:
        view = look(folder, ask=False)  # raises again if it is the folder that is wrong
        print(f"zeroscale: {error}; shown is what the folder says", file=sys.stderr)
        return view, False
    with contextlib.suppress(OSError):  # a folder that may only be read is shown as it is
        if settle(view):
            view = look(folder)
    return view, True


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
