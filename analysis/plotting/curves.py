"""A quantity against micro-batch or nodes: a curve per engine, a panel per group of rows, and a strip below zero that
says, engine by engine, why a number is not there."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter, MaxNLocator, ScalarFormatter

from analysis import plotting
from analysis.plotting import panels
from analysis.plotting.looks import number_looks
from analysis.plotting.panels import Grid, Panel
from analysis.questions import describe_series
from analysis.summary import Row

MAX_CURVES = 14
"""Curves of a figure: more cannot be told apart."""

_IDEAL: Any = {"color": plotting.INK, "linestyle": (0, (5, 3)), "linewidth": 0.8}
_SPREAD = 0.5  # of the room of a place that is the only one, where curves stand side by side
_LINE_IN = 0.1  # height of a line of the strip
_GAP = 0.4  # lines between zero and the strip, where the tick's label is
_AROUND_IN, _ABOVE_IN = 0.95, 0.85  # of a panel: title and labels; what it has at least above zero
_TICKS = 6  # at most; more are slow to draw
_ABOVE, _FURTHEST = 1.08, 1.5  # end of an axis over the highest point, and at most for the sake of intervals
_EDGE = 0.5  # of the room between two places, left and right of the outer ones


class PlottedQuantity(NamedTuple):
    """What is drawn: columns of the summary, divided by `unit`; `low` and `high` empty where it has no interval."""

    column: str
    label: str
    low: str = ""
    high: str = ""
    unit: float = 1.0
    formatter: Callable[[], Formatter] = ScalarFormatter
    across: str = "micro"  # column whose values stand side by side
    across_label: str = "micro-batch"
    ideal: float | None = None  # drawn across


class PlottedNumber(NamedTuple):
    """One number of a configuration, in the unit drawn."""

    value: float
    interval: tuple[float, float] | None


class CurvePanel(NamedTuple):
    """A panel, and by the name of a curve its rows at each place; only the curves that were asked for there."""

    panel: Panel
    places: list[int]
    rows: dict[str, list[list[Row]]]
    numbers: dict[str, list[list[PlottedNumber]]]

    @property
    def gaps(self) -> list[str]:
        """The curves that were tried at some place and have no number there."""
        return [
            label
            for label, cells in self.numbers.items()
            if any(rows and not numbers for rows, numbers in zip(self.rows[label], cells, strict=True))
        ]


def draw_curves(grid: Grid, quantity: PlottedQuantity, note: Callable[[Sequence[Row]], str]) -> Figure:
    """Draw `quantity` of every row of a grid's panels; `note` says how to read it, below."""
    labels, omitted = _list_labels(grid.panels)
    looks = number_looks(labels)
    curve_panels = [_build_curve_panel(panel, quantity, labels) for panel in grid.panels]
    line = _make_room(grid, max((len(curve_panel.gaps) for curve_panel in curve_panels), default=0))
    for curve_panel in curve_panels:
        for label in curve_panel.rows:
            _draw_curve(curve_panel, label, looks, hollow=bool(quantity.low))
        _set_scale(
            curve_panel,
            quantity,
            [other for other in curve_panels if _is_in_same_row(curve_panel, other)],
            line,
        )
        _draw_strip(curve_panel, looks, line)
    if grid.panels:
        grid.panels[0].axes.set_ylabel(quantity.label)
    keys = [plotting.build_legend_entry(label, looks[label]) for label in labels]
    if quantity.ideal is not None:
        keys.append(Line2D([], [], label="ideal", **_IDEAL))
    note_text = note([row for panel in grid.panels for row in panel.rows])
    plotting.draw_legend(grid.figure, keys, note_text, grid.omitted, omitted)
    return grid.figure


def _list_labels(drawn: Sequence[Panel]) -> tuple[list[str], str]:
    """Return the curves' names in order, at most MOST, and a sentence about what that leaves out."""
    numbers: Counter[str] = Counter()
    for panel in drawn:
        for row in panel.rows:
            numbers[describe_series(row)] += row["n"] > 0
    most = sorted(name for name, _ in numbers.most_common(MAX_CURVES))
    return most, panels.describe_omitted(len(numbers), "curves", "fewest numbers", MAX_CURVES)


def _build_curve_panel(panel: Panel, quantity: PlottedQuantity, labels: Sequence[str]) -> CurvePanel:
    places = sorted({row[quantity.across] for row in panel.rows})
    found: dict[str, list[list[Row]]] = {label: [[] for _ in places] for label in labels}
    for row in panel.rows:
        if (label := describe_series(row)) in found:
            found[label][places.index(row[quantity.across])].append(row)
    rows = {label: cells for label, cells in found.items() if any(cells)}
    numbers = {label: [_list_numbers(cell, quantity) for cell in cells] for label, cells in rows.items()}
    return CurvePanel(panel, places, rows, numbers)


def _draw_curve(curve_panel: CurvePanel, label: str, looks: Mapping[str, int], *, hollow: bool) -> None:
    """Draw one engine: a point for every number, a line between neighbours that both have exactly one."""
    axes, index, shown = curve_panel.panel.axes, looks[label], list(curve_panel.rows)
    single = len(curve_panel.places) == 1  # else a line would lie where nothing was measured
    aside = _SPREAD * ((shown.index(label) + 0.5) / len(shown) - 0.5) if single else 0.0
    cells = [(place + aside, numbers) for place, numbers in enumerate(curve_panel.numbers[label])]
    colour, points = plotting.choose_colour(index), [(x, number) for x, numbers in cells for number in numbers]
    bars = [(x, *number.interval) for x, number in points if number.interval]
    if bars:
        axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=0.9)
    for known, fill in ((True, colour), (False, "none" if hollow else colour)):
        some = [(x, number.value) for x, number in points if (number.interval is not None) == known]
        if some:
            axes.plot(*zip(*some, strict=True), markerfacecolor=fill, **plotting.choose_marker_style(index), zorder=3)
    for single, neighbours in itertools.groupby(cells, key=lambda cell: len(cell[1]) == 1):
        line = [(x, number.value) for x, (number, *_) in neighbours] if single else []
        if len(line) > 1:
            axes.plot(*zip(*line, strict=True), color=colour, zorder=2)


def _set_scale(
    curve_panel: CurvePanel, quantity: PlottedQuantity, shared_scale: Sequence[CurvePanel], line: float
) -> None:
    """Begin at zero, end where the highest of the panels alike ends, and leave room below for what has no number."""
    axes = curve_panel.panel.axes
    known = [number for other in shared_scale for cells in other.numbers.values() for number in itertools.chain(*cells)]
    highest = max([quantity.ideal or 0.0, *(number.value for number in known)])
    reach = max([highest, *(number.interval[1] for number in known if number.interval)])
    top = _ABOVE * min(reach, _FURTHEST * highest) or 1.0  # a wide interval may not squeeze all others
    lines = max(len(other.gaps) for other in shared_scale)
    axes.set_ylim(-line * (lines + _GAP) * top if lines else 0, top)
    axes.yaxis.set_major_locator(MaxNLocator(_TICKS))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top] if known else [])
    axes.yaxis.set_major_formatter(quantity.formatter())
    axes.axhline(0, color=plotting.INK, linewidth=0.6)
    if quantity.ideal is not None:
        axes.axhline(quantity.ideal, zorder=1, **_IDEAL)
    axes.set_xlim(-_EDGE, len(curve_panel.places) - 1 + _EDGE)
    if len(curve_panel.places) == 1:  # one value is no axis
        axes.set_xticks([])
        axes.set_xlabel(f"{quantity.across_label} {curve_panel.places[0]}")
    else:
        axes.set_xticks(range(len(curve_panel.places)), [str(place) for place in curve_panel.places])
        axes.set_xlabel(quantity.across_label)


def _make_room(grid: Grid, lines: int) -> float:
    """Make room for a strip of so many lines in every panel; return a line's height as a part of that above zero."""
    if not grid.panels:
        return 0.0
    place = grid.panels[0].axes.get_subplotspec()
    assert place is not None
    rows, strip = place.get_gridspec().nrows, (lines + _GAP) * _LINE_IN
    panel = grid.figure.get_figheight() / rows
    missing = max(0.0, _AROUND_IN + _ABOVE_IN + strip - panel)
    grid.figure.set_figheight(rows * (panel + missing))
    return _LINE_IN / (panel + missing - _AROUND_IN - strip)


def _draw_strip(curve_panel: CurvePanel, looks: Mapping[str, int], height: float) -> None:
    """Write a line per curve with gaps: its marker, and what happened at each place without a number."""
    axes = curve_panel.panel.axes
    label_transform, top = (
        axes.get_yaxis_transform(),
        axes.get_ylim()[1],
    )  # the marker stands where a tick's label would
    for line, label in enumerate(curve_panel.gaps):
        y, index = -height * (line + _GAP + 0.5) * top, looks[label]
        axes.plot(
            -0.035,
            y,
            **plotting.choose_marker_style(index),
            markersize=3,
            transform=label_transform,
            clip_on=False,
            gid="strip",
        )
        for place, (rows, numbers) in enumerate(zip(curve_panel.rows[label], curve_panel.numbers[label], strict=True)):
            if not numbers:
                why = rows[0] if rows else None
                plotting.write_reason(
                    axes,
                    place,
                    y,
                    why,
                    plotting.choose_colour(index),
                    panels.compute_room_in(axes) / len(curve_panel.places),
                )


def _list_numbers(rows: Sequence[Row], quantity: PlottedQuantity) -> list[PlottedNumber]:
    known = [row for row in rows if row[quantity.column] is not None]
    return [PlottedNumber(row[quantity.column] / quantity.unit, _find_interval(row, quantity)) for row in known]


def _find_interval(row: Row, quantity: PlottedQuantity) -> tuple[float, float] | None:
    if not quantity.low or row[quantity.low] is None:
        return None
    return row[quantity.low] / quantity.unit, row[quantity.high] / quantity.unit


def _is_in_same_row(one: CurvePanel, other: CurvePanel) -> bool:
    """Whether two panels stand side by side, so that a reader compares their heights."""
    places = [panel.panel.axes.get_subplotspec() for panel in (one, other)]
    return len({place.rowspan.start for place in places if place}) == 1
