"""The page's interactive figures as values that plotly.js draws: small panels, a trace per engine, each point with what
hovering shows and the runs behind it. The page's own script narrows and colours them."""

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from analysis.formats.numbers import UNITS, find_unit_power
from analysis.plotting import COLOURS
from analysis.plotting.looks import number_looks
from analysis.questions import describe_series
from analysis.report.facets import Facet, find_place
from analysis.report.hover import format_hover, format_reason
from analysis.summary import KEY, Row

SYMBOLS = {
    "circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "triangle-down": "▼", "cross": "✚", "x": "✖",
}  # fmt: skip
"""As plotly.js calls them, and as the legend writes them."""

_SPREAD = 0.5  # of the room of a place that is the only one, where curves stand side by side
_ABOVE, _FURTHEST = 1.08, 1.5  # end of an axis over the highest point, and at most for the sake of intervals
_LINE_PX, _PLOT_PX = 16, 250

Trace = dict[str, Any]
_NOTHING = dict.fromkeys(("x", "y", "above", "below", "hovertext", "customdata"))
_BREAK: dict[str, Any] = {**_NOTHING, "symbol": "circle"}
"""Between two points that no line may join."""

_EMPTY: Trace = {"type": "scatter", "mode": "markers", "name": "", "x": [0], "y": [None], "customdata": [None]}
"""Has plotly.js draw the axes where no number is."""


class ChartQuantity(NamedTuple):
    """What is drawn: a column of the summary divided by `unit`; `interval` says that it has *_low and *_high."""

    column: str
    label: str
    interval: bool = True
    unit: float = 1.0
    format: str = "~s"  # of ticks, as d3 writes them


class ChartGroup(NamedTuple):
    """Rows of the summary that share a panel, and the name of those panels that share its scale."""

    title: str
    rows: Sequence[Row]
    shared_scale: Any = None


class Chart(NamedTuple):
    """An interactive figure: `panels` in plotly's own terms, `keys` the label, colour and sign of each series."""

    name: str
    title: str
    note: str
    keys: tuple[tuple[str, str, str], ...]
    panels: tuple[dict[str, Any], ...]


class Axis(NamedTuple):
    """The column whose values stand side by side along x, and how it is called."""

    column: str
    label: str


MICRO, NODES = Axis("micro", "micro-batch"), Axis("nodes", "nodes")

RATE = ChartQuantity("tokens_per_s", "tokens/s, padding included")
STEP = ChartQuantity("step_s", "s per step", format="~g")


def build_memory_quantity(rows: Sequence[Row]) -> ChartQuantity:
    """Return peak allocated memory in the largest binary unit that these rows fill."""
    power = find_unit_power(max((row["peak_allocated_bytes"] or 0 for row in rows), default=0))
    unit = UNITS[power]
    return ChartQuantity(
        "peak_allocated_bytes", f"peak allocated, {unit}", interval=False, unit=1024**power, format="~g"
    )


class Page(NamedTuple):
    """What every point needs of the page: the facets to narrow by, and the place of a configuration in its table."""

    facets: Sequence[Facet]
    places: Mapping[tuple[Any, ...], int]


def build_chart(
    name: str, title: str, note: str, groups: Sequence[ChartGroup], axis: Axis, quantity: ChartQuantity, page: Page
) -> Chart:
    """Return a figure with a panel per group."""
    labels = sorted({describe_series(row) for group in groups for row in group.rows})
    tops = _compute_tops(groups, quantity)
    looks = number_looks(labels)
    rows = {scale: row for row, scale in enumerate(dict.fromkeys(group.shared_scale for group in groups))}
    panels = tuple(
        _build_panel(group, axis, quantity, looks, tops[group.shared_scale], page)
        | {"place": place, "row": rows[group.shared_scale]}
        for place, group in enumerate(groups)
    )
    keys = tuple((label, choose_colour(index), SYMBOLS[choose_symbol(index)]) for label, index in looks.items())
    return Chart(name, title, note, keys, panels)


def build_row_key(row: Row) -> tuple[Any, ...]:
    """Return what tells rows of the summary apart."""
    return tuple(row[name] for name in KEY)


def choose_colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def choose_symbol(index: int) -> str:
    """Return the marker of series number `index`: colours that come again have another one."""
    return list(SYMBOLS)[(index + index // len(COLOURS)) % len(SYMBOLS)]


def _compute_tops(groups: Sequence[ChartGroup], quantity: ChartQuantity) -> dict[Any, float]:
    """Return the upper end of y by what panels are alike in, so that they can be compared at a glance; 0 of none."""
    highest: dict[Any, float] = {}
    reach: dict[Any, float] = {}
    for group in groups:
        scale, known = group.shared_scale, [row for row in group.rows if row[quantity.column] is not None]
        highest[scale] = max([highest.get(scale, 0.0), *(_compute_value(row, quantity) for row in known)])
        reach[scale] = max([reach.get(scale, 0.0), *(_compute_ends(row, quantity)[1] for row in known)])
    return {scale: _ABOVE * min(reach[scale], _FURTHEST * highest[scale]) for scale in highest}


def _build_panel(
    group: ChartGroup, axis: Axis, quantity: ChartQuantity, looks: Mapping[str, int], top: float, page: Page
) -> dict[str, Any]:
    places = sorted({row[axis.column] for row in group.rows})
    traces: list[Trace] = []
    strip: list[Trace] = []
    shown = [label for label in looks if any(describe_series(row) == label for row in group.rows)]
    for label in shown:
        index = looks[label]
        own = [row for row in group.rows if describe_series(row) == label]
        cells = [[row for row in own if row[axis.column] == at] for at in places]
        shift = _SPREAD * ((shown.index(label) + 0.5) / len(shown) - 0.5) if len(places) == 1 else 0.0
        traces.append(_build_trace(cells, quantity, index, label, shift, page))
        gaps = _build_gap_trace(cells, quantity, index, len(strip), page)
        strip += [gaps | {"name": label}] if gaps else []
    return {
        "title": group.title,
        "data": ([trace for trace in traces if trace["x"]] or [_EMPTY]) + strip,
        "layout": _build_layout(axis, quantity, [str(at) for at in places], top, [gaps["name"] for gaps in strip]),
    }


def _build_trace(
    cells: Sequence[Sequence[Row]], quantity: ChartQuantity, index: int, label: str, shift: float, page: Page
) -> Trace:
    """Return one engine: a point for every number, joined where two neighbours have exactly one each."""
    points: list[dict[str, Any]] = []
    before = 0
    for position, cell in enumerate(cells):
        known = [row for row in cell if row[quantity.column] is not None]
        for row in known:
            points += [_BREAK] if points and (before != 1 or len(known) != 1) else []
            points.append(_build_chart_point(position + shift, row, quantity, index, page))
        before = len(known)
    series_values = {name: [point[name] for point in points] for name in _BREAK}
    bars = {"array": series_values.pop("above"), "arrayminus": series_values.pop("below")}
    return {
        "type": "scatter", "mode": "lines+markers", "name": label, "hoverinfo": "text",
        "error_y": {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, **bars},
        "marker": {"color": choose_colour(index), "size": 8, "symbol": series_values.pop("symbol")},
        "line": {"color": choose_colour(index), "width": 1.5}, **series_values,
    }  # fmt: skip


def _build_chart_point(x: float, row: Row, quantity: ChartQuantity, index: int, page: Page) -> dict[str, Any]:
    """Return a number with its interval; hollow where it should have one and none is known."""
    value, (low, high) = _compute_value(row, quantity), _compute_ends(row, quantity)
    hollow = quantity.interval and row[f"{quantity.column}_low"] is None
    return {
        "x": x,
        "y": value,
        "above": high - value,
        "below": value - low,
        "symbol": choose_symbol(index) + "-open" * hollow,
        "hovertext": format_hover(row, quantity.column),
        "customdata": _build_custom_data(row, page),
    }


def _build_gap_trace(
    cells: Sequence[Sequence[Row]], quantity: ChartQuantity, index: int, line: int, page: Page
) -> Trace:
    """Return why an engine has no number at some places, in words below the panel; empty where it has one wherever it
    was tried."""
    rows = [next(iter(cell), None) for cell in cells]
    known = [any(row[quantity.column] is not None for row in cell) for cell in cells]
    missing = [(position, row) for position, (row, one) in enumerate(zip(rows, known, strict=True)) if not one]
    if not any(row for _, row in missing):
        return {}
    anywhere = dict.fromkeys(("micro", "nodes", "devices_per_node", "outcome"))
    never = {"f": find_place(next(row for row in rows if row) | anywhere, page.facets), "c": None}
    return {
        "type": "scatter",
        "mode": "text",
        "yaxis": "y2",
        "x": [position for position, _ in missing],
        "y": [line] * len(missing),
        "text": [format_reason(row) for _, row in missing],
        "textfont": {"color": [choose_colour(index) if row else "#7F7F7F" for _, row in missing], "size": 10},
        "hoverinfo": "text",
        "hovertext": [format_hover(row, quantity.column) if row else "not run" for _, row in missing],
        "customdata": [_build_custom_data(row, page) if row else never for _, row in missing],
    }


def _build_layout(
    axis: Axis, quantity: ChartQuantity, ticks: Sequence[str], top: float, strip: Sequence[str]
) -> dict[str, Any]:
    height = _PLOT_PX + _LINE_PX * len(strip)
    below = _LINE_PX * len(strip) / height
    single = len(ticks) == 1  # one value is no axis
    layout: dict[str, Any] = {
        "height": height, "showlegend": False, "hovermode": "closest", "dragmode": False,
        "margin": {"l": 56, "r": 8, "t": 8, "b": 40},
        "xaxis": {
            "tickvals": [] if single else list(range(len(ticks))), "ticktext": [] if single else list(ticks),
            "range": [-0.5, len(ticks) - 0.5], "anchor": "y2" if strip else "y",
            "title": {"text": f"{axis.label} {ticks[0]}" if single else axis.label},
            "showgrid": False, "zeroline": False, "fixedrange": True,
        },
        "yaxis": {
            "range": [0, top or 1], "showticklabels": top > 0, "title": {"text": quantity.label},
            "tickformat": quantity.format, "nticks": 6,
            "domain": [below, 1], "fixedrange": True,
        },
    }  # fmt: skip
    if strip:
        layout["yaxis2"] = {
            "range": [len(strip) - 0.5, -0.5], "domain": [0, below], "showgrid": False, "zeroline": False,
            "tickvals": list(range(len(strip))), "ticktext": [html.escape(label[:9], quote=False) for label in strip],
            "tickfont": {"size": 9}, "fixedrange": True,
        }  # fmt: skip
    return layout


def _compute_value(row: Row, quantity: ChartQuantity) -> float:
    return float(row[quantity.column] / quantity.unit)


def _compute_ends(row: Row, quantity: ChartQuantity) -> tuple[float, float]:
    """Return the ends of the interval; the value itself where there is none."""
    value = _compute_value(row, quantity)
    if not quantity.interval or row[f"{quantity.column}_low"] is None:
        return value, value
    return row[f"{quantity.column}_low"] / quantity.unit, row[f"{quantity.column}_high"] / quantity.unit


def _build_custom_data(row: Row, page: Page) -> dict[str, Any]:
    return {"f": find_place(row, page.facets), "c": page.places[build_row_key(row)]}
