"""Changes over time: places where the level of a series changes, and drift of a configuration that is repeated within
an allocation.

Change points. A series has one value per place, such as a commit: the logarithm of a time. Each segment of a series is
tested for its most likely single change. The segment is also tested for its most likely pair of changes, of which the
second change restores the old level (Olshen, Venkatraman, Lucito & Wigler, Biostatistics 5, 2004). A detected change
splits the segment, and the new segments are tested in turn.

Score. The p-value of Student's t is multiplied by the number of possible positions of the change. The score of the
change is minus the logarithm of that product. A change is detected if its score exceeds a threshold. The threshold
comes from random permutations of the places. Each permutation is used for all series.

Guarantee. The probability of any false change is limited for all series together. The limit holds for any noise with
exchangeable places, also with heavy tails. The limit also holds if a bad day affects all series (Westfall & Young,
Resampling-Based Multiple Testing, 1993). The limit does not hold for autocorrelated places; see
`tests/benchmarks/histories.py`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from analysis.stats.compare import Runs
from analysis.stats.intervals import Interval
from bench.core.statistics import LEVEL, Array, quantile

LEAST_PLACES = 8
"""Smallest number of places in a series in which a change can be detected. With seven places, about one of 18 random
orders of the values looks like a change, which is more than 5 %."""
SIDE = 2
"""Smallest number of places on each side of a change. A single outlier is no change, because the next place may return
to the old level."""
DRAWS = 1999
LEAST_CONTROLS = 4
"""Smallest number of control points for which drift has an interval. A control point is a repeated run of a reference
configuration within an allocation. A line through four of them leaves two degrees of freedom for estimating the usual
difference between runs."""

_EQUAL = 1e-24  # sum of squares below which all logarithms count as equal (rounding errors)


class Drift(NamedTuple):
    """Relative change of the step time of a configuration that is repeated within an allocation (its control points). A
    `change` of 0.02 means 2 % slower at the end than at the beginning."""

    change: float
    interval: Interval | None  # of the change; None below LEAST_CONTROLS control points

    @property
    def detected(self) -> bool:
        """True if the interval of the drift (`change`) excludes zero. In this case, a comparison of two runs that are
        far apart in time may be wrong by up to `change`."""
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high


def measure_drift(controls: Runs, level: float = LEVEL) -> Drift | None:
    """Return the drift over control points, which are runs of one configuration in time order; None for fewer than two
    runs.

    The drift is the slope of the least-squares line through the logarithms of the runs' mean step times. The residuals
    estimate how much runs differ without drift. Two or three runs cannot separate this difference from drift, so their
    drift has no interval.
    """
    if len(controls) < 2:
        return None
    logs = np.log([np.mean(run) for run in controls])
    if len(controls) < LEAST_CONTROLS:
        return Drift(math.expm1(logs[-1] - logs[0]), None)
    place = np.linspace(-0.5, 0.5, logs.size)
    slope = float(place @ logs / (place @ place))
    degrees_of_freedom = logs.size - 2
    residuals = logs - logs.mean() - slope * place
    error = math.sqrt(float(residuals @ residuals) / degrees_of_freedom / float(place @ place))
    margin = quantile(degrees_of_freedom, (1 + level) / 2) * error
    low, high = math.expm1(slope - margin), math.expm1(slope + margin)
    return Drift(math.expm1(slope), Interval(low, high, "between repeats", level, logs.size))


class LevelChange(NamedTuple):
    """A change of the level of a series between two of its values. A place is the index of a value in the series."""

    before: int  # last place of the old level, at the most likely position of the change
    after: int  # first place of the new level, at that position
    within: tuple[int, int]  # the two places between which the change happened, at the confidence level
    size: float  # relative change: 0.05 is 5 % more time
    interval: Interval  # of the size; it covers every position in `within`. Its variance is that around all levels.


class _Stretch(NamedTuple):
    """A segment of a series. The segment is tested for a change of its level. `series` is the index of the series.
    `places` are the indices of the segment's values within the series. Missing values are skipped."""

    series: int
    places: NDArray[np.intp]


def find_changes(series: Sequence[Array], level: float = LEVEL, draws: int = DRAWS) -> list[list[LevelChange]]:
    """Return the changes of the mean of each series, in order of place. A series has shape (places,), where a place is
    for example a commit. It has NaN at places without a value.

    `level` is the confidence level for all series together: if no mean changes, the probability that any change is
    reported is at most 1 - `level`. `draws` is the number of random permutations of each test."""
    values = [np.asarray(one, float) for one in series]
    known = [np.flatnonzero(np.isfinite(one)) for one in values]
    cuts: list[set[int]] = [set() for _ in values]  # per series, places where a new level begins
    waiting = [_Stretch(number, places) for number, places in enumerate(known)]
    rng = np.random.default_rng(0)
    while waiting := [one for one in waiting if one.places.size >= LEAST_PLACES]:
        keys = rng.random((draws, max(one.size for one in values)))
        found = _select_changed(waiting, values, keys, level)
        waiting = []
        for stretch, borders in found:
            cuts[stretch.series].update(int(stretch.places[border]) for border in borders)
            waiting += [_Stretch(stretch.series, part) for part in np.split(stretch.places, borders)]
    return [
        _describe(one[places], places, np.searchsorted(places, sorted(starts)).tolist(), level)
        for one, places, starts in zip(values, known, cuts, strict=True)
    ]


def _select_changed(
    stretches: Sequence[_Stretch], values: Sequence[Array], keys: Array, level: float
) -> list[tuple[_Stretch, list[int]]]:
    """Return the segments with a detected change. Each segment comes with a list of indices within the segment. A new
    level begins at each of these indices.

    `stretches` are the tested segments, and `values` are the series. A series has NaN at places (such as commits)
    without a value. `keys` has shape (draws, places) and holds random numbers. Sorting a row of `keys` gives a
    permutation of the places, which is used for all series. The probability of any false detection is at most 1 -
    `level`.
    """
    highest, found = np.zeros(len(keys)), []
    for stretch in stretches:
        logs, n = values[stretch.series][stretch.places], stretch.places.size
        logs = logs - logs.mean()
        total = float(logs @ logs)
        if total <= _EQUAL:
            continue
        # row 0 is the data, the other rows are its permutations
        orders = np.vstack([logs, logs[np.argsort(keys[:, stretch.places], axis=1)]])
        candidates = []
        singles, pairs = n - 2 * SIDE + 1, math.comb(n - 3 * SIDE + 2, 2)  # number of possible positions of each kind
        for (explained, borders), positions in ((_search_single(orders), singles), (_search_pair(orders), pairs)):
            scores = _compute_scores(explained, total, n, positions)
            candidates.append((float(scores[0]), borders[0].tolist()))
            highest = np.maximum(highest, scores[1:])
        found.append((*max(candidates), stretch))
    return [
        (stretch, borders)
        for score, borders, stretch in found
        # the tolerance also counts permutations that equal the data, because their sums are rounded differently
        if (1 + np.count_nonzero(highest >= score * (1 - 1e-9))) / (1 + len(keys)) <= 1 - level
    ]


def _search_single(orders: Array) -> tuple[Array, NDArray[np.intp]]:
    """Return the most likely single change of the level in each row. The first returned array has the sum of squares
    that the change explains, shape (rows,). The second array has the index where the new level begins, shape (rows, 1).

    `orders` has shape (rows, places). Row 0 holds the values of a segment, with mean zero. The other rows are
    permutations of row 0.
    """
    n = orders.shape[1]
    at = np.arange(SIDE, n - SIDE + 1)
    explained = np.cumsum(orders, axis=1)[:, at - 1] ** 2 * (n / (at * (n - at)))
    return explained.max(axis=1), at[explained.argmax(axis=1)][:, None]


def _search_pair(orders: Array) -> tuple[Array, NDArray[np.intp]]:
    """Return the most likely pair of level changes in each row. The level is the same before the first and after the
    second change, but different between the two changes. The first returned array has the sum of squares that the pair
    explains, shape (rows,). The second array has the indices of both changes, shape (rows, 2).

    `orders` has shape (rows, places). Row 0 holds the values of a segment, with mean zero. The other rows are
    permutations of row 0.
    """
    n, sums, rows = orders.shape[1], np.pad(np.cumsum(orders, axis=1), ((0, 0), (1, 0))), np.arange(len(orders))
    explained, borders = np.zeros(rows.size), np.zeros((rows.size, 2), np.intp)
    # one distance between the changes at a time, because all pairs of all rows would not fit in memory
    for length in range(SIDE, n - 2 * SIDE + 1):
        apart = np.abs(sums[:, SIDE + length : n - SIDE + 1] - sums[:, SIDE : n - SIDE - length + 1])
        first = apart.argmax(axis=1)
        most = apart[rows, first] ** 2 * (n / (length * (n - length)))
        borders = np.where((most > explained)[:, None], SIDE + np.column_stack([first, first + length]), borders)
        explained = np.maximum(explained, most)
    return explained, borders


def _compute_scores(explained: Array, total: float, n: int, positions: int) -> Array:
    """Return the score of the most likely change (or pair of changes) in each row, shape (rows,). A row holds the `n`
    values of a segment, or a permutation of them. The two-sided p-value of Student's t is multiplied by `positions`,
    the number of possible positions of the change. The score is minus the logarithm of this product.

    `explained` holds, for each row, the sum of squares that the change explains. `total` is the total sum of squares of
    a row, which is equal in all rows.
    """
    left = np.maximum(total - explained, 1e-12 * total)
    t = np.sqrt((n - 2) * explained / left)
    with np.errstate(divide="ignore"):  # a p-value that underflows to 0 gives an infinite score
        scores: Array = np.maximum(-(np.log(scipy.special.stdtr(n - 2, -t)) + math.log(2 * positions)), 0.0)
    return scores


class _Border(NamedTuple):
    """First and last possible position at which a new level of a series begins, and the log ratio of the new to the old
    level, with the interval of this ratio."""

    first: int
    last: int
    size: float
    low: float
    high: float


def _describe(logs: Array, places: NDArray[np.intp], starts: Sequence[int], level: float) -> list[LevelChange]:
    """Return the changes of a series, given the indices `starts` of the values where a new level begins. `logs` are the
    values of the series, and `places` are their places (such as commits) by index. `level` is the confidence level of
    the intervals.

    Each change is first moved to its most likely position between the two neighbouring changes. Then changes whose size
    has an interval that contains zero are dropped one by one.
    """
    settled = _settle(logs, starts)
    borders = _measure_borders(logs, settled, level)
    while borders:
        # distance of each interval from zero; negative if it contains zero
        distances = [max(one.low, -one.high) for one in borders]
        if min(distances) > 0:
            break
        settled.pop(int(np.argmin(distances)))
        borders = _measure_borders(logs, settled, level)
    changes = []
    for start, border in zip(settled, borders, strict=True):
        before, after, first, last = (int(places[at]) for at in (start - 1, start, border.first - 1, border.last))
        size, low, high = (math.expm1(log) for log in (border.size, border.low, border.high))
        interval = Interval(low, high, "between repeats", level, logs.size)
        changes.append(LevelChange(before, after, (first, last), size, interval))
    return changes


def _settle(logs: Array, starts: Sequence[int]) -> list[int]:
    settled = list(starts)
    for place in range(len(settled)):
        low, high = _get_neighbours(settled, place, logs.size)
        within = logs[low:high]
        if within.size >= 2 * SIDE:
            settled[place] = low + int(_search_single((within - within.mean())[None])[1][0, 0])
    return settled


def _get_neighbours(starts: Sequence[int], place: int, end: int) -> tuple[int, int]:
    return starts[place - 1] if place else 0, starts[place + 1] if place + 1 < len(starts) else end


def _measure_borders(logs: Array, starts: Sequence[int], level: float) -> list[_Border]:
    """Return the interval of each change's position and size. A new level begins at each of the indices `starts`.

    The residual sum of squares is smallest at the most likely position of a change. The interval also contains a
    position whose residual sum of squares is larger by at most v · q². Here v is the variance around the levels, and q
    is the quantile of Student's t.
    """
    if not starts:
        return []
    parts = np.split(logs, list(starts))
    degrees_of_freedom = logs.size - len(parts)
    variance = sum(float(((one - one.mean()) ** 2).sum()) for one in parts) / degrees_of_freedom
    factor = quantile(degrees_of_freedom, (1 + level) / 2)
    return [
        _measure_border(logs[low:high], low, start, variance, factor)
        for place, start in enumerate(starts)
        for low, high in [_get_neighbours(starts, place, logs.size)]
    ]


def _measure_border(logs: Array, offset: int, start: int, variance: float, factor: float) -> _Border:
    n = logs.size
    at = np.arange(1, n)
    old = np.cumsum(logs)[:-1] / at
    new = (logs.sum() - old * at) / (n - at)
    explained = (new - old) ** 2 * at * (n - at) / n
    chosen = start - offset - 1
    possible = explained >= explained[chosen] - factor**2 * variance
    margin = factor * np.sqrt(variance * (1 / at + 1 / (n - at)))
    low, high = (new - old - margin)[possible].min(), (new - old + margin)[possible].max()
    first, last = at[possible][[0, -1]] + offset
    return _Border(int(first), int(last), float(new[chosen] - old[chosen]), float(low), float(high))
