"""A quantity against micro-batch: a curve per engine, a panel per question, and a strip below zero that says, engine by
engine, why a number is not there."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, ScalarFormatter

from analysis import drawing
from analysis.drawing import Panel
from analysis.questions import series
from analysis.summary import Row

_SPREAD = 0.5  # of the room between two micro-batches, so that intervals stand side by side
_LINE = 0.075  # height of one line of the strip, as a part of the height above zero
_EDGE = 0.5  # of the room between two micro-batches, left and right of the outer ones


class Quantity(NamedTuple):
    """What is drawn: columns of the summary, divided by `unit`; `low` and `high` empty where it has no interval."""

    column: str
    label: str
    low: str = ""
    high: str = ""
    unit: float = 1.0
    formatter: Callable[[], Formatter] = ScalarFormatter
    alike: Sequence[str] = ("model",)  # questions that agree in these share their scale


class Number(NamedTuple):
    """One number of a configuration, in the unit drawn."""

    value: float
    interval: tuple[float, float] | None


def curves(summary: pd.DataFrame, quantity: Quantity, note: Callable[[Sequence[Row]], str]) -> Figure:
    """Draw `quantity` of every configuration of a summary; `note` says how to read it, below."""
    drawn, panels = drawing.panels(summary)
    labels = sorted({series(row) for panel in panels for row in panel.rows})
    for panel in panels:
        for index, label in enumerate(labels):
            _curve(panel, quantity, label, (index + 0.5) / len(labels) - 0.5, index)
        _scale(panel, quantity, labels, [other for other in panels if _alike(panel, other, quantity)])
    if panels:
        panels[0].axes.set_ylabel(quantity.label)
    keys = [drawing.key(label, index) for index, label in enumerate(labels)]
    drawing.legend(drawn, keys, note([row for panel in panels for row in panel.rows]))
    return drawn


def _curve(panel: Panel, quantity: Quantity, label: str, place: float, index: int) -> None:
    """Draw one engine: a point for every number, a line between neighbours that both have exactly one."""
    cells = [_numbers(cell, quantity) for cell in _cells(panel, label)]
    xs = [position + _SPREAD * place for position in range(len(cells))]
    for x, numbers in zip(xs, cells, strict=True):
        for number in numbers:
            _point(panel, number, x, index, hollow=bool(quantity.low) and number.interval is None)
    for (x, here), (other, there) in itertools.pairwise(zip(xs, cells, strict=True)):
        if len(here) == len(there) == 1:
            panel.axes.plot([x, other], [here[0].value, there[0].value], color=drawing.colour(index), zorder=2)


def _point(panel: Panel, number: Number, x: float, index: int, *, hollow: bool) -> None:
    colour = drawing.colour(index)
    if number.interval:
        panel.axes.vlines(x, *number.interval, color=colour, linewidth=0.9)
    fill = "none" if hollow else colour
    panel.axes.plot(x, number.value, markerfacecolor=fill, **drawing.point(index), zorder=3)


def _scale(panel: Panel, quantity: Quantity, labels: Sequence[str], alike: Sequence[Panel]) -> None:
    """Begin at zero, end where the highest of the panels alike ends, and leave room below for what has no number."""
    axes, micros = panel.axes, _micros(panel)
    known = [number for other in alike for number in _numbers(other.rows, quantity)]
    top = 1.08 * max((max((number.value, *(number.interval or ()))) for number in known), default=1.0) or 1.0
    lines = max(len(_gaps(other, quantity, labels)) for other in alike)
    axes.set_ylim(-_LINE * lines * top, top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top] if known else [])
    axes.yaxis.set_major_formatter(quantity.formatter())
    axes.axhline(0, color=drawing.INK, linewidth=0.6)
    axes.set_xlim(-_EDGE, len(micros) - 1 + _EDGE)
    axes.set_xticks(range(len(micros)), [str(micro) for micro in micros])
    axes.set_xlabel("micro-batch")
    for line, label in enumerate(_gaps(panel, quantity, labels)):
        _gap(panel, quantity, label, -_LINE * (line + 0.5) * top, labels.index(label))


def _gap(panel: Panel, quantity: Quantity, label: str, y: float, index: int) -> None:
    """Write one line of the strip: the engine's marker, and what happened at each micro-batch without a number."""
    beside = panel.axes.get_yaxis_transform()  # the marker stands where a tick's label would
    panel.axes.plot(-0.035, y, **drawing.point(index), markersize=3, transform=beside, clip_on=False, gid="strip")
    for position, cell in enumerate(_cells(panel, label)):
        if not _numbers(cell, quantity):
            drawing.write_reason(panel.axes, position, y, cell[0] if cell else None, drawing.colour(index))


def _gaps(panel: Panel, quantity: Quantity, labels: Sequence[str]) -> list[str]:
    """Return the engines of a panel that lack a number at some micro-batch that another one was asked at."""
    asked = [label for label in labels if any(_cells(panel, label))]
    return [label for label in asked if not all(_numbers(cell, quantity) for cell in _cells(panel, label))]


def _cells(panel: Panel, label: str) -> list[list[Row]]:
    return [[row for row in panel.rows if series(row) == label and row["micro"] == m] for m in _micros(panel)]


def _micros(panel: Panel) -> list[int]:
    return sorted({row["micro"] for row in panel.rows})


def _numbers(rows: Sequence[Row], quantity: Quantity) -> list[Number]:
    known = [row for row in rows if row[quantity.column] is not None]
    return [Number(row[quantity.column] / quantity.unit, _interval(row, quantity)) for row in known]


def _interval(row: Row, quantity: Quantity) -> tuple[float, float] | None:
    if not quantity.low or row[quantity.low] is None:
        return None
    return row[quantity.low] / quantity.unit, row[quantity.high] / quantity.unit


def _alike(one: Panel, other: Panel, quantity: Quantity) -> bool:
    return all(one.question[part] == other.question[part] for part in quantity.alike)
