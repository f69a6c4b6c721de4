"""A column of the summary against micro-batch or nodes: a curve per series, a panel per group of rows."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from analysis.charts import Chart, ChartCurve, ChartGap, ChartInterval, ChartPanel, ChartPoint, format_reason
from analysis.charts.groups import QuestionGroup, describe_omitted, describe_question, select_places, sort_groups
from analysis.questions import describe_series
from analysis.summary import Row

MAX_CURVES = 14
"""Curves of a figure for print: more cannot be told apart."""

_MOST_NAMES = 3  # panels without a number that a note names


class PlottedQuantity(NamedTuple):
    """What is drawn: a column of the summary divided by `unit`; `interval` says that it has *_low and *_high,
    `predicted` that predicted_* says beside it what was expected."""

    column: str
    label: str
    interval: bool = True
    unit: float = 1.0
    thousands: bool = False  # 1200 is written 1.2k
    across: str = "micro"  # the column whose values stand side by side
    across_label: str = "micro-batch"
    ideal: float | None = None
    predicted: bool = False


def build_chart(groups: Sequence[QuestionGroup], quantity: PlottedQuantity, note: str = "") -> Chart:
    """Return the chart of a quantity with a panel per group, those of a model on one scale; a group without any number
    is named in the note instead, unless none has one."""
    ordered = sort_groups(groups)
    questions = [group.question for group in ordered]
    panels = [_build_panel(group, describe_question(group.question, questions), quantity) for group in ordered]
    known = [panel for panel in panels if panel.points] or panels
    empty = [panel for panel in panels if panel not in known]
    return Chart(
        quantity.across_label,
        quantity.label,
        quantity.thousands,
        quantity.interval,
        quantity.ideal,
        " ".join(filter(None, [note, _describe_empty(empty)])),
        tuple(known),
    )


def select_for_print(chart: Chart) -> Chart:
    """Return what a page of print holds of a chart, and say in its note what that leaves out."""
    models, numbers = [panel.scale for panel in chart.panels], [len(panel.points) for panel in chart.panels]
    panels = [chart.panels[place] for place in select_places(models, numbers)]
    omitted = describe_omitted(len(models), "panels", "fewest numbers of each model", len(panels))
    points: Counter[str] = Counter()
    for panel in panels:
        points.update({curve.label: len(curve.points) for curve in panel.curves if not curve.predicted})
    labels = {label for label, _ in sorted(points.items(), key=lambda item: -item[1])[:MAX_CURVES]}
    fewer = describe_omitted(len(points), "curves", "fewest numbers", MAX_CURVES)
    drawn = [_keep_curves(panel, labels) for panel in panels]
    return chart._replace(panels=tuple(drawn), note=" ".join(filter(None, [chart.note, omitted, fewer])))


def _keep_curves(panel: ChartPanel, labels: set[str]) -> ChartPanel:
    return panel._replace(curves=tuple(curve for curve in panel.curves if curve.label in labels))


def _describe_empty(panels: Sequence[ChartPanel]) -> str:
    """Name the panels in which nothing has a number, and why."""
    if not panels:
        return ""
    names = [f"{' · '.join(panel.title)} ({_list_reasons(panel)})" for panel in panels[:_MOST_NAMES]]
    more = [f"{len(panels) - _MOST_NAMES} more"] if len(panels) > _MOST_NAMES else []
    return f"Not drawn, for nothing has a number: {'; '.join([*names, *more])}."


def _list_reasons(panel: ChartPanel) -> str:
    reasons = {format_reason(gap.row) for curve in panel.curves for gap in curve.gaps if gap.row}
    return ", ".join(sorted(reasons))


def _build_panel(group: QuestionGroup, title: Sequence[str], quantity: PlottedQuantity) -> ChartPanel:
    values = sorted({row[quantity.across] for row in group.rows})
    places = {value: place for place, value in enumerate(values)}
    cells: dict[str, list[list[Row]]] = {}
    for row in group.rows:
        cells.setdefault(describe_series(row), [[] for _ in values])[places[row[quantity.across]]].append(row)
    curves = [_build_curve(label, cells[label], quantity) for label in sorted(cells)]
    if quantity.predicted:
        expected = quantity._replace(column=f"predicted_{quantity.column}", interval=False)
        beside = [_build_curve(label, cells[label], expected) for label in sorted(cells)]
        curves += [curve._replace(gaps=(), predicted=True) for curve in beside if curve.segments]
    return ChartPanel(tuple(title), group.question["model"], tuple(map(str, values)), tuple(curves))


def _build_curve(label: str, cells: Sequence[Sequence[Row]], quantity: PlottedQuantity) -> ChartCurve:
    """Return a point for every number, joined where two neighbours have exactly one each. Where a place was tried and
    has no number, all places without one are gaps."""
    points = [
        [_build_point(place, row, quantity) for row in rows if row[quantity.column] is not None]
        for place, rows in enumerate(cells)
    ]
    segments: list[tuple[ChartPoint, ...]] = []
    before = 0
    for here in points:
        if before == 1 and len(here) == 1:
            segments[-1] = (*segments[-1], *here)
        else:
            segments += [(point,) for point in here]
        before = len(here)
    gaps = [
        ChartGap(place, next(iter(rows), None))
        for place, (rows, here) in enumerate(zip(cells, points, strict=True))
        if not here
    ]
    return ChartCurve(label, tuple(segments), tuple(gaps) if any(gap.row for gap in gaps) else ())


def _build_point(place: int, row: Row, quantity: PlottedQuantity) -> ChartPoint:
    value = row[quantity.column] / quantity.unit
    low, high = (row[f"{quantity.column}{end}"] if quantity.interval else None for end in ("_low", "_high"))
    if low is None or high is None:
        return ChartPoint(place, value, None, row)
    kind = f"{100 * row['interval_level']:.0f} %, {row['interval_kind']}" if row["interval_kind"] else ""
    return ChartPoint(place, value, ChartInterval(low / quantity.unit, high / quantity.unit, kind), row)
