"""Lines that several verbs print: notes on standard error, and the answer of a whole study."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import make_printable
from bench.formatting import format_count
from bench.store import Unreadable
from bench.study import Pair


def print_chosen(chosen: Sequence[Pair]) -> None:
    """Say what was chosen for a point that runs on a CPU."""
    if chosen:
        shown = " ".join(f"{key}={value}" for key, value in chosen)
        print(f"on a CPU, where nothing else is given: {shown}", file=sys.stderr, flush=True)


def print_unreadable(found: Sequence[Unreadable]) -> None:
    """Say which files count as not there."""
    if found:
        print(
            f"zeroscale: cannot be read, and counts as not there: {format_count(len(found), 'file')}", file=sys.stderr
        )
    for error in found:
        print(f"  {make_printable(str(error))}", file=sys.stderr)


def print_answer(folder: Path) -> None:
    """Print the answer of a study in one to five sentences, runs of earlier sweeps included."""
    from analysis import results
    from analysis.answer import describe_answer  # here: pandas takes longer to import than most commands to run

    for line in describe_answer(results.read([folder])):
        print(line)
