"""Draws a chart on the page: small panels as plotly.js takes them, a trace per curve, each point with what hovering
shows and the runs behind it. The page's own script narrows and colours them."""

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from analysis.charts import Chart, ChartCurve, ChartGap, ChartPanel, ChartPoint, format_reason, spread_curves
from analysis.charts.looks import choose_colour, choose_marker
from analysis.report.facets import Facet, find_place
from analysis.report.hover import format_hover
from analysis.summary import KEY, Row

SYMBOLS = {
    "circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "triangle-down": "▼", "cross": "✚", "x": "✖",
}  # fmt: skip
"""As plotly.js calls them, and as the legend writes them."""

_LINE_PX, _PLOT_PX = 16, 250
_INTERVALS = (
    "Bars are intervals; hover tells their kind, level and n. Hollow: none is known. A bar that leaves its panel "
    "reaches beyond."
)

Trace = dict[str, Any]
_NOTHING = dict.fromkeys(("x", "y", "above", "below", "hovertext", "customdata"))
_BREAK: dict[str, Any] = {**_NOTHING, "symbol": "circle"}
"""Between two points that no line may join."""

_EMPTY: Trace = {"type": "scatter", "mode": "markers", "name": "", "x": [0], "y": [None], "customdata": [None]}
"""Has plotly.js draw the axes where no number is."""


class PageChart(NamedTuple):
    """An interactive figure: `panels` in plotly's own terms, `keys` the label, colour and sign of each series."""

    name: str
    title: str
    note: str
    opens: bool  # whether a click on a point opens its runs
    keys: tuple[tuple[str, str, str], ...]
    panels: tuple[dict[str, Any], ...]


class Page(NamedTuple):
    """What every point needs of the page: the facets to narrow by, and the place of a configuration in its table."""

    facets: Sequence[Facet]
    places: Mapping[tuple[Any, ...], int]

    def holds(self, row: Row) -> bool:
        """Whether a row of the summary stands in the page's table."""
        return build_row_key(row) in self.places


def build_row_key(row: Row) -> tuple[Any, ...]:
    """Return what tells rows of the summary apart."""
    return tuple(row[name] for name in KEY)


def render_chart(name: str, title: str, chart: Chart, page: Page) -> PageChart:
    """Return a chart as the page draws it; what has no row in the page's table is left out."""
    shown = chart._replace(panels=tuple(filter(None, (_keep_listed(panel, page) for panel in chart.panels))))
    looks, tops = shown.looks, shown.tops
    lines = {scale: line for line, scale in enumerate(tops)}
    panels = tuple(
        _render_panel(panel, shown, looks, tops[panel.scale], page) | {"place": place, "row": lines[panel.scale]}
        for place, panel in enumerate(shown.panels)
    )
    keys = tuple((label, choose_colour(index), SYMBOLS[choose_symbol(index)]) for label, index in looks.items())
    note = " ".join(filter(None, [chart.note, _INTERVALS * chart.intervals]))
    return PageChart(name, title, note, True, keys, panels)


def choose_symbol(index: int) -> str:
    """Return the marker of series number `index`: colours that come again have another one."""
    return list(SYMBOLS)[choose_marker(index)]


def _keep_listed(panel: ChartPanel, page: Page) -> ChartPanel | None:
    """Return a panel with what the page's table lists; None where that is nothing."""
    curves = []
    for curve in panel.curves:
        segments = [tuple(point for point in segment if page.holds(point.row)) for segment in curve.segments]
        gaps = tuple(gap for gap in curve.gaps if gap.row is None or page.holds(gap.row))
        if not any(gap.row for gap in gaps):
            gaps = ()
        kept = curve._replace(segments=tuple(filter(None, segments)), gaps=gaps)
        curves += [kept] if kept.segments or kept.gaps else []
    return panel._replace(curves=tuple(curves)) if curves else None


def _render_panel(panel: ChartPanel, chart: Chart, looks: Mapping[str, int], top: float, page: Page) -> dict[str, Any]:
    beside = spread_curves(panel)
    traces = [
        _render_curve(curve, looks[curve.label], beside[curve.label], page, hollow=chart.intervals)
        for curve in panel.curves
        if curve.segments
    ]
    strip = [_render_gaps(curve, looks[curve.label], line, page) for line, curve in enumerate(panel.incomplete)]
    return {
        "title": " · ".join(panel.title),
        "data": (traces or [_EMPTY]) + strip,
        "layout": _build_layout(chart, panel.places, top, [trace["name"] for trace in strip]),
    }


def _render_curve(curve: ChartCurve, index: int, beside: float, page: Page, *, hollow: bool) -> Trace:
    """Return a series: its points, those of a segment joined."""
    points: list[dict[str, Any]] = []
    hollow = hollow or curve.predicted
    for segment in curve.segments:
        points += [_BREAK] if points else []
        points += [_render_point(point, index, beside, page, hollow=hollow) for point in segment]
    values = {name: [point[name] for point in points] for name in _BREAK}
    bars = {"array": values.pop("above"), "arrayminus": values.pop("below")}
    return {
        "type": "scatter", "mode": "lines+markers", "name": curve.label, "hoverinfo": "text",
        "error_y": {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, **bars},
        "marker": {"color": choose_colour(index), "size": 8, "symbol": values.pop("symbol")},
        "line": {"color": choose_colour(index), "width": 1.5, "dash": "dash" if curve.predicted else "solid"}, **values,
    }  # fmt: skip


def _render_point(point: ChartPoint, index: int, beside: float, page: Page, *, hollow: bool) -> dict[str, Any]:
    """Return a number with its interval; hollow where it should have one and none is known."""
    low, high = point.interval[:2] if point.interval else (point.value, point.value)
    return {
        "x": point.place + beside,
        "y": point.value,
        "above": high - point.value,
        "below": point.value - low,
        "symbol": choose_symbol(index) + "-open" * (hollow and point.interval is None),
        "hovertext": format_hover(point.row),
        "customdata": _build_custom_data(point.row, page),
    }


def _render_gaps(curve: ChartCurve, index: int, line: int, page: Page) -> Trace:
    """Return why a series has no number at some places, in words below the panel."""
    tried = next(gap.row for gap in curve.gaps if gap.row)
    never = {
        "f": find_place(tried | dict.fromkeys(("micro", "nodes", "devices_per_node", "outcome")), page.facets),
        "c": None,
    }
    return {
        "type": "scatter",
        "mode": "text",
        "name": curve.label,
        "yaxis": "y2",
        "x": [gap.place for gap in curve.gaps],
        "y": [line] * len(curve.gaps),
        "text": [format_reason(gap.row) for gap in curve.gaps],
        "textfont": {"color": [_choose_text_colour(gap, index) for gap in curve.gaps], "size": 10},
        "hoverinfo": "text",
        "hovertext": [format_hover(gap.row) if gap.row else "not run" for gap in curve.gaps],
        "customdata": [_build_custom_data(gap.row, page) if gap.row else never for gap in curve.gaps],
    }


def _choose_text_colour(gap: ChartGap, index: int) -> str:
    return choose_colour(index) if gap.row else "#7F7F7F"


def _build_layout(chart: Chart, places: Sequence[str], top: float, strip: Sequence[str]) -> dict[str, Any]:
    height = _PLOT_PX + _LINE_PX * len(strip)
    below = _LINE_PX * len(strip) / height
    single = len(places) == 1  # one value is no axis
    layout: dict[str, Any] = {
        "height": height, "showlegend": False, "hovermode": "closest", "dragmode": False,
        "margin": {"l": 56, "r": 8, "t": 8, "b": 40},
        "xaxis": {
            "tickvals": [] if single else list(range(len(places))), "ticktext": [] if single else list(places),
            "range": [-0.5, len(places) - 0.5], "anchor": "y2" if strip else "y",
            "title": {"text": f"{chart.across} {places[0]}" if single else chart.across},
            "showgrid": False, "zeroline": False, "fixedrange": True,
        },
        "yaxis": {
            "range": [0, top or 1], "showticklabels": top > 0, "title": {"text": chart.quantity},
            "tickformat": "~s" if chart.thousands else "~g", "nticks": 6,
            "domain": [below, 1], "fixedrange": True,
        },
    }  # fmt: skip
    if chart.ideal is not None:
        line = {"color": "#7F7F7F", "width": 1, "dash": "dash"}
        layout["shapes"] = [{
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": chart.ideal, "y1": chart.ideal, "line": line,
        }]  # fmt: skip
    if strip:
        layout["yaxis2"] = {
            "range": [len(strip) - 0.5, -0.5], "domain": [0, below], "showgrid": False, "zeroline": False,
            "tickvals": list(range(len(strip))), "ticktext": [html.escape(label[:9], quote=False) for label in strip],
            "tickfont": {"size": 9}, "fixedrange": True,
        }  # fmt: skip
    return layout


def _build_custom_data(row: Row, page: Page) -> dict[str, Any]:
    return {"f": find_place(row, page.facets), "c": page.places[build_row_key(row)]}
