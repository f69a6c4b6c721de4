"""How many independent values tell as much as a series of autocorrelated ones."""

import numpy as np
import scipy.fft
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FEW = 200
"""Effective steps from which on `tests/benchmarks/coverage.py` finds the intervals of `series` to keep their level."""


def few(step_s: ArrayLike) -> bool:
    """Whether a run's steps are worth too few independent ones for its 95 % intervals, of the median or the mean."""
    steps = np.asarray(step_s, float)
    return steps.size < FEW or any(effective_size(series) < FEW for series in (signs(steps), steps))


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
