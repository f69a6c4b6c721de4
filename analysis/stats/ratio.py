"""One configuration's step time over another's, from their runs or, where those are too few, from their steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from scipy import stats

from analysis.stats.effective import Array
from analysis.stats.interval import LEVEL, Interval
from analysis.stats.series import LEAST, median_bounds, student

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
    ours, theirs = (np.log([np.median(run) for run in runs]) for runs in (one, other))
    value, n = float(np.exp(np.mean(ours) - np.mean(theirs))), len(one) + len(other)
    if not any(np.ptp(logs) for logs in ([ours - theirs] if blocked else [ours, theirs])):  # no spread to test by
        return Ratio(value, Interval(value, value, "between repeats", level, n), float(value == 1))
    test = stats.ttest_rel(ours, theirs) if blocked else stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = np.exp(test.confidence_interval(level))
    return Ratio(value, Interval(float(low), float(high), "between repeats", level, n), float(test.pvalue))


def of_steps(one: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of the medians of two series of steps: what more steps of the same runs would give.

    The interval joins those of the two medians as independent estimates, each end by itself (MOVER: Donner & Zou,
    Statistical Methods in Medical Research 21, 2012); p is the level at which such an interval ends at 1.
    """
    value, n = float(np.median(one) / np.median(other)), len(one) + len(other)
    if min(len(one), len(other)) < LEAST:
        return Ratio(value, None, 1.0)
    ours, theirs = (median_bounds(np.asarray(steps, float), level) for steps in (one, other))
    if not np.isfinite([ours.low, ours.high, theirs.low, theirs.high]).all():
        return Ratio(value, None, 1.0)
    below = np.hypot(np.log(np.median(one) / ours.low), np.log(theirs.high / np.median(other)))
    above = np.hypot(np.log(ours.high / np.median(one)), np.log(np.median(other) / theirs.low))
    interval = Interval(float(value / np.exp(below)), float(value * np.exp(above)), "within the runs", level, n)
    reach = below if value > 1 else above
    return Ratio(value, interval, _chance(abs(np.log(value)), reach, np.minimum(ours.freedom, theirs.freedom), level))


def _chance(apart: float, reach: Array, freedom: Array, level: float) -> float:
    """Return the probability of an estimate so far away that an interval of `level` has the length `reach`."""
    if apart == 0 or reach == 0:
        return float(apart == 0)
    return float(2 * scipy.special.stdtr(freedom, -apart * student(freedom, level) / reach))
