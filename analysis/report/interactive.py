"""Which interactive figures a set of runs has: throughput, step time, memory, and scaling where node counts differ."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from analysis.drawing import panels
from analysis.questions import Question, series
from analysis.report.charts import MICRO, NODES, RATE, STEP, Chart, Group, Page, Quantity, chart, key_of, memory
from analysis.scaling.comparable import Law
from analysis.scaling.curves import Curve, Point
from analysis.summary import Row

_INTERVALS = "Bars are intervals; hover tells their kind, level and n. Hollow: none is known."
_SCALING = f"1 is the base, the smallest node count with a number, by definition. {_INTERVALS}"
_EFFICIENCY = Quantity("efficiency", "efficiency", format="~g")


def charts(summary: pd.DataFrame, curves: Sequence[Curve], page: Page) -> list[Chart]:
    """Return the figures of a summary, those only in which there is something to see."""
    by_question, by_micro = panels.by_question(summary), panels.by_micro(summary)
    peak = memory([row for group in by_question for row in group.rows])
    found = [
        chart("throughput", "Throughput by micro-batch", _INTERVALS, _groups(by_question, _place), MICRO, RATE, page),
        chart("step_time", "Step time by engine and nodes", _INTERVALS, _groups(by_micro, _work), NODES, STEP, page),
        chart("memory", "Memory by engine and micro-batch", "Peak over steady steps, on the rank with most.",
              _groups(by_question, _model), MICRO, peak, page),
        *(_scaling(law, curves, page) for law in ("weak", "strong")),
    ]  # fmt: skip
    return [one for one in found if one.panels]


def _groups(found: Sequence[panels.Group], alike: Callable[[Question], Any]) -> list[Group]:
    ordered = panels.ordered(found)
    among = [group.question for group in ordered]
    return [Group(" · ".join(panels.words(one.question, among)), one.rows, alike(one.question)) for one in ordered]


def _place(question: Question) -> Any:
    return question["model"], question["nodes"], question["devices_per_node"]


def _work(question: Question) -> Any:
    return question["model"], question["micro"]


def _model(question: Question) -> Any:
    return question["model"]


def _scaling(law: Law, curves: Sequence[Curve], page: Page) -> Chart:
    """Return the efficiency of every curve of a law, a panel per work that is held equal."""
    groups: dict[tuple[Any, ...], panels.Group] = {}
    for curve in curves:
        if curve.law == law and any(point.efficiency for point in curve.points):
            question = {**panels.question_of(curve.points[0].row), "nodes": None, "held": _held(curve)}
            known = groups.get(tuple(question.values()), panels.Group(question, ()))
            rows = [row for row in _rows(curve) if key_of(row) in page.places]
            groups[tuple(question.values())] = known._replace(rows=[*known.rows, *rows])
    found = _groups([group for group in groups.values() if group.rows], _model)
    return chart(f"{law}_scaling", f"{law.title()} scaling", _SCALING, found, NODES, _EFFICIENCY, page)


def _held(curve: Curve) -> str:
    """Return the name of a curve without its engine."""
    return curve.name.removeprefix(f"{series(_alike(curve.points[0].row))}, ")


def _rows(curve: Curve) -> Iterable[Row]:
    return (_alike(point.row) | _efficiency(point) for point in curve.points)


def _alike(row: Row) -> Row:
    """Return a row whose accumulation does not name it: strong scaling accumulates less on more nodes."""
    return row | {"accumulation": 1}


def _efficiency(point: Point) -> Row:
    found = point.efficiency
    ends = found.interval if found else None
    return {
        "efficiency": found.value if found else None,
        "efficiency_low": ends.low if ends else None,
        "efficiency_high": ends.high if ends else None,
    }
