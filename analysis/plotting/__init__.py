"""What the figures share: the look for print, the legend, and how cells without a number are shown.

Figures are built without pyplot: no state that outlives them, no display.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.charts import format_reason
from analysis.charts.looks import COLOURS as COLOURS
from analysis.charts.looks import choose_colour, choose_marker
from analysis.summary import Row

INK = "#1b1b1d"
"""Of everything that is not data. The report replaces it by the page's own colour."""

MARKERS = "osD^vPX"

STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 8, "axes.titlesize": 8, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7.5,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": INK, "grid.alpha": 0.12, "grid.linewidth": 0.6,
    "xtick.major.size": 0, "ytick.major.size": 2.5, "ytick.major.width": 0.6,
    "lines.linewidth": 1.2, "lines.markersize": 4.5, "legend.frameon": False,
    "text.parse_math": False,  # a dollar in somebody's option is a dollar
    "svg.fonttype": "none", "pdf.fonttype": 42, "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
"""Text stays text in SVG and PDF, so that it can be searched and edited."""

styled = matplotlib.rc_context(STYLE)
"""Decorates what draws or saves a figure, so that it looks the same whatever the caller's settings are."""

_ENTRY_IN, _LETTER_IN = 0.6, 0.06  # a legend's entry without its letters, and one letter
_NOTE_LETTERS_PER_IN = 20
_REASON, _LEAST, _REASON_LETTER_IN = 5.5, 3.8, 0.055  # points, and width of a letter of the first
_LEGEND_LINE_IN = 0.16


def write_reason(axes: Axes, x: float, y: float, row: Row | None, colour: str, room_in: float = math.inf) -> None:
    """Write why there is no number at a place so wide: how the run ended, or that there was none."""
    text = format_reason(row)
    style = {"color": INK, "alpha": 0.6} if row is None else {"color": colour, "fontweight": "bold"}
    size = min(_REASON, max(_LEAST, _REASON * room_in / (_REASON_LETTER_IN * len(text))))
    axes.text(x, y, text, ha="center", va="center", fontsize=size, **style)


def draw_legend(figure: Figure, handles: Sequence[Artist], *notes: str) -> None:
    """Put one legend above all panels, and below them how to read them; empty notes are none."""
    width = figure.get_figwidth()
    if handles:
        for handle in handles:
            handle.set_label(shorten_text(str(handle.get_label()), int((width - _ENTRY_IN) / _LETTER_IN)))
        entries = [_ENTRY_IN + _LETTER_IN * len(str(handle.get_label())) for handle in handles]
        across = len(entries) if sum(entries) <= width else max(1, int(width / max(entries)))
        figure.set_figheight(figure.get_figheight() + _LEGEND_LINE_IN * ((len(entries) - 1) // across))
        figure.legend(handles=list(handles), loc="outside upper left", ncols=across)
    said = textwrap.wrap(" ".join(note for note in notes if note), int(_NOTE_LETTERS_PER_IN * width))
    figure.supxlabel("\n".join(said), x=0.01, ha="left", fontsize=6.5, alpha=0.75)


def shorten_text(text: str, letters: int) -> str:
    """Return a text that has at most so many letters."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def build_legend_entry(label: str, index: int) -> Line2D:
    """Return the legend's entry of the series that is drawn as number `index`."""
    return Line2D([], [], label=label, **(choose_marker_style(index) | {"linestyle": "-"}))


def choose_marker_style(index: int) -> dict[str, Any]:
    """Return how a point of series number `index` looks."""
    return {"color": choose_colour(index), "marker": MARKERS[choose_marker(index)], "linestyle": "none"}


def format_interval_note(kinds: Sequence[str]) -> str:
    """Say which kinds of intervals a figure draws."""
    if not kinds:
        return "No interval is known."
    return f"Bars: interval ({' or '.join(kinds)}). Hollow: none is known. A bar that leaves its panel reaches beyond."
