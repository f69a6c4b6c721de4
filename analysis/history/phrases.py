"""How a history is told in words, on the page and in the terminal."""

from collections.abc import Iterable

from analysis.formats.numbers import format_ratio_change
from analysis.history.series import History, HistoryChange
from analysis.stats.change_points import LEAST_PLACES, SIDE
from bench.formatting import format_count
from bench.statistics import LEVEL

_THINGS = {"commit": "commit", "version": "set of versions", "date": "day"}


def describe_axis(history: History) -> str:
    """Say what the history is over."""
    axis = history.axis
    thing = _THINGS[axis.by] if len(axis.places) == 1 else {**_THINGS, "version": "sets of version"}[axis.by]
    days = f"; measured {' to '.join(history.days)}" if history.days else ""
    return f"{format_count(len(axis.places), thing)}, {axis.order}{days}."


def describe_change(change: HistoryChange) -> str:
    """Say by how much the time per sample changed."""
    found = change.change
    ratio = 1 + found.size
    text = format_ratio_change(ratio, 1 + found.interval.low, 1 + found.interval.high)
    return f"{'slower' if ratio > 1 else 'faster'}, {text}"


def describe_places(history: History, change: HistoryChange) -> tuple[str, str]:
    """Return between which two places a change probably happened, and within which it surely did; the latter empty
    where that is the same."""
    places, found = history.axis.places, change.change
    likely = (found.before, found.after)
    text, surely = (" → ".join(places[place].name for place in pair) for pair in (likely, found.within))
    return text, "" if found.within == likely else surely


def describe_doubts(history: History) -> Iterable[str]:
    """Say what the changes hold, and what took no part."""
    wrong = round(100 * (1 - LEVEL))
    yield (
        f"Where no time changes, one or more changes are told in at most {wrong} of 100 such histories, all their "
        "configurations together, whatever the noise between places looks like, unless places resemble the one "
        f"before them. A change is told from its {_ordinal(SIDE)} place on. Intervals hold at {100 * LEVEL:g} %."
    )
    short = [one for one in history.series if one.short]
    if short:
        yield (
            f"{_count_configurations(len(short))} with fewer than {LEAST_PLACES} places: no change can be told of them."
        )
    steady = sum(not one.changes and not one.short for one in history.series)
    if steady:
        yield f"{_count_configurations(steady)} with no detectable change."
    left = {
        "flagged busy": sum(one.flagged for one in history.series),
        "without a time": sum(one.failed for one in history.series),
        f"of no known {_THINGS[history.axis.by]}": history.nowhere,
    }
    text = [f"{format_count(count, 'run')} {what}" for what, count in left.items() if count]
    if text:
        yield f"Left out: {', '.join(text)}."


def _count_configurations(count: int) -> str:
    return format_count(count, "configuration")


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}[number]
