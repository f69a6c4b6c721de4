"""How sure a median or a mean is: of independent values, and of one run's steps, whose neighbours resemble each other.

A run's line is printed and tables and reports are made by the same interval. Of a series it comes from
its slowest cosines: they hold the variance that its mean has over long times, each of them once; as many as the root of
the effective size are slower than what the steps remember. Their mean square is the variance, their number its degrees
of freedom, and Student's quantile pays for estimating it: an equally weighted cosine estimate (Müller, Journal of
Econometrics 141, 2007; Lazarus, Lewis, Stock & Watson, Journal of Business & Economic Statistics 36, 2018), with the
number of cosines from the effective size instead of from n. `tests/benchmarks/coverage.py` compares it with others.

Importing it takes as long as importing scipy.
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
"""Of every interval, unless it says another."""
LEAST = 6
"""Independent values that a median's interval needs: of fewer not even the extremes hold it at 95 %."""
SHORT = 15
"""Steps below which the signs are too few to show how much they resemble each other: two cosines can be orthogonal to
them, which made an interval of no width. Of fewer the interval of a median is at least one rank wider than that of
independent values, at most from the least to the greatest: so it holds where each step is like the one before by 0.5.
Of six to eight steps not even the extremes hold it then, so there is none."""
_LEAST_STEPS = 9


class SeriesBounds(NamedTuple):
    """An interval of each series, infinite where it is too short, and its degrees of freedom."""

    low: Array
    high: Array
    freedom: Array


class _MeanSpread(NamedTuple):
    """What is known of the mean of each series: standard error, degrees of freedom, effective size."""

    error: Array
    freedom: Array
    size: Array


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the rank-based interval of the median of independent values, or None where no such interval exists.

    The two order statistics nearest to the middle that hold the median with probability `level`, whatever the
    distribution (Hoefler & Belli, SC'15, section 3.1.3). None do below six values at 95 %.
    """
    rank = _find_rank(len(values), level)
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def series_interval(step_s: ArrayLike, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of the median of a run's steps in their order; None where they are worth too few independent
    ones to bound it."""
    steps = np.asarray(step_s, float)
    if steps.size < LEAST:
        return None
    low, high, _ = median_bounds(steps, level)
    return (float(low), float(high)) if np.isfinite(low) else None


def median_bounds(series: Array, level: float = LEVEL) -> SeriesBounds:
    """Return the interval of the median of each series along the last axis, of at least three values.

    The order statistics, interpolated, that lie as many ranks from the middle as the number of values below the true
    median may; that number's doubt is that of the signs, and no less than `SHORT` says. None is known of a series worth
    fewer than six independent values, however long it is.
    """
    n = series.shape[-1]
    spread = _compute_spread(signs(series))
    reach = student(spread.freedom, level) * spread.error * n / 2
    ordered, middle = np.sort(series, axis=-1), (n + 1) / 2
    if n < SHORT:
        reach = np.maximum(reach, middle - max(_find_rank(n, level) - 1, 1))
    known = (middle - reach >= 1) & (spread.size >= LEAST) & (n >= _LEAST_STEPS)
    low, high = (
        _interpolate_order_statistic(ordered, middle - reach),
        _interpolate_order_statistic(ordered, middle + reach),
    )
    return SeriesBounds(np.where(known, low, -np.inf), np.where(known, high, np.inf), spread.freedom)


def mean_bounds(series: Array, level: float = LEVEL, correction: float = 0.5) -> SeriesBounds:
    """Return the interval of the mean of each series along the last axis, of at least three values.

    Step times are skewed, rare slow steps above all, and a mean of them is too. Hall's transformation (Journal of the
    Royal Statistical Society B 54, 1992) takes that out; of some hundred steps with a few slow ones, Student's interval
    covers too little and the transformed one too much; half the `correction` holds both. Where slow steps are so rare
    that a window has three, or none, no interval knows how rare.
    """
    mean, spread = series.mean(axis=-1), _compute_spread(series)
    skew = correction * _compute_skewness(series) / np.sqrt(spread.size)
    reach = student(spread.freedom, level)
    low, high = (mean - spread.error * _invert_hall(side, skew) for side in (reach, -reach))
    return SeriesBounds(low, high, spread.freedom)


def student(freedom: Array, level: float) -> Array:
    """Return the quantile of Student's distribution that leaves 1 - `level` outside, half of it on each side."""
    quantile: Array = scipy.special.stdtrit(freedom, (1 + level) / 2)
    return quantile


def quantile(freedom: float, share: float) -> float:
    """Return the quantile of Student's distribution below which a `share` of it lies."""
    return float(scipy.special.stdtrit(freedom, share))


def signs(series: Array) -> Array:
    """Return, along the last axis, 1 above the median, -1 below it and 0 at it.

    They are what a median averages: it is as sure as the mean of its signs, and one outlier changes nothing.
    """
    ordered, n = np.sort(series, axis=-1), series.shape[-1]  # numpy's own median takes ten times as long for a run's
    return np.sign(series - (ordered[..., [(n - 1) // 2]] + ordered[..., [n // 2]]) / 2)


def effective_size(series: Array) -> Array:
    """Return n / (1 + 2 Σ ρ) of each series along the last axis, for its mean; at most n.

    The autocorrelations ρ are summed by Geyer's initial monotone sequence (Statistical Science 7, 1992, section 3.3):
    two neighbours at a time, as long as such a pair is positive, and none counts more than the one before it. Steps
    that swing from one to the next tell more than n would; that is not counted on.
    """
    n = series.shape[-1]
    correlation = autocorrelation(series)
    even = correlation[..., : n // 2 * 2]
    pairs = even[..., ::2] + even[..., 1::2]
    kept = np.where(np.logical_and.accumulate(pairs > 0, axis=-1), np.minimum.accumulate(pairs, axis=-1), 0.0)
    slowdown: Array = np.maximum(2 * kept.sum(axis=-1) - 1, 1)
    size: Array = n / slowdown
    return size


def autocorrelation(series: Array) -> Array:
    """Return the autocorrelations of each series at lags 0 to n - 1 along the last axis; zeros for a constant one."""
    n = series.shape[-1]
    centred = series - series.mean(axis=-1, keepdims=True)
    padded = scipy.fft.next_fast_len(2 * n, real=True)
    power = np.abs(np.fft.rfft(centred, padded, axis=-1)) ** 2
    covariance = np.fft.irfft(power, padded, axis=-1)[..., :n]
    varies = np.ptp(series, axis=-1, keepdims=True) > 0
    correlation: Array = np.where(varies, covariance / np.where(varies, covariance[..., :1], 1), 0.0)
    return correlation


def _compute_spread(series: Array) -> _MeanSpread:
    n, size = series.shape[-1], effective_size(series)
    freedom = np.clip(np.floor(np.sqrt(size)), 2, n - 1)
    cosines = scipy.fft.dct(series, axis=-1)[..., 1:]  # 2 Σ x cos(π j (t + 1/2) / n), j from 1
    slowest = np.arange(1, n) <= freedom[..., None]
    variance = (cosines**2 * slowest).sum(axis=-1) / (2 * n * freedom)
    return _MeanSpread(np.sqrt(variance / n), freedom, size)


def _compute_skewness(series: Array) -> Array:
    centred = series - series.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1)
    varies = np.ptp(series, axis=-1) > 0
    skewness: Array = np.where(varies, (centred**3).mean(axis=-1) / np.where(varies, variance, 1) ** 1.5, 0.0)
    return skewness


def _invert_hall(x: Array, skew: Array) -> Array:
    """Return the t with t + skew t²/3 + skew² t³/27 + skew/6 = x, Hall's transformation turned round."""
    some = np.where(np.abs(skew) > 1e-6, skew, 1)  # of none, it is x itself
    turned: Array = 3 / some * (np.cbrt(1 + some * (x - some / 6)) - 1)
    return np.where(np.abs(skew) > 1e-6, turned, x)


def _interpolate_order_statistic(ordered: Array, position: Array) -> Array:
    """Return the order statistic at each position, counted from 1, between two of them by their distance."""
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
