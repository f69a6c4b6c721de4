"""Output of a history: text for a terminal, CSV tables, and an HTML page that works offline without scripts."""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from analysis.formats import (
    MISSING,
    find_width,
    format_ratio_change,
    format_significant,
    join_csv,
    load_template,
    render_text_table,
)
from analysis.history import History, HistoryChange, HistorySeries
from analysis.stats.change_points import LEAST_PLACES, SIDE
from bench.core.errors import make_printable
from bench.core.formatting import format_count
from bench.core.statistics import LEVEL

_THINGS = {"commit": "commit", "version": "version set", "date": "day"}


def describe_axis(history: History) -> str:
    """Describe the places (commits, versions or days) of a history: their number, their order and the days of the
    measurements."""
    axis = history.axis
    days = f"; measured {' to '.join(history.days)}" if history.days else ""
    return f"{format_count(len(axis.places), _THINGS[axis.by])}, {axis.order}{days}."


def describe_change(change: HistoryChange) -> str:
    """Describe the size of a change of the time per sample, with its interval."""
    found = change.change
    ratio = 1 + found.size
    text = format_ratio_change(ratio, 1 + found.interval.low, 1 + found.interval.high)
    return f"{'slower' if ratio > 1 else 'faster'}, {text}"


def describe_places(history: History, change: HistoryChange) -> tuple[str, str]:
    """Return two texts. Each names two places (commits, versions or days) between which a change happened. The first
    text names the places directly before and after the most likely position of the change. The second text names the
    places at the ends of the confidence interval of this position.

    The second text is empty if it would name the same places as the first text.
    """
    places, found = history.axis.places, change.change
    likely = (found.before, found.after)
    text, surely = (" → ".join(places[place].name for place in pair) for pair in (likely, found.within))
    return text, "" if found.within == likely else surely


def describe_doubts(history: History) -> Iterable[str]:
    """Yield sentences on the probability of falsely reported changes, on configurations without a change, and on
    excluded runs."""
    wrong, thing = round(100 * (1 - LEVEL)), _THINGS[history.axis.by]
    yield (
        f"If no time changed, at most {wrong} of 100 such histories would report any change of any configuration. This "
        f"holds if the noise has the same distribution at all {thing}s, and if the times of neighbouring {thing}s are "
        f"not correlated. A change can be detected only with at least {SIDE} {thing}s before and after it. Confidence "
        f"level of intervals: {100 * LEVEL:g} %."
    )
    short = [one for one in history.series if one.short]
    if short:
        count = format_count(len(short), "configuration")
        yield f"No change can be detected in {count} measured at fewer than {LEAST_PLACES} {thing}s."
    steady = sum(not one.changes and not one.short for one in history.series)
    if steady:
        yield f"No change was detected in {format_count(steady, 'configuration')}."
    if excluded := describe_excluded(history):
        yield f"Excluded: {excluded}."


def describe_excluded(history: History) -> str:
    """List how many runs are excluded, by reason. Empty if all runs are included."""
    left = {
        "made on a busy machine or paused": history.flagged,
        "without step times": history.failed,
        f"with an unknown {_THINGS[history.axis.by]}": history.nowhere,
    }
    return ", ".join(f"{format_count(count, 'run')} {what}" for what, count in left.items() if count)


CHANGES = (
    "config_id", "machine", "configuration", "by", "before", "after", "earliest_before", "latest_after", "change",
    "change_low", "change_high", "level", "places", "also",
)  # fmt: skip
VALUES = (
    "config_id", "machine", "configuration", "by", "place", "number", "first_started_at", "n", "sample_s",
    "sample_s_lowest", "sample_s_highest", "level_s",
)  # fmt: skip


def list_changes(history: History) -> list[tuple[HistorySeries, HistoryChange]]:
    """Return every change with its series, sorted by the commit, version or day at which the change happened, the
    latest first."""
    found = [(one, change) for one in history.series for change in one.changes]
    return sorted(found, key=lambda pair: -pair[1].change.after)


def render_tables(history: History) -> dict[str, bytes]:
    """Return two tables as CSV, by file name: the changes, and the values of each configuration."""
    places = [place.key for place in history.axis.places]
    changes = [
        {
            **_name(history, one), "before": places[found.before], "after": places[found.after],
            "earliest_before": places[found.within[0]], "latest_after": places[found.within[1]],
            "change": found.size, "change_low": found.interval.low, "change_high": found.interval.high,
            "level": found.interval.level, "places": found.interval.n, "also": also,
        }
        for one, (found, also) in list_changes(history)
    ]  # fmt: skip
    values = [
        {
            **_name(history, one), "place": places[value.place], "number": value.place,
            "first_started_at": value.origin.started_at, "n": len(value.sample_s), "sample_s": value.typical,
            "sample_s_lowest": min(value.sample_s), "sample_s_highest": max(value.sample_s),
            "level_s": one.level(value.place),
        }
        for one in history.series
        for value in one.values
    ]  # fmt: skip
    return {"changes.csv": join_csv(CHANGES, changes).encode(), "values.csv": join_csv(VALUES, values).encode()}


def _name(history: History, one: HistorySeries) -> dict[str, Any]:
    return {"config_id": one.config_id, "machine": one.machine, "configuration": one.name, "by": history.axis.by}


HEAD = ("configuration", "time per sample", "most likely between", f"between ({100 * LEVEL:g} %)", "other differences")


def to_text(history: History) -> str:
    """Return a text: the changes as a table as wide as the terminal, the latest first, and below it the sentences of
    `describe_doubts`."""
    rows, styles = [], []
    for series, change in list_changes(history):
        likely, surely = describe_places(history, change)
        rows.append((series.name, describe_change(change), likely, surely or MISSING, change.also or MISSING))
        styles.append("bold red" if change.change.size > 0 else "")
    width = find_width() if sys.stdout.isatty() else None
    table = render_text_table(HEAD, rows, [False] * len(HEAD), width, styles) if rows else ""
    doubts = "".join(f"{doubt}\n" for doubt in describe_doubts(history))
    return f"{make_printable(describe_axis(history))}\n{table}{doubts}"


PAGE = "history.html"
MOST_FIGURES = 200
_FIGURE_WIDTH, _FIGURE_HEIGHT = 1000.0, 200.0
_TICKS = 4


def render_page(history: History) -> str:
    """Return the HTML page of a history."""
    changes = [
        (series.name, describe_change(one), *describe_places(history, one), one.also, one.change.size > 0)
        for series, one in list_changes(history)
    ]
    shown = history.series[:MOST_FIGURES]
    return load_template("analysis.history", "history.html.j2").render(
        by=history.axis.by,
        thing=_THINGS[history.axis.by],
        level=f"{100 * LEVEL:g} %",
        lead=f"Time per sample of {format_count(len(history.series), 'configuration')} over {describe_axis(history)}",
        changes=changes,
        doubts=list(describe_doubts(history)),
        figures=[_build_figure(history, one) for one in shown],
        omitted=len(history.series) - len(shown),
        width=_FIGURE_WIDTH,
        height=_FIGURE_HEIGHT,
    )


def _build_figure(history: History, series: HistorySeries) -> dict[str, Any]:
    """Return the coordinates and texts of one configuration's chart, which shows times over commits, versions or days.
    Coordinates refer to a box of fixed size, which the page scales."""
    places = history.axis.places
    ticks = _choose_ticks([seconds for one in series.values for seconds in one.sample_s])
    decimals = max(-math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9), 0)
    step = _FIGURE_WIDTH / len(places)

    def height(seconds: float) -> float:
        return _FIGURE_HEIGHT * (ticks[-1] - seconds) / (ticks[-1] - ticks[0])

    def dot(place: int, seconds: float, text: str = "") -> dict[str, Any]:
        return {"x": (place + 0.5) * step, "y": height(seconds), "text": text}  # the text is a tooltip

    dots = []
    for one in series.values:
        text = f"{format_significant(one.typical)} s per sample, {format_count(len(one.sample_s), 'run')}"
        dots.append(dot(one.place, one.typical, f"{places[one.place].name}: {text}"))
    starts = [one.change.after for one in series.changes]
    levels = zip([0, *starts], [*starts, len(places)], strict=True)
    captions, bands = [], []
    for change in series.changes:
        likely, surely = describe_places(history, change)
        parts = [
            f"{describe_change(change)}, {likely}",
            surely and f"with {100 * LEVEL:g} % confidence within {surely}",
            change.also and f"other differences: {change.also}",
        ]
        captions.append("; ".join(filter(None, parts)))
        first, last = change.change.within
        bands.append(((first + 0.5) * step, (last - first) * step, captions[-1]))
    return {
        "name": series.name,
        "config_id": series.config_id,
        "runs": [dot(v.place, s) for v in series.values if len(v.sample_s) > 1 for s in v.sample_s],
        "dots": dots,
        "levels": [(low * step, high * step, height(series.level(low))) for low, high in levels],
        "bands": bands,  # left edge, width, caption
        "borders": [(start * step, str(number)) for number, start in enumerate(starts, start=1)],
        "ticks": [{"top": height(one) / _FIGURE_HEIGHT * 100, "text": f"{one:,.{decimals}f}"} for one in ticks],
        "first": places[0].name,
        "last": places[-1].name if len(places) > 1 else "",
        "captions": captions,
    }


def _choose_ticks(values: Sequence[float]) -> list[float]:
    """Return at least two evenly spaced round values for an axis that encloses all values."""
    low, high = min(values), max(values)
    width = max(high - low, 0.02 * high)
    raw = width / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= raw)
    first = max(math.floor((low - width / 20) / step), 0)
    last = max(math.ceil((high + width / 20) / step), first + 1)
    return [step * number for number in range(first, last + 1)]
