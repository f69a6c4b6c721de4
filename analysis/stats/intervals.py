"""Intervals of a median, a mean or a rate: of one run's steps, and of independent repeats."""

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

import bench.core.statistics
from bench.core.statistics import LEAST, LEVEL, Array, SeriesBounds, effective_size, mean_bounds, median_bounds

Kind = Literal["within the run", "within the runs", "between repeats", "range of repeats"]


class Interval(NamedTuple):
    """Where a value lies with probability `level`.

    Within a run it tells what more steps of that run would give, not what another run would; only between repeats it
    tells the latter. `n` is the steps or the repeats that it rests on, of both sides where two are compared.
    """

    low: float
    high: float
    kind: Kind
    level: float
    n: int


FEW = 20
"""Effective steps below which the interval of a median covers less than it says: over the processes of
`tests/benchmarks/coverage.py` 77 times in a hundred at 6 to 10, 89 times at 10 to 15, and 93 to 94 times from 15 on;
where steps resemble each other most, 89 times at 15 to 20. The mean's depends more on how rare slow steps are."""

WIDE = 0.02
"""Width of an interval, over its value, above which it is noted."""


def median_interval(step_s: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Return the interval of the median of a run's steps in their order; None where they are too few to bound it."""
    steps = np.asarray(step_s, float)
    return _interval(median_bounds(steps, level), level, steps) if steps.size >= LEAST else None


def mean_interval(step_s: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of a run's steps in their order; None where they are too few to bound it."""
    steps = np.asarray(step_s, float)
    return _interval(mean_bounds(steps, level), level, steps) if steps.size >= LEAST else None


def few(step_s: ArrayLike) -> bool:
    """Whether a run's steps bound their mean and are worth too few independent ones for that to hold at 95 %."""
    steps = np.asarray(step_s, float)
    return mean_interval(steps) is not None and float(effective_size(steps)) < FEW


def rate_interval(step_s: ArrayLike, rate: float, level: float = LEVEL) -> Interval | None:
    """Return the interval of a rate over the window, such as tokens per second: a fixed amount per step over the mean
    of the steps. None where the mean has none, or one that reaches zero."""
    return rate_of(mean_interval(step_s, level), np.asarray(step_s, float).tolist(), rate)


def rate_of(mean: Interval | None, step_s: Sequence[float], rate: float) -> Interval | None:
    """Return the interval of a rate over the window from that of the mean of its steps."""
    if mean is None or mean.low <= 0:
        return None
    amount = rate * statistics.fmean(step_s)
    return mean._replace(low=amount / mean.high, high=amount / mean.low)


def _interval(bounds: SeriesBounds, level: float, steps: Array) -> Interval | None:
    low, high = float(bounds.low), float(bounds.high)
    return Interval(low, high, "within the run", level, steps.size) if np.isfinite(low) and np.isfinite(high) else None


def repeats_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the rank-based interval of the median of independent repeats (Hoefler & Belli, SC'15, section 3.1.3).

    Where so few repeats have none of that level, their range with the level that it has, 1 - 2^(1 - n); None below two.
    """
    n = len(values)
    if n < 2:
        return None
    if ends := bench.core.statistics.median_interval(values, level):
        return Interval(*ends, "between repeats", level, n)
    return Interval(min(values), max(values), "range of repeats", 1 - 2 ** (1 - n), n)
