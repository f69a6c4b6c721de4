"""A history as text for a terminal."""

import io
import sys

from analysis.formats.numbers import MISSING
from analysis.history.phrases import describe_axis, describe_change, describe_doubts, describe_places
from analysis.history.series import History
from analysis.history.table import list_changes
from bench.errors import make_printable

HEAD = ("configuration", "time per sample", "between", "surely within", "also")
_WIDE = 10_000  # where the output goes to a file or another program, a row stays a line


def to_text(history: History) -> str:
    """Return the changes, the latest first, in a table as wide as the terminal, and what they hold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEAD:
        shown.add_column(Text(name), overflow="fold")
    for series, change in list_changes(history):
        likely, surely = describe_places(history, change)
        cells = (series.name, describe_change(change), likely, surely or MISSING, change.also or MISSING)
        style = "bold red" if change.change.size > 0 else ""
        shown.add_row(*(Text(make_printable(cell), style) for cell in cells))
    terminal, buffer = sys.stdout.isatty(), io.StringIO()
    width = Console().width if terminal else _WIDE
    console = Console(file=buffer, width=width, highlight=False, force_terminal=terminal)
    console.print(Text(make_printable(describe_axis(history))), soft_wrap=True)
    if shown.rows:
        console.print(shown)
    for doubt in describe_doubts(history):
        console.print(Text(doubt), soft_wrap=True)
    return buffer.getvalue()
