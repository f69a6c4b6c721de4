import math

import numpy as np
import pytest
from scipy import stats
from simulated import PROCESSES, ar1, slowdown

from analysis.stats.intervals import Interval, describe_window, rate_interval
from bench.core.statistics import effective_size, mean_bounds, median_bounds, signs
from bench.core.statistics import median_interval as of_independent

STEPS = [0.12, 0.1, 0.11, 0.13, 0.15, 0.12, 0.11, 0.14, 0.16, 0.1, 0.12, 0.11, 0.13, 0.18, 0.1, 0.12, 0.11, 0.15]


def spread(values: list[float]) -> tuple[float, int]:
    """Return the standard error of the mean of autocorrelated values, and the degrees of freedom of this standard
    error. Both are computed term by term from their formulas."""
    n, size = len(values), float(effective_size(np.array(values)))
    degrees_of_freedom = max(2, math.floor(math.sqrt(size)))
    waves = [
        sum(x * math.sqrt(2 / n) * math.cos(math.pi * j * (t + 0.5) / n) for t, x in enumerate(values))
        for j in range(1, degrees_of_freedom + 1)
    ]
    return math.sqrt(sum(wave**2 for wave in waves) / degrees_of_freedom / n), degrees_of_freedom


def test_interval_of_the_median_equals_its_formula_in_ranks() -> None:
    n, middle = len(STEPS), float(np.median(STEPS))
    error, degrees_of_freedom = spread([float(np.sign(step - middle)) for step in STEPS])
    ranks = stats.t.ppf(0.975, degrees_of_freedom) * error * n / 2
    low, high = np.interp([(n + 1) / 2 - ranks, (n + 1) / 2 + ranks], np.arange(1, n + 1), sorted(STEPS))
    told = describe_window(tuple(STEPS)).median
    assert told == Interval(pytest.approx(low), pytest.approx(high), "within the run", 0.95, 18)
    assert told.low < middle < told.high


def test_interval_of_the_mean_equals_the_skewness_corrected_t_interval() -> None:
    error, degrees_of_freedom = spread(STEPS)
    skew = stats.skew(STEPS) / math.sqrt(effective_size(np.array(STEPS))) / 2
    told = mean_bounds(np.array(STEPS), level=0.9)
    for end, share in ((told.low, 0.95), (told.high, 0.05)):
        t = (np.mean(STEPS) - end) / error
        assert t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6 == pytest.approx(
            stats.t.ppf(share, degrees_of_freedom)
        )
    assert told.high - np.mean(STEPS) > np.mean(STEPS) - told.low, "rare slow steps may have been missed"


def test_interval_of_a_rate_is_the_amount_divided_by_the_interval_of_the_mean() -> None:
    mean = describe_window(tuple(STEPS)).mean
    rate = rate_interval(mean, STEPS, rate=50 / float(np.mean(STEPS)))
    assert mean is not None
    assert mean[2:] == ("within the run", 0.95, 18)
    assert rate == Interval(pytest.approx(50 / mean.high), pytest.approx(50 / mean.low), "within the run", 0.95, 18)


def test_constant_steps_have_a_zero_width_interval_and_few_steps_have_none() -> None:
    equal = describe_window((0.1,) * 30)
    assert equal.median == Interval(0.1, 0.1, "within the run", 0.95, 30)
    assert equal.mean == Interval(pytest.approx(0.1), pytest.approx(0.1), "within the run", 0.95, 30)
    assert describe_window(tuple(STEPS[:5])).median is None
    assert describe_window((0.1,) * 5).mean is None
    rare = (0.01, 0.5, 0.02, 0.9, 0.01, 2.0)
    assert rate_interval(describe_window(rare).mean, rare, rate=1.0) is None, "the interval of the mean reaches zero"


def covered(name: str, n: int, of_median: bool) -> float:
    process = PROCESSES[name]
    series = process.draw(np.random.default_rng(n), 2000, n)
    low, high, _ = median_bounds(series) if of_median else mean_bounds(series)
    truth = process.median if of_median else process.mean
    return float(np.mean((low <= truth) & (truth <= high)))


COEFFICIENTS = {
    "independent, normal": 0.0, "independent, lognormal": 0.0, "5 % slow steps": 0.0, "AR(1) -0.5": 0.0,
    "AR(1) 0.3": 0.3, "AR(1) 0.5": 0.5, "AR(1) 0.5, lognormal": 0.5, "AR(1) 0.8": 0.8,
}  # fmt: skip
"""Correlation of consecutive values of each simulated process. For the process with a correlation of -0.5, the value
here is 0, because our estimate must not count negative correlation as additional information."""


@pytest.mark.parametrize("size", [200, 300])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_interval_of_the_median_covers_93_to_97_percent_from_200_effective_steps(name: str, size: int) -> None:
    n = math.ceil(size * slowdown(COEFFICIENTS[name], of_signs=True))
    assert 0.93 <= covered(name, n, of_median=True) <= 0.97


@pytest.mark.parametrize("size", [200, 300])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_interval_of_the_mean_covers_93_to_97_percent_from_200_effective_steps(name: str, size: int) -> None:
    n = math.ceil(size * slowdown(COEFFICIENTS[name], of_signs=False))
    assert 0.93 <= covered(name, n, of_median=False) <= 0.97


def test_coverage_of_short_correlated_series_exceeds_that_for_independent_steps() -> None:
    series = ar1(0.8)(np.random.default_rng(4), 1000, 100)
    ranks = np.array([of_independent(steps) for steps in series.tolist()])
    assert np.mean((ranks[:, 0] <= 0) & (ranks[:, 1] >= 0)) < 0.65
    assert covered("AR(1) 0.8", 100, of_median=True) >= 0.91


def test_coverage_holds_with_an_estimated_effective_size() -> None:
    process, n = PROCESSES["AR(1) 0.5"], math.ceil(250 * slowdown(0.5, of_signs=True))
    series = process.draw(np.random.default_rng(5), 4000, n)
    enough = effective_size(signs(series)) >= 200
    low, high, _ = median_bounds(series[enough])
    assert enough.mean() > 0.6
    assert 0.93 <= np.mean((low <= 0) & (high >= 0)) <= 0.97


def test_slow_drift_is_not_covered_by_any_interval() -> None:
    assert covered("slow drift", 1000, of_median=True) < 0.7
