"""Confidence intervals of a median or mean, for independent values and for the autocorrelated step times of one run.

Printed lines, tables and reports all use these intervals. For a series, the variance of the mean is estimated with K
equally weighted cosines (Müller, Journal of Econometrics 141, 2007; Lazarus, Lewis, Stock & Watson, Journal of Business
& Economic Statistics 36, 2018). There are three steps:

1. The series is projected on its K lowest-frequency cosines, which gives K coefficients.
2. The square of each coefficient estimates the long-run variance. These K estimates are nearly independent. Their mean
   is the final estimate.
3. The width of the interval follows from this estimate and Student's quantile for K degrees of freedom.

In the papers, K is a function of the number of steps. Here, K is the square root of the effective size (the number of
independent values with the same information). The period of every cosine is then longer than the time over which steps
are correlated. `tests/benchmarks/coverage.py` compares these intervals with other methods.

Importing this module imports scipy, which is slow.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.fft
import scipy.special
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
"""Default confidence level of intervals."""
LEAST = 6
"""Minimum number of independent values for the interval of a median. For fewer values, even the range from minimum to
maximum contains the true median with a probability below 95 %."""
SHORT = 15
"""Number of steps below which an autocorrelation cannot be estimated from the steps' signs (above or below the median).

With so few signs, both cosines of the variance estimate may be orthogonal to the signs. The estimate and the width of
the interval would then be zero. For fewer than SHORT steps, the interval of the median is therefore at least one rank
(position among the sorted values) wider than the interval for independent values. It is never wider than the range from
minimum to maximum. Coverage is then sufficient up to an autocorrelation of 0.5 between neighbouring steps. Six to eight
steps have no interval, because even this range contains the true median too rarely if the steps are autocorrelated.
"""
_LEAST_STEPS = 9


class SeriesBounds(NamedTuple):
    """Lower and upper bounds of the intervals of several series. The bounds are -inf and inf for a series that is too
    short."""

    low: Array
    high: Array
    degrees_of_freedom: Array


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the confidence interval of the median of independent values. Return None for too few values (below six at
    95 %).

    The bounds are the r-th smallest and the r-th largest value. r is the largest number for which the interval contains
    the median with a probability of at least `level` (Hoefler & Belli, SC'15, section 3.1.3). This holds for any
    distribution.
    """
    rank = _find_rank(len(values), level)
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def series_interval(step_s: ArrayLike, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the median of a run's step times, given in order. None if their effective size (the number
    of independent values with the same information) is too small."""
    steps = np.asarray(step_s, float)
    if steps.size < LEAST:
        return None
    low, high, _ = median_bounds(steps, level)
    return (float(low), float(high)) if np.isfinite(low) else None


def series_mean_interval(step_s: ArrayLike, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the mean of a run's step times, given in order. None for too few steps, or if the interval
    reaches zero."""
    steps = np.asarray(step_s, float)
    if steps.size < LEAST:
        return None
    low, high, _ = mean_bounds(steps, level)
    return (float(low), float(high)) if low > 0 and np.isfinite(high) else None


def median_bounds(series: Array, level: float = LEVEL) -> SeriesBounds:
    """Return the interval of the median of each series along the last axis.

    About half of the n values of a series lie below the true median. The number of values below the median has a margin
    of error, which follows from the autocorrelation of the signs of the values (function `signs`: above or below the
    sample median). The bounds of the interval are two values of the sorted series, interpolated. For a margin of m,
    their positions are m below and m above the middle position (n + 1) / 2.

    A series of fewer than `SHORT` values gets at least a minimum margin. There is no interval in three cases: the
    series has fewer than `_LEAST_STEPS` values, its effective size is below `LEAST`, or one of the two positions is
    outside the sorted series.
    """
    n = series.shape[-1]
    error, degrees_of_freedom, size = _compute_spread(signs(series))
    margin = student(degrees_of_freedom, level) * error * n / 2  # in ranks of the sorted series
    ordered, middle = np.sort(series, axis=-1), (n + 1) / 2
    # The margin is counted from the middle rank, so a larger margin gives a wider interval.
    if n < SHORT:
        margin = np.maximum(margin, middle - max(_find_rank(n, level) - 1, 1))
    known = (middle - margin >= 1) & (size >= LEAST) & (n >= _LEAST_STEPS)
    low, high = (_interpolate_order_statistic(ordered, position) for position in (middle - margin, middle + margin))
    return SeriesBounds(np.where(known, low, -np.inf), np.where(known, high, np.inf), degrees_of_freedom)


def mean_bounds(series: Array, level: float = LEVEL, correction: float = 0.5) -> SeriesBounds:
    """Return the interval of the mean of each series along the last axis. A series needs at least three values.

    Step times are skewed, mostly by rare slow steps. Their mean is skewed, too. Hall's transformation (Journal of the
    Royal Statistical Society B 54, 1992) removes skewness. `correction` scales the transformation: 0 gives Student's
    interval, and 1 gives Hall's interval. For a hundred steps with a few slow steps, Student's interval contains the
    true mean too rarely, and Hall's interval contains it too often. The default of 0.5 came closest to the confidence
    level. No interval is correct if slow steps are so rare that some windows contain three of them and other windows
    contain none.
    """
    mean, (error, degrees_of_freedom, size) = series.mean(axis=-1), _compute_spread(series)
    skew = correction * _compute_skewness(series) / np.sqrt(size)
    margin = student(degrees_of_freedom, level)
    low, high = (mean - error * _invert_hall(side, skew) for side in (margin, -margin))
    return SeriesBounds(low, high, degrees_of_freedom)


def student(degrees_of_freedom: Array, level: float) -> Array:
    """Return the two-sided quantile of Student's t distribution at the confidence level `level`."""
    quantile: Array = scipy.special.stdtrit(degrees_of_freedom, (1 + level) / 2)
    return quantile


def quantile(degrees_of_freedom: float, share: float) -> float:
    """Return the quantile of Student's t distribution at the probability `share`."""
    return float(scipy.special.stdtrit(degrees_of_freedom, share))


def signs(series: Array) -> Array:
    """Return the signs of each series along the last axis: 1 above its median, -1 below it, 0 at it.

    The uncertainty of the median follows from the uncertainty of the mean of these signs. Outliers do not affect it,
    because a sign does not depend on the distance from the median.
    """
    ordered, n = np.sort(series, axis=-1), series.shape[-1]  # np.median takes ten times as long for the steps of a run
    return np.sign(series - (ordered[..., [(n - 1) // 2]] + ordered[..., [n // 2]]) / 2)


def effective_size(series: Array) -> Array:
    """Return the effective size for the mean of each series along the last axis: n / (1 + 2 Σ ρ), at most n.

    The sum of the autocorrelations ρ is Geyer's initial monotone sequence (Statistical Science 7, 1992, section 3.3).
    Neighbouring lags are added in pairs, up to the first pair whose sum is not positive. If the sum of a pair exceeds
    the sum of the previous pair, the previous sum is used instead. With negative autocorrelations, the formula can give
    a size above n. This would be too optimistic, so the size is at most n.
    """
    n = series.shape[-1]
    correlation = autocorrelation(series)
    # The first pair is that of lags 0 and 1, which is 1 + ρ₁. The -1 below accounts for its 1.
    even = correlation[..., : n // 2 * 2]
    pairs = even[..., ::2] + even[..., 1::2]
    kept = np.where(np.logical_and.accumulate(pairs > 0, axis=-1), np.minimum.accumulate(pairs, axis=-1), 0.0)
    slowdown: Array = np.maximum(2 * kept.sum(axis=-1) - 1, 1)
    size: Array = n / slowdown
    return size


def autocorrelation(series: Array) -> Array:
    """Return the autocorrelations of each series along the last axis, at lags 0 to n - 1. They are 0 for a constant
    series."""
    n = series.shape[-1]
    # Padding to twice the length prevents wrap-around of the circular convolution.
    centred = series - series.mean(axis=-1, keepdims=True)
    padded = scipy.fft.next_fast_len(2 * n, real=True)
    power = np.abs(np.fft.rfft(centred, padded, axis=-1)) ** 2
    covariance = np.fft.irfft(power, padded, axis=-1)[..., :n]
    varies = np.ptp(series, axis=-1, keepdims=True) > 0
    correlation: Array = np.where(varies, covariance / np.where(varies, covariance[..., :1], 1), 0.0)
    return correlation


def _compute_spread(series: Array) -> tuple[Array, Array, Array]:
    """Return the uncertainty of the mean of each series: its standard error, the degrees of freedom of this error, and
    the effective size."""
    n, size = series.shape[-1], effective_size(series)
    count = np.clip(np.floor(np.sqrt(size)), 2, n - 1)  # number of cosines
    cosines = scipy.fft.dct(series, axis=-1)[..., 1:]  # 2 Σ x cos(π j (t + 1/2) / n), j from 1
    slowest = np.arange(1, n) <= count[..., None]
    variance = (cosines**2 * slowest).sum(axis=-1) / (2 * n * count)
    return np.sqrt(variance / n), count, size


def _compute_skewness(series: Array) -> Array:
    centred = series - series.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1)
    varies = np.ptp(series, axis=-1) > 0
    skewness: Array = np.where(varies, (centred**3).mean(axis=-1) / np.where(varies, variance, 1) ** 1.5, 0.0)
    return skewness


def _invert_hall(x: Array, skew: Array) -> Array:
    """Return the number t that Hall's transformation maps to `x`: t + skew t²/3 + skew² t³/27 + skew/6 = x. `x` is
    Student's quantile, and `skew` is the scaled skewness."""
    is_skewed = np.abs(skew) > 1e-6  # without skewness, the solution is x, and the formula would divide by 0
    divisor = np.where(is_skewed, skew, 1)
    return np.where(is_skewed, 3 / divisor * (np.cbrt(1 + divisor * (x - divisor / 6)) - 1), x)


def _interpolate_order_statistic(ordered: Array, position: Array) -> Array:
    """Return the order statistic (n-th smallest value) at each position n, counted from 1. At a position that is not a
    whole number, interpolate linearly between the two neighbouring values."""
    index = np.clip(position - 1, 0, ordered.shape[-1] - 1)[..., None]
    below = np.floor(index).astype(int)
    above = np.minimum(below + 1, ordered.shape[-1] - 1)
    low, high = (np.take_along_axis(ordered, place, axis=-1) for place in (below, above))
    between: Array = (low + (index - below) * (high - low))[..., 0]
    return between


@functools.cache
def _find_rank(n: int, level: float) -> int:
    """Return the highest rank r, counted from 1, for which the r-th smallest of n values is above the true median with
    a probability of at most (1 - level) / 2. Return 0 if this probability is too high even for r = 1."""
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + math.comb(n, rank) / 2**n <= (1 - level) / 2:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    return rank
