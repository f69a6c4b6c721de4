"""One configuration's time over another's, from their runs or, where those are too few, from their steps.

A run's time is the mean of its steps: what they cost, slow ones included.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special

from analysis.stats.family import compute_chance, satterthwaite
from analysis.stats.interval import Interval
from bench.statistics import LEAST, LEVEL, Array, mean_bounds, student

Runs = Sequence[Sequence[float]]
"""The steps, in their order and in seconds, of each run of one configuration."""


class Ratio(NamedTuple):
    """Time of one side over that of the other, its interval, and the probability of one so far from 1 by chance;
    without an interval that is 1, for nothing can be told."""

    value: float
    interval: Interval | None
    p: float


def of_runs(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Ratio:
    """Return the ratio of the geometric means of the runs' times, of at least two runs each side.

    Student's test on their logarithms: Welch's, or of the differences where they are `blocked`, the runs of one place
    sharing an allocation. Of three runs a side a rank test finds nothing, whatever they are (p ≥ 0.1), of five nothing
    among ten pairs; `tests/benchmarks/coverage.py` counts the false alarms of both where nothing is normal.
    """
    ours, theirs = (np.log([statistics.fmean(run) for run in runs]) for runs in (one, other))
    gap, n = float(np.mean(ours) - np.mean(theirs)), len(one) + len(other)
    value, sides = float(np.exp(gap)), [ours - theirs] if blocked else [ours, theirs]
    if not any(np.ptp(logs) for logs in sides):  # no spread to test by
        return Ratio(value, Interval(value, value, "between repeats", level, n), float(value == 1))
    shares = [float(logs.var(ddof=1)) / logs.size for logs in sides]
    freedom = satterthwaite(shares, [logs.size - 1 for logs in sides])
    reach = float(student(np.asarray(freedom), level) * np.sqrt(sum(shares)))
    low, high = (float(np.exp(end)) for end in (gap - reach, gap + reach))
    return Ratio(value, Interval(low, high, "between repeats", level, n), compute_chance(gap, shares, freedom))


def of_steps(one: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of the means of two series of steps: what more steps of the same runs would give.

    The interval joins those of the two sides as independent estimates, each end by itself (MOVER: Donner & Zou,
    Statistical Methods in Medical Research 21, 2012); p is the level at which such an interval ends at 1. There is none
    of fewer than six steps, nor where a side's mean may be as small as zero for all they tell.
    """
    n = len(one) + len(other)
    value = float(np.mean(one) / np.mean(other))
    sides = [_side(np.asarray(steps, float), level) for steps in (one, other) if len(steps) >= LEAST]
    known = [side for side in sides if side]
    if len(known) < 2:
        return Ratio(value, None, 1.0)
    ours, theirs = known
    log_ratio = ours.log - theirs.log
    below = np.hypot(ours.log - ours.low, theirs.high - theirs.log)
    above = np.hypot(ours.high - ours.log, theirs.log - theirs.low)
    low, high = (float(np.exp(end)) for end in (log_ratio - below, log_ratio + above))
    freedom = np.minimum(ours.freedom, theirs.freedom)
    chance = _chance(abs(log_ratio), below if log_ratio > 0 else above, freedom, level)
    return Ratio(value, Interval(low, high, "within the runs", level, n), chance)


class _Side(NamedTuple):
    """Logarithm of a mean step time, with the ends of its interval, and its degrees of freedom."""

    log: float
    low: float
    high: float
    freedom: Array


def _side(steps: Array, level: float) -> _Side | None:
    bounds = mean_bounds(steps, level)
    if bounds.low <= 0:
        return None
    log, low, high = (float(np.log(seconds)) for seconds in (steps.mean(), bounds.low, bounds.high))
    return _Side(log, low, high, bounds.freedom)


def _chance(log_ratio: float, reach: Array, freedom: Array, level: float) -> float:
    """Return the probability of an estimate so far away that an interval of `level` has the length `reach`."""
    if log_ratio == 0 or reach == 0:
        return float(log_ratio == 0)
    return float(2 * scipy.special.stdtr(freedom, -log_ratio * student(freedom, level) / reach))
