"""Cancel the jobs of one sweep.

  zeroscale cancel results/runs/paper

Points that are running are recorded as cancelled, and `zeroscale resume` can run them again. Jobs
of other sweeps are not cancelled.
"""

import argparse
import json

from bench import api
from bench.cli import options


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser, "paper")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the scheduler accepted the cancellation, or if there was no job to cancel."""
    numbers = api.cancel(args.folder)
    if args.json:
        print(json.dumps({"cancelled": numbers}))
    else:
        print(f"cancelled: {', '.join(numbers)}" if numbers else "this sweep has no jobs in the queue")
    return 0
