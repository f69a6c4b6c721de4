"""A comparison as text for a terminal."""

import io
import sys

from analysis.compare import SetComparison
from analysis.compare.phrases import HEAD, RIGHT, build_cells, describe_intervals, describe_sides, format_headline
from bench.errors import make_printable

_STYLES = {"broken": "bold red", "open": "yellow"}
_WIDE = 10_000  # where the output goes to a file or another program, a row stays a line


def to_text(compared: SetComparison) -> str:
    """Return a table as wide as the terminal, or as wide as it is where the output goes elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEAD:
        shown.add_column(Text(name), justify="right" if name in RIGHT else "left", overflow="fold")
    for name, line in compared.lines:
        style = _STYLES.get(line.held or "", "")
        shown.add_row(*(Text(make_printable(cell), style) for cell in build_cells(name, line)))
    terminal, buffer = sys.stdout.isatty(), io.StringIO()
    width = Console().width if terminal else _WIDE
    console = Console(file=buffer, width=width, highlight=False, force_terminal=terminal)
    console.print(Text(make_printable(describe_sides(compared))))
    console.print(shown)
    console.print(Text(describe_intervals(compared)), soft_wrap=True)
    console.print(Text(format_headline(compared), "bold"), soft_wrap=True)
    return buffer.getvalue()
