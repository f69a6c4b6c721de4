"""A comparison as text for a terminal."""

import io
import sys

from analysis.compare import Compared
from analysis.compare.words import HEAD, RIGHT, cells, headline, level, sides
from bench.errors import printable

_STYLES = {"broken": "bold red", "open": "yellow"}
_WIDE = 10_000  # where the output goes to a file or another program, a row stays a line


def to_text(compared: Compared) -> str:
    """Return a table as wide as the terminal, or as wide as it is where the output goes elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEAD:
        shown.add_column(Text(name), justify="right" if name in RIGHT else "left", overflow="fold")
    for name, line in compared.lines:
        style = _STYLES.get(line.held or "", "")
        shown.add_row(*(Text(printable(cell), style) for cell in cells(name, line)))
    terminal, buffer = sys.stdout.isatty(), io.StringIO()
    width = Console().width if terminal else _WIDE
    console = Console(file=buffer, width=width, highlight=False, force_terminal=terminal)
    console.print(Text(printable(sides(compared))))
    console.print(shown)
    console.print(Text(level(compared)), soft_wrap=True)
    console.print(Text(headline(compared), "bold"), soft_wrap=True)
    return buffer.getvalue()
