"""Intervals of statistics that have no better one, by resampling; the same seed gives the same interval."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from analysis.stats.interval import Interval
from bench.statistics import LEVEL, Array, effective_size

Statistic = Callable[..., Array]
"""Of the values along `axis`, as numpy's own: `np.mean`, `np.median`."""

RESAMPLES = 1999


def over_repeats(
    values: Sequence[float], statistic: Statistic, level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Return the bootstrap interval, bias-corrected and accelerated, of a statistic of independent repeats; None below
    two. Of few repeats it covers less than its level: three are hardly a distribution."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        same = float(statistic(np.asarray(values, float), axis=-1))
        return Interval(same, same, "between repeats", level, len(values))
    found = stats.bootstrap((values,), statistic, confidence_level=level, n_resamples=resamples, rng=seed)
    low, high = found.confidence_interval
    return Interval(float(low), float(high), "between repeats", level, len(values))


def within_run(
    step_s: ArrayLike, statistic: Statistic, level: float = LEVEL, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Return the moving-block bootstrap interval of a statistic of a run's steps in their order; None below two blocks.

    Blocks of neighbours keep their resemblance (Künsch, Annals of Statistics 17, 1989). It covers less than its level
    in short series: for median, mean and rate `series` has better ones.
    """
    steps = np.asarray(step_s, float)
    length = block_length(steps) if steps.size else 1
    if steps.size < 2 * length:
        return None
    blocks = math.ceil(steps.size / length)
    first = np.random.default_rng(seed).integers(0, steps.size - length + 1, (resamples, blocks, 1))
    drawn = (first + np.arange(length)).reshape(resamples, -1)[:, : steps.size]
    low, high = np.quantile(statistic(steps[drawn], axis=-1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), "within the run", level, steps.size)


def block_length(steps: Array) -> int:
    """Return the steps per block: the best for the AR(1) series of the same effective size, (6 n)^(1/3) (φ / (1 -
    φ²))^(2/3) (Andrews, Econometrica 59, 1991, equation 6.2 with 6.4, whose Bartlett window is what blocks are)."""
    slowdown = steps.size / float(effective_size(steps))  # (1 + φ) / (1 - φ)
    return max(1, round(math.cbrt(6 * steps.size * ((slowdown**2 - 1) / (4 * slowdown)) ** 2)))
