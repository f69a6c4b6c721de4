"""Go on with a sweep: start what has no final answer yet, and never what has one.

  zeroscale resume results/runs/paper
  zeroscale resume results/runs/paper --autopilot

Attempts that ended without a record get one first. Every point may be tried as often as its study allows.
"""

import argparse

from bench import api, terminal
from bench.cli import notes, options, sweep_text
from bench.sweep.submission.submitting import SubmitResult

_PATIENCE_S = 600.0  # of the autopilot, which nobody would call again, with a scheduler that does not answer


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser)
    options.add_autopilot(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if what is left was submitted or, without a scheduler, if every point ended `ok`."""
    notes.print_unreadable(api.unreadable(args.folder))
    with terminal.progress(quiet=args.json) as follow:
        done = api.resume(
            args.folder,
            autopilot=args.autopilot,
            patience_s=_PATIENCE_S if args.autopilot else 0.0,
            tell=terminal.teller(quiet=args.json),
            follow=follow,
        )
    if isinstance(done, SubmitResult):
        print(sweep_text.format_submitted(done, args.folder, as_json=args.json))
        return 0
    print(sweep_text.format_ended(done, as_json=args.json))
    return 0 if done.good else 1
