"""Efficiency against nodes, beside the ideal: what the figures of strong and weak scaling share."""

from typing import Any

from analysis.drawing import Picture
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.drawing.groups import QuestionGroup, build_question
from analysis.results import Results
from analysis.scaling.curves import CurvePoint, Law, ScalingCurve, build_curves
from analysis.summary import Row

_EFFICIENCY = PlottedQuantity("efficiency", "efficiency", across="nodes", across_label="nodes", ideal=1.0)
_NOTE = (
    "1 at the smallest node count with a number, by definition. Its bar is its own interval, which is part of those of "
    "the others as well."
)


def build_efficiency(results: Results, law: Law) -> Picture:
    """Return the efficiency of every curve of a law, a panel per work that is held equal; nothing where no curve has
    two numbers to compare."""
    curves = [curve for curve in build_curves(results) if curve.law == law]
    if all(sum(point.efficiency is not None for point in curve.points) < 2 for curve in curves):
        return Picture()
    groups: dict[tuple[Any, ...], QuestionGroup] = {}
    for curve in curves:
        row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
        micro, held = row["micro"] if equal else 0, _describe_fixed_work(curve)
        shared = {**build_question(row), "nodes": None, "micro": micro, "held": held}
        group = groups.setdefault(tuple(shared.values()), QuestionGroup(shared, []))
        rows = [_build_row(curve, point) for point in curve.points]
        groups[tuple(shared.values())] = group._replace(rows=[*group.rows, *rows])
    return build_picture(results, list(groups.values()), _EFFICIENCY, _NOTE)


def _describe_fixed_work(curve: ScalingCurve) -> str:
    row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
    parts = [f"micro {row['micro']}" if equal else "best micro"]
    if curve.law == "strong":
        parts.append(f"global batch {row['global_batch']}")
    elif row["accumulation"] > 1:
        parts.append(f"× {row['accumulation']} accumulated")
    return " · ".join(parts)


def _build_row(curve: ScalingCurve, point: CurvePoint) -> Row:
    """Return a point as a row of a summary; at the base its own interval, of its throughput."""
    found = point.efficiency
    low, high = (found.interval.low, found.interval.high) if found and found.interval else (None, None)
    row = point.row
    if point is curve.base and row["tokens_per_s_low"] is not None:
        low, high = (row[f"tokens_per_s_{end}"] / row["tokens_per_s"] for end in ("low", "high"))
    cells = {"efficiency": found.value if found else None, "efficiency_low": low, "efficiency_high": high}
    return {**row, **cells, "accumulation": 1}  # strong scaling accumulates less on more nodes: one curve all the same
