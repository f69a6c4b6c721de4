"""Efficiency against nodes, beside the ideal: what the figures of strong and weak scaling share."""

from typing import Any

from matplotlib.figure import Figure

from analysis.drawing import panels
from analysis.drawing.curves import Quantity, curves
from analysis.drawing.panels import Group
from analysis.questions import Question
from analysis.results import Results
from analysis.scaling.comparable import Law
from analysis.scaling.curves import Curve, Point
from analysis.scaling.curves import curves as scaling_curves
from analysis.summary import Row

_EFFICIENCY = Quantity(
    "efficiency",
    "efficiency",
    low="efficiency_low",
    high="efficiency_high",
    across="nodes",
    across_label="nodes",
    ideal=1.0,
)
_NOTE = (
    "1 at the base, the smallest node count with a number, by definition: its bar is its own interval, and is part of "
    "those of the others as well. Hollow: no interval is known."
)


def applies(results: Results, law: Law) -> bool:
    """Whether a set has two node counts with a number to compare."""
    return any(_measured(curve) for curve in scaling_curves(results) if curve.law == law)


def figure(results: Results, law: Law) -> Figure:
    """Draw the efficiency of every curve of a law, a panel per work that is held equal."""
    groups: dict[tuple[Any, ...], Group] = {}
    for curve in scaling_curves(results):
        if curve.law == law:
            shared = _question(curve)
            group = groups.setdefault(tuple(shared.values()), Group(shared, []))
            groups[tuple(shared.values())] = group._replace(rows=[*group.rows, *_rows(curve)])
    return curves(panels.grid(list(groups.values())), _EFFICIENCY, lambda rows: _NOTE)


def _measured(curve: Curve) -> bool:
    return sum(point.efficiency is not None for point in curve.points) > 1


def _question(curve: Curve) -> Question:
    """Return what the points of a curve share, without the engine."""
    row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
    return {**panels.question_of(row), "nodes": None, "micro": row["micro"] if equal else 0, "held": _held(curve)}


def _held(curve: Curve) -> str:
    row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
    words = [f"micro {row['micro']}" if equal else "best micro"]
    if curve.law == "strong":
        words.append(f"global batch {row['global_batch']}")
    elif row["accumulation"] > 1:
        words.append(f"× {row['accumulation']} accumulated")
    return " · ".join(words)


def _rows(curve: Curve) -> list[Row]:
    return [_row(curve, point) for point in curve.points]


def _row(curve: Curve, point: Point) -> Row:
    """Return a point as a row of a summary; at the base its own interval, of its throughput."""
    found = point.efficiency
    low, high = (found.interval.low, found.interval.high) if found and found.interval else (None, None)
    row = point.row
    if point is curve.base and row["tokens_per_s_low"] is not None:
        low, high = (row[f"tokens_per_s_{end}"] / row["tokens_per_s"] for end in ("low", "high"))
    told = {"efficiency": found.value if found else None, "efficiency_low": low, "efficiency_high": high}
    return {**row, **told, "accumulation": 1}  # strong scaling accumulates less on more nodes: one curve all the same
