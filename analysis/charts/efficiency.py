"""Efficiency against nodes, beside the ideal: what the figures of strong and weak scaling share."""

from typing import Any

from analysis.charts import Chart
from analysis.charts.curves import PlottedQuantity, build_chart
from analysis.charts.groups import QuestionGroup, build_question
from analysis.questions import Question
from analysis.results import Results
from analysis.scaling.comparable import Law
from analysis.scaling.curves import CurvePoint, ScalingCurve, build_curves
from analysis.summary import Row

_EFFICIENCY = PlottedQuantity("efficiency", "efficiency", across="nodes", across_label="nodes", ideal=1.0)
_NOTE = (
    "1 at the base, the smallest node count with a number, by definition: its bar is its own interval, and is part of "
    "those of the others as well."
)


def has_scaling(results: Results, law: Law) -> bool:
    """Whether a set has two node counts with a number to compare."""
    return any(_has_two_numbers(curve) for curve in build_curves(results) if curve.law == law)


def build_efficiency_chart(results: Results, law: Law) -> Chart:
    """Return the efficiency of every curve of a law, a panel per work that is held equal."""
    groups: dict[tuple[Any, ...], QuestionGroup] = {}
    for curve in build_curves(results):
        if curve.law == law:
            shared = _build_question(curve)
            group = groups.setdefault(tuple(shared.values()), QuestionGroup(shared, []))
            groups[tuple(shared.values())] = group._replace(rows=[*group.rows, *_build_rows(curve)])
    return build_chart(list(groups.values()), _EFFICIENCY, _NOTE)


def _has_two_numbers(curve: ScalingCurve) -> bool:
    return sum(point.efficiency is not None for point in curve.points) > 1


def _build_question(curve: ScalingCurve) -> Question:
    """Return what the points of a curve share, without the engine."""
    row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
    return {
        **build_question(row),
        "nodes": None,
        "micro": row["micro"] if equal else 0,
        "held": _describe_fixed_work(curve),
    }


def _describe_fixed_work(curve: ScalingCurve) -> str:
    row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
    parts = [f"micro {row['micro']}" if equal else "best micro"]
    if curve.law == "strong":
        parts.append(f"global batch {row['global_batch']}")
    elif row["accumulation"] > 1:
        parts.append(f"× {row['accumulation']} accumulated")
    return " · ".join(parts)


def _build_rows(curve: ScalingCurve) -> list[Row]:
    return [_build_efficiency_row(curve, point) for point in curve.points]


def _build_efficiency_row(curve: ScalingCurve, point: CurvePoint) -> Row:
    """Return a point as a row of a summary; at the base its own interval, of its throughput."""
    found = point.efficiency
    low, high = (found.interval.low, found.interval.high) if found and found.interval else (None, None)
    row = point.row
    if point is curve.base and row["tokens_per_s_low"] is not None:
        low, high = (row[f"tokens_per_s_{end}"] / row["tokens_per_s"] for end in ("low", "high"))
    cells = {"efficiency": found.value if found else None, "efficiency_low": low, "efficiency_high": high}
    return {**row, **cells, "accumulation": 1}  # strong scaling accumulates less on more nodes: one curve all the same
