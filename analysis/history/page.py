"""The page of a history: what was looked at, every change, and a figure per configuration. No script, no request."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from analysis.formats.numbers import format_significant
from analysis.formats.pages import load_template
from analysis.history.phrases import describe_axis, describe_change, describe_doubts, describe_places
from analysis.history.series import History, HistorySeries
from analysis.history.table import list_changes
from bench.formatting import format_count

PAGE = "history.html"
MOST_FIGURES = 200
_WIDTH, _HEIGHT = 1000.0, 200.0
_TICKS = 4


class Dot(NamedTuple):
    """A point of a figure, in its own units, and what hovering over it tells."""

    x: float
    y: float
    text: str = ""


class Tick(NamedTuple):
    """A line across a figure: how far from its top, in per cent, and its value."""

    top: float
    text: str


class Figure(NamedTuple):
    """One configuration over the places: shapes in a box of fixed size that is stretched to its room."""

    name: str
    config_id: str
    runs: tuple[Dot, ...]
    dots: tuple[Dot, ...]
    levels: tuple[tuple[float, float, float], ...]  # from, to, height
    bands: tuple[tuple[float, float, str], ...]  # from, width, what changed
    borders: tuple[tuple[float, str], ...]  # where a level begins, and the number of the change
    ticks: tuple[Tick, ...]
    first: str
    last: str
    captions: tuple[str, ...]


def render_page(history: History) -> str:
    """Return the page as HTML."""
    changes = [
        (series.name, describe_change(one), *describe_places(history, one), one.also, one.change.size > 0)
        for series, one in list_changes(history)
    ]
    shown = history.series[:MOST_FIGURES]
    return load_template("analysis.history", "history.html.j2").render(
        by=history.axis.by,
        lead=f"Time per sample of {format_count(len(history.series), 'configuration')} over {describe_axis(history)}",
        changes=changes,
        doubts=list(describe_doubts(history)),
        figures=[_build_figure(history, one) for one in shown],
        omitted=len(history.series) - len(shown),
        width=_WIDTH,
        height=_HEIGHT,
    )


def _build_figure(history: History, series: HistorySeries) -> Figure:
    places = history.axis.places
    ticks = _choose_ticks([seconds for one in series.values for seconds in one.sample_s])
    step = _WIDTH / len(places)

    def height(seconds: float) -> float:
        return _HEIGHT * (ticks[-1] - seconds) / (ticks[-1] - ticks[0])

    starts = [one.change.after for one in series.changes]
    parts = list(zip([0, *starts], [*starts, len(places)], strict=True))
    captions = []
    for one in series.changes:
        likely, surely = describe_places(history, one)
        captions.append(
            f"{describe_change(one)}, {likely}"
            + (f"; surely within {surely}" if surely else "")
            + (f"; also {one.also}" if one.also else "")
        )
    return Figure(
        series.name,
        series.config_id,
        tuple(Dot((v.place + 0.5) * step, height(s)) for v in series.values if len(v.sample_s) > 1 for s in v.sample_s),
        tuple(
            Dot(
                (one.place + 0.5) * step,
                height(one.typical),
                f"{places[one.place].name}: {format_significant(one.typical)} s per sample, "
                f"{format_count(len(one.sample_s), 'run')}",
            )
            for one in series.values
        ),
        tuple((low * step, high * step, height(series.level(low))) for low, high in parts),
        tuple(
            ((one.change.within[0] + 0.5) * step, (one.change.within[1] - one.change.within[0]) * step, caption)
            for one, caption in zip(series.changes, captions, strict=True)
        ),
        tuple((start * step, str(number)) for number, start in enumerate(starts, start=1)),
        tuple(Tick(height(one) / _HEIGHT * 100, _format_tick(one, ticks)) for one in ticks),
        places[0].name,
        places[-1].name if len(places) > 1 else "",
        tuple(captions),
    )


def _choose_ticks(values: Sequence[float]) -> list[float]:
    """Return round values around all of these, evenly apart, two at least."""
    low, high = min(values), max(values)
    width = max(high - low, 0.02 * high)
    raw = width / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= raw)
    first = max(math.floor((low - width / 20) / step), 0)
    last = max(math.ceil((high + width / 20) / step), first + 1)
    return [step * number for number in range(first, last + 1)]


def _format_tick(value: float, ticks: Sequence[float]) -> str:
    decimals = max(-math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9), 0)
    return f"{value:,.{decimals}f}"
