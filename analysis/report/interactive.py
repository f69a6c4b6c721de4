"""Which interactive figures a set of runs has: throughput, step time, memory, and scaling where node counts differ."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from analysis.plotting import panels
from analysis.questions import Question, describe_series
from analysis.report.charts import (
    MICRO,
    NODES,
    RATE,
    STEP,
    Chart,
    ChartGroup,
    ChartQuantity,
    Page,
    build_chart,
    build_memory_quantity,
    build_row_key,
)
from analysis.scaling.comparable import Law
from analysis.scaling.curves import CurvePoint, ScalingCurve
from analysis.summary import Row

_INTERVALS = (
    "Bars are intervals; hover tells their kind, level and n. Hollow: none is known. A bar that leaves its panel "
    "reaches beyond."
)
_SCALING = f"1 is the base, the smallest node count with a number, by definition. {_INTERVALS}"
_EFFICIENCY = ChartQuantity("efficiency", "efficiency", format="~g")


def build_charts(summary: pd.DataFrame, curves: Sequence[ScalingCurve], page: Page) -> list[Chart]:
    """Return the figures of a summary, those only in which there is something to see."""
    by_question, by_micro = panels.group_by_question(summary), panels.group_by_micro(summary)
    peak = build_memory_quantity([row for group in by_question for row in group.rows])
    found = [
        build_chart(
            "throughput",
            "Throughput by micro-batch",
            _INTERVALS,
            _build_groups(by_question, _get_model),
            MICRO,
            RATE,
            page,
        ),
        build_chart(
            "step_time",
            "Step time by engine and nodes",
            _INTERVALS,
            _build_groups(by_micro, _get_model),
            NODES,
            STEP,
            page,
        ),
        build_chart(
            "memory",
            "Memory by engine and micro-batch",
            "Peak over steady steps, on the rank with most.",
            _build_groups(by_question, _get_model),
            MICRO,
            peak,
            page,
        ),
        *(_build_scaling_chart(law, curves, page) for law in ("weak", "strong")),
    ]
    return [one for one in found if one.panels]


def _build_groups(found: Sequence[panels.QuestionGroup], scale_key: Callable[[Question], Any]) -> list[ChartGroup]:
    ordered = panels.sort_groups(found)
    all_questions = [group.question for group in ordered]
    return [
        ChartGroup(" · ".join(panels.describe_question(one.question, all_questions)), one.rows, scale_key(one.question))
        for one in ordered
    ]


def _get_model(question: Question) -> Any:
    return question["model"]


def _build_scaling_chart(law: Law, curves: Sequence[ScalingCurve], page: Page) -> Chart:
    """Return the efficiency of every curve of a law, a panel per work that is held equal."""
    groups: dict[tuple[Any, ...], panels.QuestionGroup] = {}
    for curve in curves:
        if curve.law == law and any(point.efficiency for point in curve.points):
            question = {
                **panels.build_question(curve.points[0].row),
                "nodes": None,
                "held": _describe_fixed_work(curve),
            }
            known = groups.get(tuple(question.values()), panels.QuestionGroup(question, ()))
            rows = [row for row in _list_point_rows(curve) if build_row_key(row) in page.places]
            groups[tuple(question.values())] = known._replace(rows=[*known.rows, *rows])
    found = _build_groups([group for group in groups.values() if group.rows], _get_model)
    return build_chart(f"{law}_scaling", f"{law.title()} scaling", _SCALING, found, NODES, _EFFICIENCY, page)


def _describe_fixed_work(curve: ScalingCurve) -> str:
    """Return the name of a curve without its engine."""
    return curve.name.removeprefix(f"{describe_series(_drop_accumulation(curve.points[0].row))}, ")


def _list_point_rows(curve: ScalingCurve) -> Iterable[Row]:
    return (_drop_accumulation(point.row) | _build_efficiency_cells(point) for point in curve.points)


def _drop_accumulation(row: Row) -> Row:
    """Return a row whose accumulation does not name it: strong scaling accumulates less on more nodes."""
    return row | {"accumulation": 1}


def _build_efficiency_cells(point: CurvePoint) -> Row:
    found = point.efficiency
    ends = found.interval if found else None
    return {
        "efficiency": found.value if found else None,
        "efficiency_low": ends.low if ends else None,
        "efficiency_high": ends.high if ends else None,
    }
