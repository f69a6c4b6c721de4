"""Go on with a sweep: start what has no final answer yet, and never what has one.

  zeroscale resume results/runs/paper
  zeroscale resume results/runs/paper --autopilot

Attempts that ended without a record get one first. Every point may be tried as often as its study allows.
"""

import argparse
import time
from pathlib import Path

from bench import launchers
from bench.cli import listing, live, notes, options
from bench.dispatch.feed import Fed, feed
from bench.dispatch.settle import settle
from bench.dispatch.view import look
from bench.errors import UserError
from bench.local.here import Asked, Here
from bench.scheduling import SchedulerAway
from bench.sweep import asked
from bench.sweep.survey import survey

_PATIENCE_S = 600.0  # of the autopilot, with a scheduler that does not answer
_RETRY_S = 20.0


def arguments(parser: argparse.ArgumentParser) -> None:
    options.study_folder(parser)
    options.autopilot(parser)
    options.as_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if what is left was submitted or, without a scheduler, if every point ended `ok`."""
    folder: Path = args.folder
    sweeps = asked.read(folder)
    notes.name_unreadable(survey(folder).unreadable)
    if launchers.load(str(sweeps[-1].launcher["name"])).QUEUES:
        print(listing.fed(_feed(folder, args.autopilot), folder, as_json=args.json))
        return 0
    if args.autopilot:
        raise UserError("--autopilot", "this sweep has no queue", "leave it out")
    settle(look(folder))
    wanted = [Asked(key, sweep, point) for key, (sweep, point) in asked.union(sweeps).items()]
    with live.line(quiet=args.json) as follow:
        ended = Here(folder, wanted, retry=False, tell=live.teller(quiet=args.json), follow=follow).run()
    print(listing.ended(ended, as_json=args.json))
    return 0 if ended.good else 1


def _feed(folder: Path, autopilot: bool) -> Fed:
    """Feed the queue; the autopilot, whom nobody would call again, waits for a scheduler that is away."""
    until = time.monotonic() + (_PATIENCE_S if autopilot else 0)
    while True:
        try:
            return feed(folder, autopilot=autopilot)
        except SchedulerAway:
            if time.monotonic() > until:
                raise
            time.sleep(_RETRY_S)
