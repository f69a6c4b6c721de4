"""Confidence intervals of a median or a mean: of independent values, and of one run's autocorrelated steps.

Printed lines, tables and reports all use the same interval. For a series it comes from its lowest-frequency cosines, of
which each holds the long-run variance of the mean once. Their number is the root of the effective size, so that all of
them vary more slowly than the steps' memory. Their mean square is the variance, their number its degrees of freedom,
and Student's quantile accounts for the estimate: an equally weighted cosine estimate (Müller, Journal of Econometrics
141, 2007; Lazarus, Lewis, Stock & Watson, Journal of Business & Economic Statistics 36, 2018), with the number of
cosines from the effective size instead of from n. `tests/benchmarks/coverage.py` compares it with other intervals.

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
"""Minimum number of independent values for a median's interval: of fewer, even the extremes cover less than 95 %."""
SHORT = 15
"""Number of steps below which their signs are too few to estimate an autocorrelation.

Two cosines may be orthogonal to so few signs, which gave intervals of no width. Below SHORT the interval of a median is
at least one rank wider than that of independent values, at most from the least to the greatest value. So it covers
enough up to an autocorrelation of 0.5 between neighbours. With six to eight steps not even the extremes do, so that
there is no interval."""
_LEAST_STEPS = 9


class SeriesBounds(NamedTuple):
    """Intervals of several series, infinite for series that are too short."""

    low: Array
    high: Array
    degrees_of_freedom: Array


class _MeanSpread(NamedTuple):
    """Spread of the mean of each series."""

    error: Array  # standard error
    degrees_of_freedom: Array
    size: Array  # effective size


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the rank-based interval of the median of independent values; None if there is none, as below six values
    at 95 %.

    Its bounds are the two order statistics nearest to the middle that cover the median with probability `level`, for
    any distribution (Hoefler & Belli, SC'15, section 3.1.3).
    """
    rank = _find_rank(len(values), level)
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def series_interval(step_s: ArrayLike, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the median of a run's steps in their order; None where their effective size is too
    small."""
    steps = np.asarray(step_s, float)
    if steps.size < LEAST:
        return None
    low, high, _ = median_bounds(steps, level)
    return (float(low), float(high)) if np.isfinite(low) else None


def median_bounds(series: Array, level: float = LEVEL) -> SeriesBounds:
    """Return the interval of the median of each series along the last axis, of at least three values.

    Its bounds are interpolated order statistics. Their distance from the middle, in ranks, is the margin of error of
    the number of values below the true median: that of the signs, and at least that of `SHORT`. A series of any length
    with an effective size below six has no interval.
    """
    n = series.shape[-1]
    spread = _compute_spread(signs(series))
    margin = student(spread.degrees_of_freedom, level) * spread.error * n / 2  # in ranks
    ordered, middle = np.sort(series, axis=-1), (n + 1) / 2
    # Ranks are counted from the middle, so that a larger margin means a wider interval.
    if n < SHORT:
        margin = np.maximum(margin, middle - max(_find_rank(n, level) - 1, 1))
    known = (middle - margin >= 1) & (spread.size >= LEAST) & (n >= _LEAST_STEPS)
    low, high = (_interpolate_order_statistic(ordered, position) for position in (middle - margin, middle + margin))
    return SeriesBounds(np.where(known, low, -np.inf), np.where(known, high, np.inf), spread.degrees_of_freedom)


def mean_bounds(series: Array, level: float = LEVEL, correction: float = 0.5) -> SeriesBounds:
    """Return the interval of the mean of each series along the last axis, of at least three values.

    Step times are skewed, mostly by rare slow steps, and so is their mean. Hall's transformation (Journal of the Royal
    Statistical Society B 54, 1992) removes skewness. For a hundred steps with a few slow steps, Student's interval
    covers too little and the transformed interval too much, so that half the `correction` is best. No interval is right
    where slow steps are so rare that a window has three of them, or none.
    """
    mean, spread = series.mean(axis=-1), _compute_spread(series)
    skew = correction * _compute_skewness(series) / np.sqrt(spread.size)
    margin = student(spread.degrees_of_freedom, level)
    low, high = (mean - spread.error * _invert_hall(side, skew) for side in (margin, -margin))
    return SeriesBounds(low, high, spread.degrees_of_freedom)


def student(degrees_of_freedom: Array, level: float) -> Array:
    """Return the two-sided quantile of Student's distribution for a confidence `level`."""
    quantile: Array = scipy.special.stdtrit(degrees_of_freedom, (1 + level) / 2)
    return quantile


def quantile(degrees_of_freedom: float, share: float) -> float:
    """Return the quantile of Student's distribution at `share`, between 0 and 1."""
    return float(scipy.special.stdtrit(degrees_of_freedom, share))


def signs(series: Array) -> Array:
    """Return, along the last axis, 1 above the median, -1 below it and 0 at it.

    A median is as certain as the mean of its signs, and no outlier changes these.
    """
    ordered, n = np.sort(series, axis=-1), series.shape[-1]  # np.median takes ten times as long for a run
    return np.sign(series - (ordered[..., [(n - 1) // 2]] + ordered[..., [n // 2]]) / 2)


def effective_size(series: Array) -> Array:
    """Return n / (1 + 2 Σ ρ) of each series along the last axis, for its mean; at most n.

    Geyer's initial monotone sequence (Statistical Science 7, 1992, section 3.3) sums the autocorrelations ρ in pairs of
    neighbouring lags, up to the first pair that is not positive, each at most as large as the previous pair. Negative
    autocorrelations would give more than n, which is not relied on.
    """
    n = series.shape[-1]
    correlation = autocorrelation(series)
    # The sum starts with the pair of lags 0 and 1, which holds 1 + ρ₁; hence the -1 below.
    even = correlation[..., : n // 2 * 2]
    pairs = even[..., ::2] + even[..., 1::2]
    kept = np.where(np.logical_and.accumulate(pairs > 0, axis=-1), np.minimum.accumulate(pairs, axis=-1), 0.0)
    slowdown: Array = np.maximum(2 * kept.sum(axis=-1) - 1, 1)
    size: Array = n / slowdown
    return size


def autocorrelation(series: Array) -> Array:
    """Return the autocorrelations of each series at lags 0 to n - 1 along the last axis; 0 for a constant series."""
    n = series.shape[-1]
    # Padding to twice the length keeps the circular convolution from wrapping around.
    centred = series - series.mean(axis=-1, keepdims=True)
    padded = scipy.fft.next_fast_len(2 * n, real=True)
    power = np.abs(np.fft.rfft(centred, padded, axis=-1)) ** 2
    covariance = np.fft.irfft(power, padded, axis=-1)[..., :n]
    varies = np.ptp(series, axis=-1, keepdims=True) > 0
    correlation: Array = np.where(varies, covariance / np.where(varies, covariance[..., :1], 1), 0.0)
    return correlation


def _compute_spread(series: Array) -> _MeanSpread:
    n, size = series.shape[-1], effective_size(series)
    count = np.clip(np.floor(np.sqrt(size)), 2, n - 1)  # of cosines
    cosines = scipy.fft.dct(series, axis=-1)[..., 1:]  # 2 Σ x cos(π j (t + 1/2) / n), j from 1
    slowest = np.arange(1, n) <= count[..., None]
    variance = (cosines**2 * slowest).sum(axis=-1) / (2 * n * count)
    return _MeanSpread(np.sqrt(variance / n), count, size)


def _compute_skewness(series: Array) -> Array:
    centred = series - series.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1)
    varies = np.ptp(series, axis=-1) > 0
    skewness: Array = np.where(varies, (centred**3).mean(axis=-1) / np.where(varies, variance, 1) ** 1.5, 0.0)
    return skewness


def _invert_hall(x: Array, skew: Array) -> Array:
    """Return the t with t + skew t²/3 + skew² t³/27 + skew/6 = x, the inverse of Hall's transformation."""
    is_skewed = np.abs(skew) > 1e-6  # without skewness the inverse is x itself, and the formula divides by 0
    divisor = np.where(is_skewed, skew, 1)
    return np.where(is_skewed, 3 / divisor * (np.cbrt(1 + divisor * (x - divisor / 6)) - 1), x)


def _interpolate_order_statistic(ordered: Array, position: Array) -> Array:
    """Return the order statistic at each position, counted from 1, with linear interpolation between two of them."""
    index = np.clip(position - 1, 0, ordered.shape[-1] - 1)[..., None]
    below = np.floor(index).astype(int)
    above = np.minimum(below + 1, ordered.shape[-1] - 1)
    low, high = (np.take_along_axis(ordered, place, axis=-1) for place in (below, above))
    between: Array = (low + (index - below) * (high - low))[..., 0]
    return between


@functools.cache
def _find_rank(n: int, level: float) -> int:
    """Return the highest rank r, from 1, with P(fewer than r of n values below the median) ≤ (1 - level) / 2; 0 if
    there is none."""
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + math.comb(n, rank) / 2**n <= (1 - level) / 2:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    return rank
