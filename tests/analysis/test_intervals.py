import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import run, run_table, steps
from scipy import stats as scipy_stats

from bench.core.formatting import describe_result
from bench.core.statistics import effective_size, mean_bounds, median_interval, series_interval, signs

approx_nan = pytest.approx(math.nan, nan_ok=True)


@pytest.mark.parametrize(
    ("n", "ends"),
    [  # P(Bin(n, 1/2) < r) ≤ 2.5 %: (1/2)^6 = 1.6 % for r = 1; 11/1024 = 1.1 % for r = 2 of 10; tables: 10 and 21 of 30
        (6, (1, 6)),
        (8, (1, 8)),
        (10, (2, 9)),
        (30, (10, 21)),
    ],
)
def test_ends_of_the_median_interval_are_order_statistics(n: int, ends: tuple[int, int]) -> None:
    assert median_interval([float(value) for value in range(n, 0, -1)]) == ends


@pytest.mark.parametrize("n", range(6))
def test_too_few_values_have_no_interval(n: int) -> None:
    assert median_interval([1.0] * n) is None
    assert series_interval((1.0,) * n) is None


@given(st.integers(6, 600))
def test_interval_is_the_narrowest_with_binomial_coverage_of_95_percent(n: int) -> None:
    interval = median_interval([float(i) for i in range(1, n + 1)])
    assert interval is not None
    low, high = map(int, interval)
    assert low + high == n + 1
    law = scipy_stats.binom(n, 0.5)
    assert law.cdf(high - 1) - law.cdf(low - 1) >= 0.95
    assert law.cdf(low) > 0.025, "one rank further in would leave more than 2.5 % on each side"


def median_effective_size(values: Sequence[float]) -> float:
    """Return the effective sample size of `values` for the median. This is the number of independent values that
    determine the median as precisely as `values` do."""
    return float(effective_size(signs(np.array(values))))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_series_with_effective_size_below_six_has_no_interval(values: list[float]) -> None:
    found = series_interval(values)
    assert 0 < median_effective_size(values) <= len(values)
    if found is not None:
        assert median_effective_size(values) >= 6
        assert min(values) <= found[0] <= np.median(values) <= found[1] <= max(values)


def test_drifting_series_has_no_interval() -> None:
    assert series_interval(np.linspace(1, 2, 1000)) is None


@pytest.mark.parametrize("seed", range(12))
def test_interval_is_printed_and_in_the_table_and_a_wide_mean_is_noted(seed: int) -> None:
    """The windows have thirty steps and different autocorrelations. For some windows, the effective number of steps is
    too small for an interval of the median. These runs have no interval in the output and in the table."""
    coefficient, noise = (0.0, 0.5, 0.9)[seed % 3], (0.005, 0.05)[seed % 2]
    window = np.exp(noise * ar1(np.random.default_rng(seed), 30, coefficient, 1)[0])
    found, mean = series_interval(window), mean_bounds(window)
    record = run(steps=steps(window.tolist()))
    row = run_table([record]).iloc[0]
    assert [row["step_s_low"], row["step_s_high"]] == (pytest.approx(found) if found else [approx_nan, approx_nan])
    assert (
        (f"{found[0]:.4g}–{found[1]:.4g}" in describe_result(record))
        if found
        else ("95 %" not in describe_result(record))
    )
    assert ("wide" in row["notes"].split()) is bool(mean.high - mean.low > 0.02 * window.mean())
    assert ("few" in row["notes"].split()) is bool(effective_size(window) < 20)


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
@pytest.mark.parametrize("n", range(6, 16))
def test_interval_of_few_steps_has_its_coverage_or_is_omitted(n: int, coefficient: float) -> None:
    """A median of fewer than 9 steps has no interval. With 9 to 14 steps, the interval has a minimum width. From 15
    steps on, the width depends only on which steps lie above or below the median. If these 15 or more steps are
    autocorrelated, the interval covers the true median in less than 95 % of cases. The note `few` warns of this
    coverage."""
    series = ar1(np.random.default_rng(n), n, coefficient, 4000)
    intervals = [found for found in map(series_interval, series) if found]
    assert (len(intervals) == 0) is (n < 9)
    assert all(low < high for low, high in intervals), "no interval has a width of zero"
    if intervals:
        least = 0.83 if n == 15 and coefficient else 0.92 if n == 15 else 0.90
        assert np.mean([low <= 0 <= high for low, high in intervals]) >= least


def test_window_of_six_recorded_steps_has_no_interval() -> None:
    """These are six steps of a real run. For these steps, an earlier version gave an interval of zero width, 1.0823 to
    1.0823."""
    assert series_interval([1.0809, 1.1437, 1.2131, 0.9611, 1.0656, 1.0836]) is None


def ar1(rng: np.random.Generator, n: int, coefficient: float, runs: int) -> np.ndarray:
    """Return `runs` stationary AR(1) series of `n` values with median 0, one per row."""
    noise = rng.normal(size=(runs, n))
    series = np.empty_like(noise)
    series[:, 0] = noise[:, 0] / math.sqrt(1 - coefficient**2)
    for i in range(1, n):
        series[:, i] = coefficient * series[:, i - 1] + noise[:, i]
    return series


def coverage(series: np.ndarray) -> float:
    intervals = [series_interval(tuple(row)) for row in series.tolist()]
    known = [interval for interval in intervals if interval]
    return sum(low <= 0 <= high for low, high in known) / len(known)


@pytest.mark.parametrize("n", [30, 100, 300])
def test_interval_covers_the_median_of_independent_steps(n: int) -> None:
    assert 0.93 <= coverage(ar1(np.random.default_rng(1), n, 0.0, 1500)) <= 0.98


@pytest.mark.parametrize(("coefficient", "n", "least"), [(0.5, 30, 0.92), (0.5, 300, 0.94), (0.8, 300, 0.92)])
def test_interval_covers_the_median_of_autocorrelated_steps(coefficient: float, n: int, least: float) -> None:
    series = ar1(np.random.default_rng(2), n, coefficient, 1500)
    assert coverage(series) >= least
    uncorrected = np.mean([low <= 0 <= high for low, high in map(median_interval, series.tolist())])
    assert uncorrected < least, "the value for independent values"


def test_effective_size_of_series_computed_by_hand() -> None:
    assert median_effective_size((1.0, 2.0) * 20) == 40, "negatively correlated neighbours do not add information"
    assert median_effective_size((3.0,) * 9) == 9
    assert median_effective_size((1.0,) * 10 + (2.0,) * 10) < 5, (
        "a strong drift carries as much information as two values"
    )
