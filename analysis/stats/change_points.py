"""At which places of a series, such as commits in their order, its level changed: one value a place, of many series.

A value is the logarithm of a time at a place. Of each stretch of a series two things are looked at: its likeliest
single change, and its likeliest pair of them, after the second of which the level is as before (Olshen, Venkatraman,
Lucito & Wigler, Biostatistics 5, 2004). What is found cuts the stretch, and its parts are looked at in their turn. The
measure is Student's t of the likeliest, as a probability, times the number of places where it could be.

How high that is by chance is told by permutations of the places, of all series at once, so that it holds for any noise
whose places can be exchanged, however heavy its tails are, for all series together, and although a bad day meets all of
them (Westfall & Young, Resampling-Based Multiple Testing, 1993). Of places that resemble their neighbours it does not
hold; `tests/benchmarks/histories.py` counts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from analysis.stats.intervals import Interval
from bench.core.statistics import LEVEL, Array, quantile

LEAST_PLACES = 8
"""Of a series in which a change can be told: of seven, one order of them in 18 looks as if there were one."""
SIDE = 2
"""Places on each side of a change: a single one that is off is no change, for the next may be as before."""
DRAWS = 1999


class LevelChange(NamedTuple):
    """A change of a series' level, between two of its places."""

    before: int  # the last place of the old level …
    after: int  # … and the first of the new, as is likeliest
    within: tuple[int, int]  # the two places between which it surely happened
    size: float  # relative: 0.05 is 5 % more
    interval: Interval  # of the size, by the scatter of places around all levels, wherever within these it happened


class _Stretch(NamedTuple):
    """Places of a series that may have one level."""

    series: int
    places: NDArray[np.intp]


def find_changes(series: Sequence[Array], level: float = LEVEL, draws: int = DRAWS) -> list[list[LevelChange]]:
    """Return the changes of each series, in order; `series` hold NaN at places where nothing is known.

    Where no level changes, one is told in at most 1 - `level` of such sets of series.
    """
    values = [np.asarray(one, float) for one in series]
    known = [np.flatnonzero(np.isfinite(one)) for one in values]
    cuts: list[set[int]] = [set() for _ in values]  # positions among the known places where a new level begins
    waiting = [_Stretch(place, np.arange(one.size)) for place, one in enumerate(known)]
    rng = np.random.default_rng(0)
    while waiting := [one for one in waiting if one.places.size >= LEAST_PLACES]:
        keys = rng.random((draws, max(one.size for one in values)))
        found = _judge(waiting, values, known, keys, level)
        waiting = []
        for stretch, borders in found:
            cuts[stretch.series].update(int(stretch.places[border]) for border in borders)
            waiting += [_Stretch(stretch.series, part) for part in np.split(stretch.places, borders)]
    return [
        _describe(one[places], places, sorted(starts), level)
        for one, places, starts in zip(values, known, cuts, strict=True)
    ]


def _judge(
    stretches: Sequence[_Stretch],
    values: Sequence[Array],
    known: Sequence[NDArray[np.intp]],
    keys: Array,
    level: float,
) -> list[tuple[_Stretch, list[int]]]:
    """Return the stretches in which the level changes, and where in them a new one begins."""
    highest, found = np.zeros(len(keys)), []
    for stretch in stretches:
        places = known[stretch.series][stretch.places]
        logs = values[stretch.series][places]
        logs = logs - logs.mean()
        total = float(logs @ logs)
        if total <= 1e-24:  # equal to the last digit
            continue
        single, pair = _likeliest_single(logs), _likeliest_pair(logs)
        score, borders = max((_score(part, total, logs.size, count), where) for part, where, count in (single, pair))
        found.append((score, stretch, borders))
        orders = logs[np.argsort(keys[:, places], axis=1)]
        for count, most in ((single[2], _most_single(orders)), (pair[2], _most_pair(orders))):
            highest = np.maximum(highest, _scores(most, total, logs.size, count))
    return [
        (stretch, borders)
        for score, stretch, borders in found
        if (1 + np.count_nonzero(highest >= score * (1 - 1e-9))) / (1 + len(keys)) <= 1 - level
    ]


def _likeliest_single(logs: Array) -> tuple[float, list[int], int]:
    """Return the sum of squares that the likeliest change explains, where the new level begins, and among how many
    places."""
    n = logs.size
    at = np.arange(SIDE, n - SIDE + 1)
    parts = np.cumsum(logs)[at - 1] ** 2 * n / (at * (n - at))
    return float(parts.max()), [int(at[parts.argmax()])], at.size


def _likeliest_pair(logs: Array) -> tuple[float, list[int], int]:
    """Return the same of the likeliest two changes between which the level is another."""
    n, sums = logs.size, np.concatenate([[0.0], np.cumsum(logs)])
    first, last = np.triu_indices(n + 1, SIDE)
    inside = (first >= SIDE) & (last <= n - SIDE)
    first, last = first[inside], last[inside]
    if first.size == 0:
        return 0.0, [], 1
    length = last - first
    parts = (sums[last] - sums[first]) ** 2 * n / (length * (n - length))
    likeliest = int(parts.argmax())
    return float(parts[likeliest]), [int(first[likeliest]), int(last[likeliest])], first.size


def _most_single(orders: Array) -> Array:
    """Return, for each row, the sum of squares that its likeliest change explains."""
    n = orders.shape[1]
    at = np.arange(SIDE, n - SIDE + 1)
    most: Array = (np.cumsum(orders, axis=1)[:, at - 1] ** 2 * (n / (at * (n - at)))).max(axis=1)
    return most


def _most_pair(orders: Array) -> Array:
    """Return the same of the likeliest two, a length between them at a time."""
    n, sums = orders.shape[1], np.pad(np.cumsum(orders, axis=1), ((0, 0), (1, 0)))
    most = np.zeros(len(orders))
    for length in range(SIDE, n - 2 * SIDE + 1):
        apart = np.abs(sums[:, SIDE + length : n - SIDE + 1] - sums[:, SIDE : n - SIDE - length + 1]).max(axis=1)
        most = np.maximum(most, apart**2 * (n / (length * (n - length))))
    return most


def _score(part: float, total: float, n: int, count: int) -> float:
    return float(_scores(np.array([part]), total, n, count)[0])


def _scores(part: Array, total: float, n: int, count: int) -> Array:
    """Return minus the logarithm of the probability of a t as high as of this part of the squares, at one place of so
    many."""
    left = np.maximum(total - part, 1e-12 * total)
    t = np.sqrt((n - 2) * part / left)
    with np.errstate(divide="ignore"):  # a probability too small for a number: a score without bounds
        scores: Array = np.maximum(-(np.log(scipy.special.stdtr(n - 2, -t)) + math.log(2 * count)), 0.0)
    return scores


class _Border(NamedTuple):
    """Where a new level may begin, the logarithm of the change, and its ends."""

    first: int
    last: int
    size: float
    low: float
    high: float


def _describe(logs: Array, places: NDArray[np.intp], starts: Sequence[int], level: float) -> list[LevelChange]:
    """Return the changes of a series where a new level begins at `starts`, each moved to where it is likeliest between
    its neighbours; without those whose interval holds none at all."""
    starts = _settle(logs, starts)
    while starts:
        found = _measure(logs, starts, level)
        sure = [max(one.low, -one.high) for one in found]
        if min(sure) > 0:
            break
        starts = [one for place, one in enumerate(starts) if place != int(np.argmin(sure))]
    return [
        LevelChange(
            int(places[start - 1]),
            int(places[start]),
            (int(places[border.first - 1]), int(places[border.last])),
            math.expm1(border.size),
            Interval(math.expm1(border.low), math.expm1(border.high), "between repeats", level, logs.size),
        )
        for start, border in zip(starts, found if starts else (), strict=True)
    ]


def _settle(logs: Array, starts: Sequence[int]) -> list[int]:
    settled = list(starts)
    for place in range(len(settled)):
        low, high = _neighbours(settled, place, logs.size)
        within = logs[low:high]
        if within.size >= 2 * SIDE:
            settled[place] = low + _likeliest_single(within - within.mean())[1][0]
    return settled


def _neighbours(starts: Sequence[int], place: int, end: int) -> tuple[int, int]:
    return starts[place - 1] if place else 0, starts[place + 1] if place + 1 < len(starts) else end


def _measure(logs: Array, starts: Sequence[int], level: float) -> list[_Border]:
    """Return each change with all that it may be: a place is possible where the squares left are more than at the
    likeliest by less than a Student's quantile of their variance."""
    parts = np.split(logs, list(starts))
    freedom = logs.size - len(parts)
    variance = sum(float(((one - one.mean()) ** 2).sum()) for one in parts) / freedom
    factor = quantile(freedom, (1 + level) / 2)
    return [
        _measure_border(logs[low:high], low, start, variance, factor)
        for place, start in enumerate(starts)
        for low, high in [_neighbours(starts, place, logs.size)]
    ]


def _measure_border(logs: Array, offset: int, start: int, variance: float, factor: float) -> _Border:
    n = logs.size
    at = np.arange(1, n)
    old = np.cumsum(logs)[:-1] / at
    new = (logs.sum() - old * at) / (n - at)
    explained = (new - old) ** 2 * at * (n - at) / n
    chosen = start - offset - 1
    possible = explained >= explained[chosen] - factor**2 * variance
    reach = factor * np.sqrt(variance * (1 / at + 1 / (n - at)))
    low, high = (new - old - reach)[possible].min(), (new - old + reach)[possible].max()
    first, last = at[possible][[0, -1]] + offset
    return _Border(int(first), int(last), float(new[chosen] - old[chosen]), float(low), float(high))
