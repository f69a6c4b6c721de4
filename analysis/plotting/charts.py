"""Draws a chart for print: curves with their intervals, and below zero a strip that says, curve by curve, why a number
is not there."""

import itertools
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

from analysis import plotting
from analysis.charts import Chart, ChartCurve, ChartPanel, spread_curves
from analysis.charts.curves import select_for_print
from analysis.charts.looks import choose_colour
from analysis.plotting import panels

_IDEAL: Any = {"color": plotting.INK, "linestyle": (0, (5, 3)), "linewidth": 0.8}
_PREDICTED = (0, (3, 2))
_LINE_IN = 0.1  # height of a line of the strip
_GAP = 0.4  # lines between zero and the strip, where the tick's label is
_AROUND_IN, _ABOVE_IN = 0.95, 0.85  # of a panel: title and labels; what it has at least above zero
_TICKS = 6  # at most; more are slow to draw
_EDGE = 0.5  # of the room between two places, left and right of the outer ones


@plotting.styled
def draw_chart(chart: Chart) -> Figure:
    """Draw what a page of print holds of a chart."""
    shown = select_for_print(chart)
    figure, axes = panels.build_lines([panel.scale for panel in shown.panels])
    looks, tops = shown.looks, shown.tops
    lines = max((len(panel.incomplete) for panel in shown.panels), default=0)
    line = _make_room(figure, axes, lines)
    for one, panel in zip(axes, shown.panels, strict=True):
        panels.draw_title(one, panel.title)
        beside = spread_curves(panel)
        for curve in panel.curves:
            _draw_curve(one, curve, looks[curve.label], beside[curve.label], hollow=shown.intervals)
        below = max(len(other.incomplete) for other in shown.panels if other.scale == panel.scale)
        _set_scale(one, shown, panel, tops[panel.scale], line * (below + _GAP) if below else 0.0)
        _draw_strip(one, panel, looks, line)
    for _, alike in itertools.groupby(zip(axes, shown.panels, strict=True), key=lambda drawn: drawn[1].scale):
        next(alike)[0].set_ylabel(shown.quantity)
    plotting.draw_legend(figure, _build_legend_entries(shown, looks), _format_note(shown))
    return figure


def _build_legend_entries(chart: Chart, looks: Mapping[str, int]) -> list[Line2D]:
    keys = [plotting.build_legend_entry(label, looks[label]) for label in chart.labels]
    return keys if chart.ideal is None else [*keys, Line2D([], [], label="ideal", **_IDEAL)]


def _format_note(chart: Chart) -> str:
    """Say which intervals are drawn, and what the chart itself says."""
    return " ".join(filter(None, [plotting.format_interval_note(chart.interval_kinds) * chart.intervals, chart.note]))


def _draw_curve(axes: Axes, curve: ChartCurve, index: int, beside: float, *, hollow: bool) -> None:
    """Draw one series: a point for every number, and a line along each segment."""
    colour = choose_colour(index)
    bars = [(point.place + beside, *point.interval[:2]) for point in curve.points if point.interval]
    if bars:
        axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=0.9)
    for known, fill in ((True, colour), (False, "none" if hollow or curve.predicted else colour)):
        some = [(point.place + beside, point.value) for point in curve.points if (point.interval is not None) == known]
        if some:
            axes.plot(*zip(*some, strict=True), markerfacecolor=fill, **plotting.choose_marker_style(index), zorder=3)
    style: Any = {"color": colour, "linestyle": _PREDICTED if curve.predicted else "-", "zorder": 2}
    for segment in curve.segments:
        if len(segment) > 1:
            axes.plot(*zip(*[(point.place, point.value) for point in segment], strict=True), **style)


def _set_scale(axes: Axes, chart: Chart, panel: ChartPanel, top: float, strip: float) -> None:
    """Begin at zero, end where the scale does, and leave room below for what has no number."""
    known, top = top > 0, top or 1.0
    axes.set_ylim(-strip * top, top)
    axes.yaxis.set_major_locator(MaxNLocator(_TICKS))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top] if known else [])
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if chart.thousands else ScalarFormatter())
    axes.axhline(0, color=plotting.INK, linewidth=0.6)
    if chart.ideal is not None:
        axes.axhline(chart.ideal, zorder=1, **_IDEAL)
    axes.set_xlim(-_EDGE, len(panel.places) - 1 + _EDGE)
    if len(panel.places) == 1:  # one value is no axis
        axes.set_xticks([])
        axes.set_xlabel(f"{chart.across} {panel.places[0]}")
    else:
        axes.set_xticks(range(len(panel.places)), panel.places)
        axes.set_xlabel(chart.across)


def _make_room(figure: Figure, axes: list[Axes], lines: int) -> float:
    """Make room for a strip of so many lines in every panel; return a line's height as a part of that above zero."""
    if not axes:
        return 0.0
    place = axes[0].get_subplotspec()
    assert place is not None
    rows, strip = place.get_gridspec().nrows, (lines + _GAP) * _LINE_IN
    panel = figure.get_figheight() / rows
    missing = max(0.0, _AROUND_IN + _ABOVE_IN + strip - panel)
    figure.set_figheight(rows * (panel + missing))
    return _LINE_IN / (panel + missing - _AROUND_IN - strip)


def _draw_strip(axes: Axes, panel: ChartPanel, looks: Mapping[str, int], height: float) -> None:
    """Write a line per curve with gaps: its marker, and what happened at each place without a number."""
    label_transform, top = (
        axes.get_yaxis_transform(),
        axes.get_ylim()[1],
    )  # the marker stands where a tick's label would
    room_in = panels.compute_room_in(axes) / len(panel.places)
    for line, curve in enumerate(panel.incomplete):
        y, index = -height * (line + _GAP + 0.5) * top, looks[curve.label]
        style = plotting.choose_marker_style(index) | {"markersize": 3, "gid": "strip", "clip_on": False}
        # the marker stands where a tick's label would
        axes.plot(-0.035, y, transform=label_transform, **style)
        for gap in curve.gaps:
            plotting.write_reason(axes, gap.place, y, gap.row, choose_colour(index), room_in)
