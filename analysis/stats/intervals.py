"""Confidence intervals of a median, a mean or a rate, from the steps of runs or from independent repeats.

The intervals of many runs are computed together, because all windows of one length (in steps) then share numpy's
overhead per call.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.quantities import LEAST_RUNS
from bench.core.statistics import (
    LEAST,
    LEVEL,
    Array,
    SeriesBounds,
    effective_size,
    mean_bounds,
    median_bounds,
    median_interval,
    student,
)

Kind = Literal["within the run", "within the runs", "between repeats", "range of repeats"]
Steps = tuple[float, ...]
"""Step times of a window, in seconds and in order."""


class Interval(NamedTuple):
    """Range that contains the true value with probability `level`.

    An interval within a run predicts further steps of that run. Only an interval between repeats predicts another run.
    `n` is the number of steps or repeats from which the interval was computed. In a comparison of two configurations,
    `n` is the sum over both.
    """

    low: float
    high: float
    kind: Kind
    level: float
    n: int


class StepIntervals(NamedTuple):
    """Confidence intervals of the median and the mean step time of one window of timed steps. The other fields describe
    the steps: whether there are too few, whether their times changed within the window, quantiles, and time lost in
    stalls."""

    median: Interval | None  # of the median step time; None for too few steps
    mean: Interval | None  # of the mean step time
    few: bool  # True if the effective number of independent steps is below `FEW`
    changed: bool  # first and last third differ by more than `CHANGE`, with disjoint intervals
    quantiles: tuple[float, ...]  # of the step times, in seconds, at the probabilities SHARES
    stall_s: float  # excess over the median, summed over the longest steps (fraction `STALL_SHARE`)


FEW = 20
"""Effective number of independent steps below which the nominal 95 % interval of a median may cover the true median in
clearly less than 95 % of cases.

`tests/benchmarks/coverage.py` measures the coverage on simulated step times. It is 77 % at 6 to 10 effective steps, 89
% at 10 to 15, and 93 to 94 % from 15 on. For the strongest autocorrelation it is 89 % at 15 to 20. The coverage of a
mean's interval depends more on how rare slow steps are.
"""

WIDE = 0.02
"""Relative width of an interval above which the run gets the note `wide`."""

SHARES = (0.95, 0.99)
"""Probabilities of the step-time quantiles that are computed for every window."""

STALL_SHARE = 0.01
"""Fraction of a window's steps that may form a stall. These are the longest steps, at least one of them."""

CHANGE = 0.02
"""Largest negligible difference between the mean step times of the first and the last third of a window, as a fraction
of the mean step time."""

_latest: dict[Steps, StepIntervals] = {}


def describe_window(step_s: Steps) -> StepIntervals:
    """Return the confidence intervals of the median and mean step time of a run. They come from a cache if the last
    call of `prepare_windows` included this window."""
    if step_s not in _latest:
        prepare_windows([step_s])
    return _latest[step_s]


def prepare_windows(windows: Iterable[Steps]) -> None:
    """Compute the intervals of the median and mean step time for many windows at once, and cache them for calls of
    `describe_window`. A window is the tuple of the timed steps of one run, in seconds."""
    by_length: dict[int, list[Steps]] = {}
    for step_s in dict.fromkeys(windows):
        by_length.setdefault(len(step_s), []).append(step_s)
    _latest.clear()
    for n, equal_length in by_length.items():
        found = _describe_windows(np.array(equal_length)) if n else [StepIntervals(None, None, False, False, (), 0.0)]
        _latest.update(zip(equal_length, found, strict=True))


def _describe_windows(steps: Array) -> Iterator[StepIntervals]:
    """Yield for each window the intervals of its median and mean step time, and facts about its steps. `steps` holds
    the step times of one window per run, shape (runs, steps). All windows thus have the same number of steps."""
    runs, n = steps.shape
    medians: list[Interval | None] = [None] * runs
    means, few, changed = medians, np.zeros(runs, bool), np.zeros(runs, bool)
    if n >= LEAST:
        medians, means = (list(_build_intervals(bounds(steps), n)) for bounds in (median_bounds, mean_bounds))
        few = effective_size(steps) < FEW
    if n >= 3 * LEAST:  # each third needs its own interval
        changed = _find_changed(steps, few)
    ordered = np.sort(steps, axis=-1)
    quantiles = map(tuple, np.quantile(ordered, SHARES, axis=-1).T.tolist())
    longest = ordered[:, -max(1, int(STALL_SHARE * n)) :]
    stall_s = (longest - np.median(ordered, axis=-1, keepdims=True)).sum(axis=-1)
    yield from map(StepIntervals, medians, means, few.tolist(), changed.tolist(), quantiles, stall_s.tolist())


def _find_changed(steps: Array, few: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each window True if its step time changed between the first and the last third, which means that the
    warm-up was too short. `steps` holds the step times of one window per run, shape (runs, steps). `few` is True for a
    window with a small effective sample size.

    The intervals of the two thirds must not overlap. But a step time that changes within one of the thirds makes the
    interval of this third wide, and lowers the effective sample size. For such a window, it suffices that the
    difference of the means exceeds twice the width of the narrower interval. With this factor, at most 2 % of windows
    without a change are called changed at an autocorrelation of 0.5.
    """
    third = steps.shape[1] // 3
    parts = steps[:, :third], steps[:, -third:]
    (first, last), (one, other) = (part.mean(axis=1) for part in parts), map(mean_bounds, parts)
    apart = (one.high < other.low) | (other.high < one.low)
    width = np.minimum(one.high - one.low, other.high - other.low)
    apart |= few & (np.abs(last - first) > 2 * width)
    changed: NDArray[np.bool_] = apart & (np.abs(last - first) > CHANGE * steps.mean(axis=1))
    return changed


def _build_intervals(bounds: SeriesBounds, n: int) -> Iterator[Interval | None]:
    for low, high in zip(bounds.low.tolist(), bounds.high.tolist(), strict=True):
        known = np.isfinite(low) and np.isfinite(high)
        yield Interval(low, high, "within the run", LEVEL, n) if known else None


def rate_interval(mean: Interval | None, step_s: Sequence[float], rate: float) -> Interval | None:
    """Return the interval of a rate, such as tokens per second, over a window of timed steps. `mean` is the interval of
    the mean step time. `step_s` holds the step times of the window. `rate` is the rate over the window.

    A rate is a fixed amount per step divided by the mean step time, so the interval of the rate follows from `mean`.
    The result is None if `mean` is None or reaches zero.
    """
    if mean is None or mean.low <= 0:
        return None
    amount = rate * statistics.fmean(step_s)
    return mean._replace(low=amount / mean.high, high=amount / mean.low)


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of independent values by Student's t; None for fewer than LEAST_RUNS values."""
    n = len(values)
    if n < LEAST_RUNS:
        return None
    mean, quantile = statistics.fmean(values), float(student(np.asarray(n - 1), level))
    margin = quantile * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean - margin, mean + margin, "between repeats", level, n)


def repeats_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the rank-based interval of the median of independent repeats (Hoefler & Belli, SC'15, section 3.1.3).

    If there are too few repeats for an interval at `level`, their range is returned. The range of n repeats covers the
    median with probability 1 - 2^(1 - n). None for fewer than two repeats.
    """
    n = len(values)
    if n < 2:
        return None
    if ends := median_interval(values, level):
        return Interval(*ends, "between repeats", level, n)
    return Interval(min(values), max(values), "range of repeats", 1 - 2 ** (1 - n), n)
