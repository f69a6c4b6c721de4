"""Measure every point of a study, or of comma lists: here one after the other, or submitted to a scheduler.

  zeroscale sweep study=smoke
  zeroscale sweep model=tiny engine=ddp,zero1,zero2,zero3 batch.micro=2,4,8 --dry-run
  zeroscale sweep study=paper launcher=slurm --dry-run
  zeroscale sweep study=strong_scaling launcher=slurm --autopilot

Comma lists without a study take, on a CPU, the sizes and the window of the smoke study, as `zeroscale run` does.
Points that already have a final answer on this machine in this environment are skipped, so that a sweep that was
interrupted goes on where it ended. A point that is predicted far out of memory is recorded as infeasible and not run,
unless `--no-prune` is given. With a scheduler the command returns at once: `zeroscale status` shows how it goes.
"""

import argparse
import sys
from pathlib import Path

from bench import launchers
from bench.cli import asking, listing, planning
from bench.cli.foretold import Foretold
from bench.cli.here import Asked, Here
from bench.dispatch.feed import feed
from bench.sweep import asked


def arguments(parser: argparse.ArgumentParser) -> None:
    asking.arguments(parser)
    asking.sweep_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point has a final answer and every answer is `ok`; with a scheduler, if it took the jobs."""
    sweep, expansion = planning.sweep(args)
    folder: Path = args.results / sweep.study
    if args.dry_run:
        print(listing.as_json(sweep) if args.json else listing.as_text(sweep, expansion, folder))
        return 0
    asked.write(folder, sweep)
    if launchers.load(str(sweep.launcher["name"])).QUEUES:
        for line in Foretold(sweep).warnings():
            print(line, file=sys.stderr)
        print(listing.fed(feed(folder, autopilot=args.autopilot), folder, as_json=args.json))
        return 0
    here = Here(folder, [Asked(key, sweep, point) for key, point in sweep.wanted()], quiet=args.json, retry=True)
    good = here.run()
    print(here.summary(args.json))
    return 0 if good else 1
