"""The verbs that read records: one small file each, loaded when the verb is called."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core import terminal
from bench.core.errors import UserError
from bench.core.files import RESULTS

if TYPE_CHECKING:
    from analysis.results import Results


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the folders to read."""
    help_text = f"results folders, or zip archives of them; default: {RESULTS}"
    parser.add_argument("paths", nargs="*", type=Path, default=[RESULTS], metavar="DIR", help=help_text)


def read_records(paths: Sequence[Path], show: Callable[[terminal.Progress], None] | None = None) -> "Results":
    """Return every record at or below `paths`; other files are named on standard error.

    A terminal shows the progress, on the line of `show` if the verb has one. UserError if there is no record.
    """
    from analysis import results

    # A verb with a progress line of its own goes on using it while records are read.
    with contextlib.nullcontext(show) if show else terminal.progress(quiet=False) as follow:
        found = results.read(
            paths, lambda read, files: follow(terminal.Progress(f"reading {read:,} of {files:,} records", read / files))
        )
    results.warn(found)
    if found.table.empty:
        raise report_missing(paths)
    return found


def report_missing(paths: Sequence[Path]) -> UserError:
    """Return the error for folders without a record."""
    return UserError(" ".join(map(str, paths)), "no record below", "give a results folder, or measure first")


@contextlib.contextmanager
def reporting_unwritable(out: Path) -> Iterator[None]:
    """Turn a failure to write below `out` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {out}", f"cannot be written ({error.strerror})", "choose another --out") from error
