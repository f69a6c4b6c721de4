"""Arguments that several verbs take, each declared once."""

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.errors import UserError
from bench.store import RESULTS

JSON = "print JSON for another program"


def points(parser: argparse.ArgumentParser) -> None:
    """Add what every verb that runs points takes."""
    overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="show every point and start nothing")
    as_json(parser)
    config_dir(parser)
    results(parser)


def overrides(parser: argparse.ArgumentParser, told: str = "override of conf/config.yaml", least: str = "*") -> None:
    parser.add_argument("overrides", nargs=least, default=[], metavar="KEY=VALUE", help=told)


def as_json(parser: argparse.ArgumentParser, told: str = JSON) -> None:
    parser.add_argument("--json", action="store_true", help=told)


def config_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own group files, laid out like conf/")


def results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")


def positive(option: str) -> Callable[[str], int]:
    """Return the type of an option that takes a number of one at least."""

    def number(text: str) -> int:
        if text.isdecimal() and int(text):
            return int(text)
        raise UserError(f"{option} {text}", "not a positive number", "one is the least")

    return number


def study_folder(parser: argparse.ArgumentParser, example: str = "smoke") -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"folder of a study, e.g. {RESULTS / example}")


def autopilot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--autopilot", action="store_true", help="go on by itself until every point has its answer")
