"""The records that a verb reads: where they lie, and that there are any."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core import terminal
from bench.core.errors import UserError
from bench.core.files import RESULTS

if TYPE_CHECKING:
    from analysis.results import Results


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folders to read."""
    help_text = f"results folders, or zip archives of them; default: {RESULTS}"
    parser.add_argument("paths", nargs="*", type=Path, default=[RESULTS], metavar="DIR", help=help_text)


def read(paths: Sequence[Path], show: Callable[[terminal.Progress], None] | None = None) -> "Results":
    """Return every record at or below `paths`; what is none is named on standard error. A terminal shows how many are
    read, by `show` where a verb has a line for it. UserError where there is no record."""
    from analysis import results

    with contextlib.nullcontext(show) if show else terminal.progress(quiet=False) as follow:
        found = results.read(
            paths,
            lambda read, files: follow(terminal.Progress(f"reading {read:,} of {files:,} records", read / files)),
        )
    results.warn(found)
    if found.table.empty:
        raise missing(paths)
    return found


def missing(paths: Sequence[Path]) -> UserError:
    """Return the error to raise where there is no record."""
    return UserError(" ".join(map(str, paths)), "no record below", "give a results folder, or measure first")
