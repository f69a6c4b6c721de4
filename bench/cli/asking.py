"""What the verbs share that ask for points: arguments, circumstances, and how a point is told."""

import argparse
import json
from pathlib import Path

from bench.config import Request
from bench.spec import config_id
from bench.wording import describe


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every verb that runs points takes."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override of conf/config.yaml")
    parser.add_argument("--dry-run", action="store_true", help="show every point and start nothing")
    parser.add_argument("--json", action="store_true", help="print JSON for another program")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own group files, laid out like conf/")
    parser.add_argument(
        "--results", type=Path, default=Path("results/runs"), metavar="DIR", help="default: %(default)s"
    )


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says how a sweep goes about its points."""
    parser.add_argument(
        "--no-prune",
        action="store_true",
        help="measure also what a smaller micro-batch or a prediction says cannot fit",
    )
    parser.add_argument("--autopilot", action="store_true", help="go on by itself until every point has its answer")
    parser.add_argument("--max-queued", type=_positive, metavar="N", help="at most N of the sweep's jobs in the queue")
    parser.add_argument("--nice", type=int, metavar="N", help="lower the priority of the jobs")
    parser.add_argument("--begin", metavar="WHEN", help="start no job before, as the scheduler takes it: 20:00")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def line(asked: Request) -> str:
    """Describe a point in one line."""
    return describe(asked.spec, config_id(asked.spec))


def as_json(asked: Request) -> str:
    """Return a point with its machine and launcher, for another program."""
    plain = {
        "config_id": config_id(asked.spec),
        "spec": asked.spec.model_dump(mode="json", by_alias=True),
        "machine": asked.machine.model_dump(mode="json"),
        "launcher": {"name": asked.launcher, **asked.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)
