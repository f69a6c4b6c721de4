"""Commands that read records. Each command is a small module, imported when the command is called."""

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
    """Add the argument that names the results folders to read."""
    help_text = f"results folders, or zip archives of them; default: {RESULTS}"
    parser.add_argument("paths", nargs="*", type=Path, default=[RESULTS], metavar="DIR", help=help_text)


def add_format(parser: argparse.ArgumentParser, choices: Sequence[str] = ("text", "md", "csv", "json")) -> None:
    """Add the argument that chooses the format of the output."""
    parser.add_argument("--format", choices=choices, default="text", help="output format; default: %(default)s")


def add_out(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Add the argument for the output folder. The default is a subfolder of `folder`, named after the study."""
    help_text = f"output folder; default: {folder}/<study>, or {folder}/all for several studies"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help_text)


def choose_out(out: Path | None, folder: Path, found: "Results") -> Path:
    """Return the output folder for these runs: `out` or, if it is None, the default folder below `folder`."""
    studies = set(found.table["study"])
    return out or folder / (studies.pop() if len(studies) == 1 else "all")


def read_records(paths: Sequence[Path], show: Callable[[terminal.Progress], None] | None = None) -> "Results":
    """Return every record at or below `paths`. Files that are not records are named on standard error.

    On a terminal, progress is shown. If the command already has a progress line, `show` updates that line. Raise
    UserError if no record is found.
    """
    from analysis import results

    # If the command already shows a progress line, reading reports its progress on that line.
    with contextlib.nullcontext(show) if show else terminal.progress(quiet=False) as follow:
        found = results.read(
            paths, lambda read, files: follow(terminal.Progress(f"reading {read:,} of {files:,} records", read / files))
        )
    results.warn(found)
    if found.table.empty:
        raise report_missing(paths)
    return found


def report_missing(paths: Sequence[Path]) -> UserError:
    """Return the UserError for folders that contain no record."""
    return UserError(" ".join(map(str, paths)), "contains no record", "give a results folder, or measure first")


@contextlib.contextmanager
def reporting_unwritable(out: Path) -> Iterator[None]:
    """Context manager that turns an OSError on writing below the folder `out` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {out}", f"cannot be written ({error.strerror})", "choose another --out") from error
