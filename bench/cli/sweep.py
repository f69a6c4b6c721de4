"""Measure every point of a study, or of comma lists: here one after the other, or submitted to a scheduler.

  zeroscale sweep study=smoke
  zeroscale sweep model=tiny engine=ddp,zero1,zero2,zero3 batch.micro=2,4,8 --dry-run
  zeroscale sweep study=paper launcher=slurm --dry-run
  zeroscale sweep study=strong_scaling launcher=slurm --autopilot

Comma lists without a study take, on a CPU, the sizes and the window of the smoke study, as `zeroscale run` does. Each
of their points runs once, which is indicative: the last line says what five repeats take.
Points that already have a final answer on this machine in this environment are skipped, so that a sweep that was
interrupted goes on where it ended. A point that is predicted far out of memory is recorded as infeasible and not run,
unless `--no-prune` is given. With a scheduler the command returns at once: `zeroscale status` shows how it goes.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench import api, terminal
from bench.cli import notes, options, sweep_text
from bench.cli.prediction_text import PredictionText

if TYPE_CHECKING:
    from bench.sweep.planning.study_plan import PlannedSweep


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    help_text = "runs of every point, in random order; default: the study's, and one without a study"
    parser.add_argument("--repeats", type=options.positive("--repeats"), metavar="N", help=help_text)
    parser.add_argument(
        "--no-prune",
        action="store_true",
        help="measure also what a smaller micro-batch or a prediction says cannot fit",
    )
    options.add_autopilot(parser)
    help_text = "at most N of the sweep's jobs in the queue"
    parser.add_argument("--max-queued", type=options.positive("--max-queued"), metavar="N", help=help_text)
    parser.add_argument("--nice", type=int, metavar="N", help="lower the priority of the jobs")
    parser.add_argument("--begin", metavar="WHEN", help="start no job before, as the scheduler takes it: 20:00")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point has a final answer and every answer is `ok`; with a scheduler, if it took the jobs."""
    options.check_notify(args)
    plan = api.plan(
        overrides=args.overrides,
        config_dir=args.config_dir,
        repeats=args.repeats,
        prune=not args.no_prune,
        autopilot=args.autopilot,
        max_queued=args.max_queued,
        nice=args.nice,
        begin=args.begin,
    )
    if not args.json:
        notes.print_chosen(plan.chosen)
    folder: Path = args.results / plan.sweep.study
    if args.dry_run:
        print(
            sweep_text.format_json(plan.sweep)
            if args.json
            else sweep_text.format_text(plan.sweep, plan.expansion, folder)
        )
        _print_repeats(args, plan)
        return 0
    if plan.queues:
        for line in PredictionText(plan.sweep).warnings():
            print(line, file=sys.stderr)
        done = api.submit(plan, results=args.results, notify=args.notify)
        print(sweep_text.format_submitted(done, folder, as_json=args.json))
        _print_repeats(args, plan)
        return 0 if done.good else 1
    with terminal.progress(quiet=args.json) as follow:
        ended = api.run(plan, results=args.results, tell=terminal.teller(quiet=args.json), follow=follow)
    print(sweep_text.format_ended(ended, as_json=args.json))
    if not args.json:
        notes.print_answer(ended.folder)
    _print_repeats(args, plan)
    return 0 if ended.good else 1


def _print_repeats(args: argparse.Namespace, plan: "PlannedSweep") -> None:
    """Print what five repeats of comma lists take, whose points run once."""
    several = len(plan.sweep.points) > 1 and max(repeat for repeat, _ in plan.sweep.order) == 0
    if several and plan.sweep.study == "adhoc" and not args.json:
        print(sweep_text.format_repeats(plan.sweep, args.overrides, args.results, args.config_dir))
