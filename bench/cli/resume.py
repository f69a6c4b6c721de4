"""Go on with a sweep: start what has no final answer yet, and never what has one.

  zeroscale resume results/runs/paper
  zeroscale resume results/runs/paper --autopilot --notify "mail -s done me@example.org -a"

Attempts that ended without a record get one first. Every point may be tried as often as its study allows.
"""

import argparse
import os

from bench import api, job_context, terminal
from bench.cli import autopilot_end, notes, options, search_text, sweep_text
from bench.errors import UserError
from bench.scheduling import SchedulerAway
from bench.sweep import definition
from bench.sweep.local.local_sweep import SweepResult
from bench.sweep.submission.submitting import SubmitResult

_PATIENCE_S = 30.0  # with a scheduler that does not answer
_AUTOPILOT_PATIENCE_S = 600.0  # of the autopilot, which nobody would call again


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser)
    options.add_autopilot(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if what is left was submitted or, without a scheduler, if every point ended `ok`; of a search, if it has
    found something."""
    options.check_notify(args)
    notes.print_unreadable(api.unreadable(args.folder))
    try:
        done = _resume(args)
    except SchedulerAway:
        raise
    except UserError as refusal:
        if args.autopilot and job_context.find_job(os.environ).context.job_id:  # nobody else sees it
            autopilot_end.finish(args.folder, args.notify, str(refusal))
        raise
    if isinstance(done, SubmitResult):
        print(sweep_text.format_submitted(done, args.folder, as_json=args.json))
        if args.autopilot and not done.queued and done.complete:
            autopilot_end.finish(args.folder, args.notify)
        return 0 if done.good else 1
    if definition.find_search(definition.read(args.folder)):
        verdict = api.search_verdict(args.folder)
        print(search_text.format_verdict(verdict, args.folder, as_json=args.json))
        return 0 if verdict.best else 1
    print(sweep_text.format_ended(done, as_json=args.json))
    if not args.json:
        notes.print_answer(args.folder)
    return 0 if done.good else 1


def _resume(args: argparse.Namespace) -> SubmitResult | SweepResult:
    with terminal.progress(quiet=args.json) as follow:
        return api.resume(
            args.folder,
            autopilot=args.autopilot,
            notify=args.notify,
            patience_s=_AUTOPILOT_PATIENCE_S if args.autopilot else _PATIENCE_S,
            tell=terminal.teller(quiet=args.json),
            follow=follow,
        )
