"""Go on with a sweep: start what has no final answer yet, and never what has one.

  zeroscale resume results/runs/paper
  zeroscale resume results/runs/paper --autopilot

Attempts that ended without a record get one first. Every point may be tried as often as its study allows.
"""

import argparse

from bench import api, terminal
from bench.cli import listing, notes, options
from bench.dispatch.feed import Fed

_PATIENCE_S = 600.0  # of the autopilot, which nobody would call again, with a scheduler that does not answer


def arguments(parser: argparse.ArgumentParser) -> None:
    options.study_folder(parser)
    options.autopilot(parser)
    options.as_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if what is left was submitted or, without a scheduler, if every point ended `ok`."""
    notes.name_unreadable(api.unreadable(args.folder))
    with terminal.progress(quiet=args.json) as follow:
        done = api.resume(
            args.folder,
            autopilot=args.autopilot,
            patience_s=_PATIENCE_S if args.autopilot else 0.0,
            tell=terminal.teller(quiet=args.json),
            follow=follow,
        )
    if isinstance(done, Fed):
        print(listing.fed(done, args.folder, as_json=args.json))
        return 0
    print(listing.ended(done, as_json=args.json))
    return 0 if done.good else 1
