"""Simulated series of step times with known median, mean and effective sample size. Arrays have one series per row."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize, signal, stats

Array = np.ndarray


class Process(NamedTuple):
    draw: Callable[[np.random.Generator, int, int], Array]  # series, values of each
    median: float
    mean: float


def ar1(coefficient: float) -> Callable[[np.random.Generator, int, int], Array]:
    """Return a function that draws stationary Gaussian AR(1) series with variance 1. Its arguments are a random
    generator, the number of series and their length."""

    def draw(rng: np.random.Generator, series: int, n: int) -> Array:
        noise = rng.standard_normal((series, n))
        noise[:, 1:] *= math.sqrt(1 - coefficient**2)
        return signal.lfilter([1], [1, -coefficient], noise, axis=1)

    return draw


def lognormal(coefficient: float, sigma: float = 0.5) -> Process:
    """Return a process of log-normal step times with median 1. The logarithms are AR(1) series with this coefficient.
    The default `sigma` of 0.5 exceeds the scatter of most machines."""
    draw = ar1(coefficient)
    return Process(lambda *shape: np.exp(sigma * draw(*shape)), 1.0, math.exp(sigma**2 / 2))


def slow_steps(part: float, slower: float = 0.5, noise: float = 0.02) -> Process:
    """Return a process with steps of about 1 s. A random share `part` of the steps takes `slower` seconds longer. All
    steps have normal noise of `noise` seconds."""

    def draw(rng: np.random.Generator, series: int, n: int) -> Array:
        slow = rng.random((series, n)) < part
        return 1 + noise * rng.standard_normal((series, n)) + slower * slow

    def above(value: float) -> float:
        return (1 - part) * stats.norm.sf(value, 1, noise) + part * stats.norm.sf(value, 1 + slower, noise) - 0.5

    return Process(draw, optimize.brentq(above, 0.9, 1.1), 1 + slower * part)


def hidden(coefficient: float, weight: float) -> Process:
    """Return a process of white noise plus a slow AR(1) component. This component makes up the share `weight` of the
    variance.

    Consecutive values hardly show the slow component, although it dominates the error of a mean.
    """
    slow, fast = ar1(coefficient), ar1(0)
    roots = math.sqrt(weight), math.sqrt(1 - weight)
    return Process(lambda *shape: roots[0] * slow(*shape) + roots[1] * fast(*shape), 0.0, 0.0)


def pareto(exponent: float, part: float = 0.1) -> Process:
    """Return a process with steps of about 1 s. A Pareto-distributed time is added to a random share `part` of the
    steps.

    Step times have infinite variance for exponents below 2.
    """

    def draw(rng: np.random.Generator, series: int, n: int) -> Array:
        slow = rng.random((series, n)) < part
        return 1 + 0.02 * rng.standard_normal((series, n)) + slow * rng.pareto(exponent, (series, n))

    return Process(draw, math.nan, 1 + part / (exponent - 1))


def spikes(every: int, times: float) -> Process:
    """Return a process with steps of about 1 s. Every `every`-th step, counted from a random first step, takes `times`
    times as long."""

    def draw(rng: np.random.Generator, series: int, n: int) -> Array:
        at = (np.arange(n) + rng.integers(0, every, (series, 1))) % every == 0
        return 1 + 0.02 * rng.standard_normal((series, n)) + (times - 1) * at

    return Process(draw, math.nan, 1 + (times - 1) / every)


TAILED = {
    "Pareto 1.5 in 10 %": pareto(1.5),
    "Pareto 2.5 in 10 %": pareto(2.5),
    "1 % of steps × 20": slow_steps(0.01, 19.0),
    "0.2 % of steps × 20": slow_steps(0.002, 19.0),
    "every 50th step × 5": spikes(50, 5.0),
}
"""Processes with heavy tails: rare slow steps make up much of their mean. Their medians are not tested."""

PROCESSES = {
    "independent, normal": Process(ar1(0), 0.0, 0.0),
    "independent, lognormal": lognormal(0),
    "5 % slow steps": slow_steps(0.05),
    "1 % slow steps": slow_steps(0.01),
    "AR(1) 0.3": Process(ar1(0.3), 0.0, 0.0),
    "AR(1) 0.5": Process(ar1(0.5), 0.0, 0.0),
    "AR(1) 0.5, lognormal": lognormal(0.5),
    "AR(1) 0.8": Process(ar1(0.8), 0.0, 0.0),
    "AR(1) 0.95": Process(ar1(0.95), 0.0, 0.0),
    "AR(1) -0.5": Process(ar1(-0.5), 0.0, 0.0),
    "AR(1) 0.9 below noise": hidden(0.9, 0.36),
    "slow drift": hidden(0.999, 0.5),
}


def slowdown(coefficient: float, of_signs: bool) -> float:
    """Return the number of values of a Gaussian AR(1) series that carry as much information about the mean as one
    independent value. `coefficient` is the autocorrelation of the series at lag 1.

    If `of_signs` is set, the information is about the median instead of the mean, and is computed from the signs of the
    values. If the values have the autocorrelation ρ at a lag, the signs have the autocorrelation 2 / π arcsin ρ.
    """
    lags = np.arange(1, 3000)
    correlations = coefficient**lags
    if of_signs:
        correlations = 2 / math.pi * np.arcsin(correlations)
    return float(1 + 2 * correlations.sum())
