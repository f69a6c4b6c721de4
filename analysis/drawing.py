"""What the figures share: the look for print, one panel per question, and how cells without a number are shown.

Figures are built without pyplot: no state that outlives them, no display.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.questions import QUESTION, Question, by_question, name
from analysis.summary import Row

INK = "#1b1b1d"
"""Of everything that is not data. The report replaces it by the page's own colour."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's palette, told apart by colour-blind readers; without its yellow, too faint for a line on paper."""
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
    "svg.fonttype": "none", "pdf.fonttype": 42, "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
"""Text stays text in SVG and PDF, so that it can be searched and edited."""

styled = matplotlib.rc_context(STYLE)
"""Decorates what draws or saves a figure, so that it looks the same whatever the caller's settings are."""

_COLUMNS, _WIDTH_IN, _HEIGHT_IN = 3, 7.2, 2.5  # 7.2 in is the text width of two columns in print
_PER_LINE = 6  # entries of a legend
_FAILURES = {"oom": "OOM", "host_oom": "host OOM"}


class Panel(NamedTuple):
    """The axes of one question and the rows of the summary that answer it."""

    axes: Axes
    question: Question
    rows: Sequence[Row]


def panels(summary: pd.DataFrame) -> tuple[Figure, list[Panel]]:
    """Return a figure with a titled panel per question."""
    questions = sorted(by_question(summary), key=lambda asked: _place(asked[0]))
    columns = {0: 1, 1: 1, 2: 2, 4: 2}.get(len(questions), _COLUMNS)
    lines = math.ceil(len(questions) / columns) or 1
    width = _WIDTH_IN if columns > 1 else _WIDTH_IN * 0.6
    figure = Figure(figsize=(width, 0.6 + _HEIGHT_IN * lines), layout="constrained")
    drawn: list[Panel] = []
    for index, (question, rows) in enumerate(questions):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.set_title(name(question, [asked for asked, _ in questions]))
        drawn.append(Panel(axes, question, rows))
    return figure, drawn


def write_reason(axes: Axes, x: float, y: float, row: Row | None, colour: str) -> None:
    """Write why there is no number at a place: how the run ended, or that there was none."""
    if row is None:
        text = "not run"
    elif row["outcome"] == "ok":
        text = "unknown"
    else:
        text = _FAILURES.get(row["outcome"], row["outcome"].replace("_", " "))
    style = {"color": INK, "alpha": 0.6} if row is None else {"color": colour, "fontweight": "bold"}
    axes.text(x, y, text, ha="center", va="center", fontsize=5.5, **style)


def legend(figure: Figure, handles: Sequence[Line2D], note: str) -> None:
    """Put one legend above all panels, and below them how to read them."""
    if handles:
        figure.legend(handles=list(handles), loc="outside upper left", ncols=min(len(handles), _PER_LINE))
    figure.supxlabel(note, x=0.01, ha="left", fontsize=6.5, alpha=0.75)


def key(label: str, index: int) -> Line2D:
    """Return the legend's entry of the series that is drawn as number `index`."""
    return Line2D([], [], label=label, **(point(index) | {"linestyle": "-"}))


def point(index: int) -> dict[str, Any]:
    """Return how a point of series number `index` looks."""
    return {"color": colour(index), "marker": MARKERS[index % len(MARKERS)], "linestyle": "none"}


def colour(index: int) -> str:
    """Return the colour of series number `index`; they repeat, with other markers beside them."""
    return COLOURS[index % len(COLOURS)]


def interval_note(rows: Sequence[Row]) -> str:
    """Say which intervals a figure of `rows` draws."""
    kinds = sorted({(row["interval_kind"], row["interval_level"]) for row in rows if row["interval_kind"]})
    told = " or ".join(f"{100 * level:.0f} %, {kind}" for kind, level in kinds)
    return f"Bars: interval ({told}). Hollow: none is known." if told else "No interval is known."


def _place(question: Question) -> tuple[Any, ...]:
    """Models apart, then precisions and the rest, with the ranks counting upwards beside each other."""
    others = [str(question[part]) for part in QUESTION if part not in ("model", "environment_id")]
    nodes, devices = question["nodes"], question["devices_per_node"]
    return question["model"], question["precision"], nodes * devices, nodes, others
