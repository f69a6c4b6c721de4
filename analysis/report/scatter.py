"""Draws a chart of points and lines on the page, in plotly's terms."""

import html
from typing import Any

from analysis.charts.looks import choose_colour
from analysis.charts.scatter import ScatterChart, ScatterPanel, ScatterSeries
from analysis.report.charts import SYMBOLS, PageChart, Trace, choose_symbol

_PLOT_PX, _ASLANT_PX = 270, 60
_LETTERS = 28  # of a place's name


def render_scatter(name: str, title: str, chart: ScatterChart) -> PageChart:
    """Return a chart as the page draws it: whole, whatever the page is narrowed to."""
    panels = tuple(
        {
            "title": panel.title,
            "data": [_render_series(series) for series in panel.series],
            "layout": _build_layout(panel),
            "place": place,
            "row": 0,
        }
        for place, panel in enumerate(chart.panels)
    )
    keys = tuple((label, choose_colour(look), SYMBOLS[choose_symbol(look)]) for label, look in chart.keys.items())
    return PageChart(name, title, chart.note, False, keys, panels)


def _render_series(series: ScatterSeries) -> Trace:
    trace: Trace = {
        "type": "scatter", "name": series.label, "mode": "lines" if series.joined else "markers",
        "x": [point.x for point in series.points], "y": [point.y for point in series.points],
    }  # fmt: skip
    colour = choose_colour(series.look)
    if series.joined:
        return trace | {"line": {"color": colour, "width": 1.5}, "hoverinfo": "skip"}
    ends = [point.ends or (point.y, point.y) for point in series.points]
    return trace | {
        "marker": {"color": colour, "size": 8, "symbol": choose_symbol(series.look)}, "hoverinfo": "text+y",
        "hovertext": [html.escape(point.words, quote=False) for point in series.points],
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
            "array": [high - point.y for point, (_, high) in zip(series.points, ends, strict=True)],
            "arrayminus": [point.y - low for point, (low, _) in zip(series.points, ends, strict=True)],
        },
    }  # fmt: skip


def _build_layout(panel: ScatterPanel) -> dict[str, Any]:
    across: dict[str, Any] = {"title": {"text": html.escape(panel.across)}, "zeroline": False, "fixedrange": True}
    if panel.places:
        across |= {
            "tickvals": list(range(len(panel.places))), "range": [-0.5, len(panel.places) - 0.5],
            "ticktext": [html.escape(name[:_LETTERS], quote=False) for name in panel.places],
        }  # fmt: skip
    return {
        "height": _PLOT_PX + _ASLANT_PX * bool(panel.places), "showlegend": False, "hovermode": "closest",
        "dragmode": False, "margin": {"l": 64, "r": 8, "t": 8, "b": 40 + _ASLANT_PX * bool(panel.places)},
        "xaxis": across,
        "yaxis": {
            "title": {"text": html.escape(panel.up)}, "fixedrange": True, "zeroline": False, "nticks": 6,
            "tickformat": "~g", "rangemode": "tozero" if panel.from_zero else "normal",
        },
    }  # fmt: skip
