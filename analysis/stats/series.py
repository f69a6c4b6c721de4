"""How sure the median, the mean and the rate of one run's steps are, although neighbouring steps resemble each other.

The slowest cosines of a series hold the variance that its mean has over long times, each of them once; as many as the
root of the effective size are slower than what the steps remember. Their mean square is the variance, their number its
degrees of freedom, and Student's quantile pays for estimating it: an equally weighted cosine estimate (Müller, Journal
of Econometrics 141, 2007; Lazarus, Lewis, Stock & Watson, Journal of Business & Economic Statistics 36, 2018), with
the number of cosines from the effective size instead of from n. `tests/benchmarks/coverage.py` compares it with others.
"""

from typing import NamedTuple

import numpy as np
import scipy.fft
import scipy.special
from numpy.typing import ArrayLike

from analysis.stats.effective import Array, effective_size, signs
from analysis.stats.interval import LEVEL, Interval

LEAST = 6  # steps: of fewer, were they independent, even the extremes would not hold the median at 95 %


class Bounds(NamedTuple):
    """An interval of each series, infinite where it is too short, and its degrees of freedom."""

    low: Array
    high: Array
    freedom: Array


class _Spread(NamedTuple):
    """What is known of the mean of each series: standard error, degrees of freedom, effective size."""

    error: Array
    freedom: Array
    size: Array


def median_interval(step_s: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Return the interval of the median of a run's steps in their order; None where they are too few to bound it."""
    steps = np.asarray(step_s, float)
    return _interval(median_bounds(steps, level), level, steps.size) if steps.size >= LEAST else None


def mean_interval(step_s: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of a run's steps in their order; None where they are too few to bound it."""
    steps = np.asarray(step_s, float)
    return _interval(mean_bounds(steps, level), level, steps.size) if steps.size >= LEAST else None


def rate_interval(step_s: ArrayLike, rate: float, level: float = LEVEL) -> Interval | None:
    """Return the interval of a rate over the window, such as tokens per second: a fixed amount per step over the mean
    of the steps. None where the mean has none, or one that reaches zero."""
    return rate_of(mean_interval(step_s, level), step_s, rate)


def rate_of(mean: Interval | None, step_s: ArrayLike, rate: float) -> Interval | None:
    """Return the interval of a rate over the window from that of the mean of its steps."""
    if mean is None or mean.low <= 0:
        return None
    amount = rate * float(np.mean(np.asarray(step_s, float)))
    return mean._replace(low=amount / mean.high, high=amount / mean.low)


def median_bounds(series: Array, level: float = LEVEL) -> Bounds:
    """Return the interval of the median of each series along the last axis, of at least three values.

    The order statistics, interpolated, that lie as many ranks from the middle as the number of values below the true
    median may; that number's doubt is that of the signs.
    """
    n = series.shape[-1]
    spread = _spread(signs(series))
    reach = student(spread.freedom, level) * spread.error * n / 2
    ordered, middle = np.sort(series, axis=-1), (n + 1) / 2
    known = middle - reach >= 1
    low, high = _at(ordered, middle - reach), _at(ordered, middle + reach)
    return Bounds(np.where(known, low, -np.inf), np.where(known, high, np.inf), spread.freedom)


def mean_bounds(series: Array, level: float = LEVEL, correction: float = 0.5) -> Bounds:
    """Return the interval of the mean of each series along the last axis, of at least three values.

    Step times are skewed, rare slow steps above all, and a mean of them is too. Hall's transformation (Journal of the
    Royal Statistical Society B 54, 1992) takes that out; of some hundred steps with a few slow ones, Student's interval
    covers too little and the transformed one too much; half the `correction` holds both. Where slow steps are so rare
    that a window has three, or none, no interval knows how rare.
    """
    mean, spread = series.mean(axis=-1), _spread(series)
    skew = correction * _skewness(series) / np.sqrt(spread.size)
    reach = student(spread.freedom, level)
    low, high = (mean - spread.error * _skewed(side, skew) for side in (reach, -reach))
    return Bounds(low, high, spread.freedom)


def student(freedom: Array, level: float) -> Array:
    """Return the quantile of Student's distribution that leaves 1 - `level` outside, half of it on each side."""
    quantile: Array = scipy.special.stdtrit(freedom, (1 + level) / 2)
    return quantile


def _spread(series: Array) -> _Spread:
    n, size = series.shape[-1], effective_size(series)
    freedom = np.clip(np.floor(np.sqrt(size)), 2, n - 1)
    cosines = scipy.fft.dct(series, axis=-1)[..., 1:]  # 2 Σ x cos(π j (t + 1/2) / n), j from 1
    slowest = np.arange(1, n) <= freedom[..., None]
    variance = (cosines**2 * slowest).sum(axis=-1) / (2 * n * freedom)
    return _Spread(np.sqrt(variance / n), freedom, size)


def _skewness(series: Array) -> Array:
    centred = series - series.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1)
    varies = np.ptp(series, axis=-1) > 0
    skewness: Array = np.where(varies, (centred**3).mean(axis=-1) / np.where(varies, variance, 1) ** 1.5, 0.0)
    return skewness


def _skewed(x: Array, skew: Array) -> Array:
    """Return the t with t + skew t²/3 + skew² t³/27 + skew/6 = x, Hall's transformation turned round."""
    some = np.where(np.abs(skew) > 1e-6, skew, 1)  # of none, it is x itself
    turned: Array = 3 / some * (np.cbrt(1 + some * (x - some / 6)) - 1)
    return np.where(np.abs(skew) > 1e-6, turned, x)


def _at(ordered: Array, position: Array) -> Array:
    """Return the order statistic at each position, counted from 1, between two of them by their distance."""
    index = np.clip(position - 1, 0, ordered.shape[-1] - 1)[..., None]
    below = np.floor(index).astype(int)
    above = np.minimum(below + 1, ordered.shape[-1] - 1)
    low, high = (np.take_along_axis(ordered, place, axis=-1) for place in (below, above))
    between: Array = (low + (index - below) * (high - low))[..., 0]
    return between


def _interval(bounds: Bounds, level: float, n: int) -> Interval | None:
    low, high = float(bounds.low), float(bounds.high)
    return Interval(low, high, "within the run", level, n) if np.isfinite(low) and np.isfinite(high) else None
