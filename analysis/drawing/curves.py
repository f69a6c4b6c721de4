"""Figures of curves: a column of the summary against micro-batch or node count, with one panel per group of rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

from analysis.drawing import (
    BUSY,
    INK,
    Key,
    Look,
    Panel,
    Picture,
    Space,
    assign_looks,
    draw_beyond,
    draw_names,
    format_reason,
    get_room_in,
    mark,
    measure_names,
    write_reason,
)
from analysis.drawing.groups import (
    QuestionGroup,
    build_question,
    describe_omitted,
    describe_question,
    join_equal,
    list_rare_flags,
    name_series,
    sort_groups,
)
from analysis.formats import UNITS, find_unit_power
from analysis.questions import Question
from analysis.results import Results
from analysis.scaling import build_basis_cells
from analysis.scaling.curves import CurvePoint, Law, ScalingCurve, build_curves
from analysis.summary import Row
from analysis.table import group_by

MAX_CURVES = 14
"""Most curves in a figure. More curves could not be distinguished."""

# The y axis ends at _ABOVE times the highest point or interval. Intervals beyond _FURTHEST times the highest point are
# cut off.
_ABOVE, _FURTHEST = 1.08, 1.5
_MOST_NAMES = 3  # most panels without a number that a note names
# Height of the axis above zero and of a line of reasons below it; the gap between them, as a fraction of a line.
_HEIGHT_IN, _STRIP_IN, _GAP = 1.6, 0.11, 0.4
_TICKS = 6
_EDGE = 0.5  # margin left of the first and right of the last tick, as a fraction of the distance between two ticks
_BAR, _THIN_BAR = 0.9, 0.4  # line width of an interval between runs, and of an interval of one run's steps
_IDEAL: Any = {"color": INK, "linestyle": (0, (5, 3)), "linewidth": 0.8}
_PREDICTED = (0, (3, 2))


class PlottedQuantity(NamedTuple):
    """The quantity that a figure shows: a column of the summary, divided by `unit`.

    If `is_size` is set, the column holds bytes. `unit` is then chosen for each model, and its name added to `label`.
    If `interval` is set, the columns `*_low` and `*_high` of the summary are drawn as bars. If `predicted` is set, the
    column `predicted_*` is drawn as a second curve. `ideal` is the value at which a horizontal line is drawn.
    """

    column: str
    label: str
    interval: bool = True
    unit: float = 1.0
    thousands: bool = False  # write 1200 as 1.2k
    across: str = "micro"  # column of the x axis
    across_label: str = "micro-batch"
    ideal: float | None = None
    predicted: bool = False
    is_size: bool = False


class ChartPoint(NamedTuple):
    """A point of a curve: a value and its interval in the unit of the y axis. `place` is the index of the tick on the x
    axis at which the point lies."""

    place: int
    value: float
    ends: tuple[float, float] | None
    row: Row


class ChartCurve(NamedTuple):
    """A curve. It consists of segments; the points of a segment are joined by a line.

    `gaps` lists the ticks of the x axis at which the curve has no point. Each tick is listed with the row of the
    summary that states the reason, or with None if nothing was run at this tick. Exception: if all of these rows would
    be None, `gaps` is empty. A predicted curve has the same label as the measured curve; its markers are hollow and its
    lines dashed.
    """

    label: str
    segments: tuple[tuple[ChartPoint, ...], ...]
    gaps: tuple[tuple[int, Row | None], ...]
    predicted: bool = False

    @property
    def points(self) -> list[ChartPoint]:
        return [point for segment in self.segments for point in segment]


class ChartPanel(NamedTuple):
    """A panel: curves over the same ticks (`places`) of the x axis. All panels of a model have the same y axis."""

    title: Sequence[str]
    model: str
    places: Sequence[str]
    curves: Sequence[ChartCurve]
    quantity: PlottedQuantity

    @property
    def points(self) -> list[ChartPoint]:
        return [point for curve in self.curves for point in curve.points]

    @property
    def incomplete(self) -> list[ChartCurve]:
        """The curves that lack a number at one or more ticks of the x axis."""
        return [curve for curve in self.curves if curve.gaps]

    @property
    def lines(self) -> int:
        """Number of lines of text below y = 0, which state why numbers are missing. Each curve with a missing number
        has a line. If there is a single tick, all curves share one line."""
        return len(self.incomplete) if len(self.places) > 1 else min(len(self.incomplete), 1)


def build_picture(
    results: Results, groups: Sequence[QuestionGroup], quantity: PlottedQuantity, note: str = ""
) -> Picture:
    """Return the figure of a quantity, with one panel per group.

    A group without any number is named in the note and not drawn. If no group has a number, the groups with a failure
    are drawn, with the reasons in place of curves. The figure is empty if all runs were made on a busy machine.
    """
    every = build_panels(groups, quantity)
    panels = [panel for panel in every if panel.points] or [panel for panel in every if _list_reasons(panel) != [BUSY]]
    if not panels:
        return Picture()
    empty = [panel for panel in every if panel not in panels]
    # If there are too many curves, those with the fewest numbers are omitted.
    points: Counter[str] = Counter()
    for curve in (curve for panel in panels for curve in panel.curves if not curve.predicted):
        points[curve.label] += len(curve.points)
    labels = sorted(label for label, _ in sorted(points.items(), key=lambda item: -item[1])[:MAX_CURVES])
    fewer = describe_omitted(len(points), "curves", "fewest points", MAX_CURVES)
    looks = assign_looks(labels, results.table["engine"])
    fitting = [panel._replace(curves=[curve for curve in panel.curves if curve.label in looks]) for panel in panels]
    panels = [panel for panel in fitting if panel.curves]
    # Panels with a single tick write the names of curves below the axis. All panels leave the same room for them.
    named = [[curve.label for curve in panel.curves] for panel in panels if len(panel.places) == 1]
    below = max([0.42, *(0.2 + measure_names(names) for names in named)])
    drawn = []
    for panel in panels:
        alike = [other for other in panels if other.model == panel.model]
        scale = _compute_top(alike, quantity), max(other.lines for other in alike)
        strip = _STRIP_IN * (scale[1] + _GAP) if scale[1] else 0.0
        draw = partial(_draw_panel, panel=panel, looks=looks, scale=scale)
        space = Space(height=_HEIGHT_IN * bool(scale[0]) + strip, below=below)
        drawn.append(Panel(title=panel.title, draw=draw, space=space, group=panel.model, weight=len(panel.points)))
    keys = [Key(label, looks[label].style_marks() | looks[label].line) for label in labels]
    keys += [Key("ideal scaling", _IDEAL)] if quantity.ideal is not None else []
    flags = Counter(flag for panel in panels for point in panel.points for flag in list_rare_flags(point.row))
    counts = ", ".join(f"{count} {flag}" for flag, count in flags.most_common())
    flagged = f"Points with flags: {counts}." if flags else ""
    notes = [_describe_intervals(panels) * quantity.interval, note, flagged, _describe_empty(empty), fewer]
    return Picture(drawn, keys, " ".join(filter(None, notes)))


def build_panels(groups: Sequence[QuestionGroup], quantity: PlottedQuantity) -> list[ChartPanel]:
    """Return one panel per group, in the order of a figure, with all curves."""
    ordered = sort_groups(groups)
    questions = [group.question for group in ordered]
    by_model = group_by(ordered, lambda group: str(group.question["model"]))
    scaled = {model: _choose_unit(quantity, of_model) for model, of_model in by_model.items()}
    return [
        _build_panel(group, describe_question(group.question, questions), scaled[group.question["model"]])
        for group in ordered
    ]


def _choose_unit(quantity: PlottedQuantity, groups: Sequence[QuestionGroup]) -> PlottedQuantity:
    """Return a quantity with the unit in which its axis is drawn. Sizes in bytes get a binary unit, such as GiB: the
    largest unit in which the highest value of these groups is at least 1. Any other quantity is returned unchanged."""
    if not quantity.is_size:
        return quantity
    power = find_unit_power(max((row[quantity.column] or 0 for group in groups for row in group.rows), default=0))
    return quantity._replace(unit=1024**power, label=f"{quantity.label}, {UNITS[power]}")


def _build_panel(group: QuestionGroup, title: Sequence[str], quantity: PlottedQuantity) -> ChartPanel:
    values = sorted({row[quantity.across] for row in group.rows})
    places = {value: place for place, value in enumerate(values)}
    cells: dict[str, list[list[Row]]] = {}
    for name, row in zip(name_series(group.rows), group.rows, strict=True):
        cells.setdefault(name, [[] for _ in values])[places[row[quantity.across]]].append(row)
    curves = [_build_curve(label, cells[label], quantity) for label in sorted(cells)]
    if quantity.predicted:
        expected = quantity._replace(column=f"predicted_{quantity.column}", interval=False)
        beside = [_build_curve(label, cells[label], expected) for label in sorted(cells)]
        curves += [curve._replace(gaps=(), predicted=True) for curve in beside if curve.segments]
    return ChartPanel(title, group.question["model"], list(map(str, values)), curves, quantity)


def _build_curve(label: str, cells: Sequence[Sequence[Row]], quantity: PlottedQuantity) -> ChartCurve:
    """Return a curve with a point for every row that has a value of the quantity.

    `cells` holds the rows at each tick of the x axis. Two neighbouring ticks are joined by a line if each has exactly
    one point. Every tick without a point is a gap of the curve. Exception: if all ticks without a point also have no
    rows, the curve has no gaps.
    """
    segments: list[tuple[ChartPoint, ...]] = []
    gaps: list[tuple[int, Row | None]] = []
    before = 0
    for place, rows in enumerate(cells):
        here = []
        for row in (row for row in rows if row[quantity.column] is not None):
            low, high = (row[f"{quantity.column}{end}"] if quantity.interval else None for end in ("_low", "_high"))
            ends = None if low is None or high is None else (low / quantity.unit, high / quantity.unit)
            here.append(ChartPoint(place, row[quantity.column] / quantity.unit, ends, row))
        # Several points at one tick are configurations that differ in other settings, so no line can join them.
        if before == 1 and len(here) == 1:
            segments[-1] = (*segments[-1], *here)
        else:
            segments += [(point,) for point in here]
        gaps += [] if here else [(place, next(iter(rows), None))]
        before = len(here)
    return ChartCurve(label, tuple(segments), tuple(gaps) if any(row for _, row in gaps) else ())


def _compute_top(panels: Sequence[ChartPanel], quantity: PlottedQuantity) -> float:
    """Return the upper end of a y axis that begins at zero; 0 if there is no number.

    The upper end lies above the highest point. Very wide intervals are cut off there, because a longer axis would
    squeeze all curves.
    """
    points = [point for panel in panels for point in panel.points]
    highest = max([quantity.ideal or 0.0, *(point.value for point in points)])
    furthest = max([highest, *(point.ends[1] for point in points if point.ends)])
    return _ABOVE * min(furthest, _FURTHEST * highest)


def _describe_intervals(panels: Sequence[ChartPanel]) -> str:
    """Return sentences that explain the bars and the markers of the points."""
    points = [point for panel in panels for point in panel.points]
    rows = [point.row for point in points if point.ends]
    if not rows:
        return "No point has an interval." if points else ""
    kinds = sorted({_describe_interval(row) for row in rows if not _is_within_run(row)})
    notes = [
        f"Bar: interval ({', '.join(kinds)})." if kinds else "",
        "Thin bar: interval from the steps of single runs, indicative." if any(map(_is_within_run, rows)) else "",
        "Hollow mark: no interval." if any(point.ends is None for point in points) else "",
        "Arrow: the interval ends beyond the axis.",
    ]
    return " ".join(filter(None, notes))


def _describe_interval(row: Row) -> str:
    """Return the confidence level of an interval, and the number of repeats from which it was computed, such as "75 %
    for 3 repeats"."""
    if row.get("ratio_kind"):
        return f"{100 * row['ratio_level']:.0f} % for the repeats at two node counts"
    return f"{100 * row['interval_level']:.0f} % for {row['interval_n']} repeats"


def _is_within_run(row: Row) -> bool:
    """Return True if a point's interval was computed from the steps of runs and not from repeats. For a ratio, such as
    an efficiency, the column `ratio_kind` decides. For other quantities, the column `interval_kind` decides."""
    # A run of few steps may have an interval of its rate but no interval of its median step time, hence no kind.
    return str(row.get("ratio_kind") or row["interval_kind"] or "within the run").startswith("within")


def _describe_empty(panels: Sequence[ChartPanel]) -> str:
    """Return a sentence that names the panels that have no number to draw, with the reason for each panel."""
    if not panels:
        return ""
    names = [f"{' · '.join(panel.title)} ({', '.join(_list_reasons(panel))})" for panel in panels]
    more = [f"{len(panels) - _MOST_NAMES} more"] if len(panels) > _MOST_NAMES else []
    return f"Panels without any number are omitted: {'; '.join([*names[:_MOST_NAMES], *more])}."


def _list_reasons(panel: ChartPanel) -> list[str]:
    return sorted({format_reason(row) for curve in panel.curves for _, row in curve.gaps if row})


def _draw_panel(axes: Axes, panel: ChartPanel, looks: Mapping[str, Look], scale: tuple[float, int]) -> None:
    """Draw the curves above y = 0, and below it the reasons for missing numbers.

    `scale` holds the upper end of the y axis and the number of lines of reasons. An upper end of 0 means that there is
    no number; the panel then shows only the reasons.
    """
    quantity, top, lines = panel.quantity, scale[0] or 1.0, scale[1]
    line = _STRIP_IN / _HEIGHT_IN * top  # height of a line of the strip, in units of the y axis
    axes.set_ylim(-line * (lines + _GAP) if lines else 0.0, scale[0])
    axes.yaxis.set_major_locator(MaxNLocator(_TICKS))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top] if scale[0] else [])
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if quantity.thousands else ScalarFormatter())
    axes.spines["left"].set_visible(bool(scale[0]))
    if scale[0]:
        axes.set_ylabel(quantity.label)
    axes.axhline(0, color=INK, linewidth=0.6)
    if quantity.ideal is not None:
        mark(axes.axhline(quantity.ideal, zorder=1, **_IDEAL), "ideal scaling")
    axes.set_xlim(-_EDGE, len(panel.places) - 1 + _EDGE)
    several = len(panel.places) > 1
    axes.set_xlabel(quantity.across_label if several else f"{quantity.across_label} {panel.places[0]}")
    labels = list(dict.fromkeys(curve.label for curve in panel.curves))
    # With a single tick, curves are placed side by side, each above its name.
    asides = {label: 0.0 if several else (place + 0.5) / len(labels) - 0.5 for place, label in enumerate(labels)}
    if several:
        axes.set_xticks(range(len(panel.places)), panel.places)
    else:
        draw_names(axes, list(asides.values()), labels)
    for curve in panel.curves:
        _draw_curve(axes, curve, looks[curve.label], asides[curve.label], top, hollow=quantity.interval)
    for place, curve in enumerate(panel.incomplete):
        look, y = looks[curve.label], -line * (place * several + _GAP + 0.5)
        if several:
            # The marker stands left of the axis, where a tick's label would be.
            style = look.style_marks() | {"markersize": 3.5, "clip_on": False}
            mark(axes.plot(-0.035, y, transform=axes.get_yaxis_transform(), **style)[0], curve.label)
        room_in = get_room_in(axes) / max(len(panel.places), len(labels) * (not several))
        for tick, row in curve.gaps:
            text = write_reason(axes, tick + asides[curve.label], y, row, room_in)
            mark(text, curve.label, [row] if row else [])


def _draw_curve(axes: Axes, curve: ChartCurve, look: Look, aside: float, top: float, *, hollow: bool) -> None:
    """Draw one curve: a marker for every point, and a line through the points of each segment. The segments of a curve
    are its pieces between missing points.

    `aside` shifts the curve along the x axis, and `top` is the upper end of the y axis. With `hollow`, points without
    an interval get hollow markers.
    """
    bars = [(point.place + aside, *point.ends) for point in curve.points if point.ends]
    if bars:
        widths = [_THIN_BAR if _is_within_run(point.row) else _BAR for point in curve.points if point.ends]
        mark(axes.vlines(*zip(*bars, strict=True), color=look.colour, linewidth=widths), curve.label)
        if beyond := [(x, top) for x, _, high in bars if high > top]:
            mark(draw_beyond(axes, "^", beyond, look.colour), curve.label)
    # Points without an interval are hollow, so they are drawn separately.
    for known in (True, False):
        some = [point for point in curve.points if (point.ends is not None) == known]
        if some:
            style = look.style_marks(hollow=not known and (hollow or curve.predicted))
            (marks,) = axes.plot([p.place + aside for p in some], [p.value for p in some], **style, zorder=3)
            mark(marks, curve.label, [point.row for point in some])
    for segment in curve.segments:
        if len(segment) > 1:
            style = look.line | ({"linestyle": _PREDICTED} if curve.predicted else {})
            (line,) = axes.plot([p.place for p in segment], [p.value for p in segment], **style, zorder=2)
            mark(line, curve.label)


_EFFICIENCY = PlottedQuantity("efficiency", "efficiency", across="nodes", across_label="nodes", ideal=1.0)
_EFFICIENCY_NOTE = (
    "Efficiency at the smallest measured node count is 1 by definition. Its bar is the interval of the throughput at "
    "this node count, which also widens the intervals of the other points."
)


def build_efficiency(results: Results, law: Law) -> Picture:
    """Return the figure of efficiency for strong or weak scaling. Curves with equal work share a panel: the same global
    batch, or the same work per device.

    The figure is empty if every curve has fewer than two points with an efficiency.
    """
    curves = [curve for curve in build_curves(results) if curve.law == law]
    if all(sum(point.efficiency is not None for point in curve.points) < 2 for curve in curves):
        return Picture()
    rows: list[tuple[Question, Row]] = []
    for curve in curves:
        row, equal = curve.points[0].row, curve.batch == "equal micro-batch"
        held = [f"micro {row['micro']}" if equal else "best micro"]
        held += [f"global batch {row['global_batch']}"] if law == "strong" else []
        held += [f"× {row['accumulation']} accumulated"] if law != "strong" and row["accumulation"] > 1 else []
        micro = row["micro"] if equal else 0
        shared = {**build_question(row), "nodes": None, "micro": micro, "held": " · ".join(held)}
        rows += [(shared, _build_efficiency_row(curve, point)) for point in curve.points]
    return build_picture(results, [QuestionGroup(*one) for one in join_equal(rows)], _EFFICIENCY, _EFFICIENCY_NOTE)


def _build_efficiency_row(curve: ScalingCurve, point: CurvePoint) -> Row:
    """Return a point of a scaling curve as a row of the summary, with the efficiency and its interval.

    At the smallest node count, the efficiency is 1 by definition and has no interval of its own. In its place, the
    interval of the throughput is drawn, divided by the measured throughput.
    """
    found, row = point.efficiency, point.row
    low, high = (found.interval.low, found.interval.high) if found and found.interval else (None, None)
    if point is curve.base and row["tokens_per_s_low"] is not None:
        low, high = (row[f"tokens_per_s_{end}"] / row["tokens_per_s"] for end in ("low", "high"))
    cells = {"efficiency": found.value if found else None, "efficiency_low": low, "efficiency_high": high}
    # In strong scaling, accumulation falls as nodes are added. It is set to 1 so that the curve is not split by it.
    return {**row, **cells, **build_basis_cells(found if point is not curve.base else None), "accumulation": 1}
