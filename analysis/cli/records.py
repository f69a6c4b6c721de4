"""The records that a verb reads: where they lie, and that there are any."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UserError
from bench.files import RESULTS

if TYPE_CHECKING:
    from analysis.results import Results


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folders to read."""
    help_text = f"default: {RESULTS}"
    parser.add_argument("paths", nargs="*", type=Path, default=[RESULTS], metavar="DIR", help=help_text)


def read(paths: Sequence[Path]) -> "Results":
    """Return every record at or below `paths`; what is none is named on standard error. UserError where none is."""
    from analysis import results

    found = results.read(paths)
    results.warn(found)
    if found.table.empty:
        raise missing(paths)
    return found


def missing(paths: Sequence[Path]) -> UserError:
    """Return the error to raise where there is no record."""
    return UserError(" ".join(map(str, paths)), "no record below", "give a results folder, or measure first")
