"""One configuration's step time over another's, from their runs or, where those are too few, from their steps."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from scipy import stats

from analysis.stats.effective import Array
from analysis.stats.interval import LEVEL, Interval
from analysis.stats.series import LEAST, mean_bounds, median_bounds, student

Runs = Sequence[Sequence[float]]
"""The steps, in their order and in seconds, of each run of one configuration."""


class Ratio(NamedTuple):
    """Step time of one side over that of the other, its interval, and the probability of one so far from 1 by chance;
    without an interval that is 1, for nothing can be told."""

    value: float
    interval: Interval | None
    p: float


def of_runs(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Ratio:
    """Return the ratio of the geometric means of the runs' median step times, of at least two runs each side.

    Student's test on their logarithms: Welch's, or of the differences where they are `blocked`, the runs of one place
    sharing an allocation. Of three runs a side a rank test finds nothing, whatever they are (p ≥ 0.1), of five nothing
    among ten pairs; `tests/benchmarks/coverage.py` counts the false alarms of both where nothing is normal.
    """
    ours, theirs = (np.log([statistics.median(run) for run in runs]) for runs in (one, other))
    value, n = float(np.exp(np.mean(ours) - np.mean(theirs))), len(one) + len(other)
    if not any(np.ptp(logs) for logs in ([ours - theirs] if blocked else [ours, theirs])):  # no spread to test by
        return Ratio(value, Interval(value, value, "between repeats", level, n), float(value == 1))
    test = stats.ttest_rel(ours, theirs) if blocked else stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = np.exp(test.confidence_interval(level))
    return Ratio(value, Interval(float(low), float(high), "between repeats", level, n), float(test.pvalue))


def of_steps(one: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of the medians of two series of steps: what more steps of the same runs would give. Of few
    steps, too few to bound a median, that of their geometric means.

    The interval joins those of the two sides as independent estimates, each end by itself (MOVER: Donner & Zou,
    Statistical Methods in Medical Research 21, 2012); p is the level at which such an interval ends at 1.
    """
    n = len(one) + len(other)
    if min(len(one), len(other)) < LEAST:
        return Ratio(float(np.median(one) / np.median(other)), None, 1.0)
    series = [np.asarray(steps, float) for steps in (one, other)]
    sides = [_median(steps, level) for steps in series]
    if not np.isfinite([(side.low, side.high) for side in sides]).all():
        sides = [_geometric_mean(steps, level) for steps in series]
    apart = sides[0].log - sides[1].log
    below = np.hypot(sides[0].log - sides[0].low, sides[1].high - sides[1].log)
    above = np.hypot(sides[0].high - sides[0].log, sides[1].log - sides[1].low)
    value, low, high = (float(np.exp(x)) for x in (apart, apart - below, apart + above))
    freedom = np.minimum(sides[0].freedom, sides[1].freedom)
    chance = _chance(abs(apart), below if apart > 0 else above, freedom, level)
    return Ratio(value, Interval(low, high, "within the runs", level, n), chance)


class _Side(NamedTuple):
    """Logarithm of a step time, with the ends of its interval, and its degrees of freedom."""

    log: float
    low: float
    high: float
    freedom: Array


def _median(steps: Array, level: float) -> _Side:
    bounds = median_bounds(steps, level)
    low = float(np.log(bounds.low)) if bounds.low > 0 else -math.inf
    return _Side(float(np.log(np.median(steps))), low, float(np.log(bounds.high)), bounds.freedom)


def _geometric_mean(steps: Array, level: float) -> _Side:
    bounds = mean_bounds(np.log(steps), level)
    return _Side(float(np.log(steps).mean()), float(bounds.low), float(bounds.high), bounds.freedom)


def _chance(apart: float, reach: Array, freedom: Array, level: float) -> float:
    """Return the probability of an estimate so far away that an interval of `level` has the length `reach`."""
    if apart == 0 or reach == 0:
        return float(apart == 0)
    return float(2 * scipy.special.stdtr(freedom, -apart * student(freedom, level) / reach))
