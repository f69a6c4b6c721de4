import math

import numpy as np
import pytest
from scipy import stats
from simulated import ar1

from analysis.stats import bootstrap
from analysis.stats.interval import Interval

SERIES = ar1(0.5)(np.random.default_rng(1), 1, 3000)[0]


def test_the_same_seed_gives_the_same_interval() -> None:
    for resample in (bootstrap.over_repeats, bootstrap.within_run):
        one, same, other = (resample(SERIES[:60], np.mean, seed=seed) for seed in (0, 0, 1))
        assert one == same != other


def test_of_independent_repeats_it_is_near_students() -> None:
    values = np.random.default_rng(2).normal(10, 1, size=60)
    told = bootstrap.over_repeats(values.tolist(), np.mean)
    theirs = stats.t.interval(0.95, 59, values.mean(), stats.sem(values))
    assert told is not None
    assert told[:2] == pytest.approx(theirs, abs=0.05)
    assert told[2:] == ("between repeats", 0.95, 60)


def test_blocks_keep_the_resemblance_of_neighbours() -> None:
    told = bootstrap.within_run(SERIES, np.mean)
    assert told is not None
    expected = 2 * 1.96 * math.sqrt(3 / 3000)  # (1 + φ) / (1 - φ) of independent ones
    assert told.high - told.low == pytest.approx(expected, rel=0.2)
    assert told[2:] == ("within the run", 0.95, 3000)


def test_any_statistic_has_one() -> None:
    def p95(values: np.ndarray, axis: int) -> np.ndarray:
        return np.quantile(values, 0.95, axis=axis)

    told = bootstrap.within_run(SERIES, p95)
    assert told is not None
    assert told.low < stats.norm.ppf(0.95) < told.high


def test_a_block_is_as_long_as_neighbours_resemble() -> None:
    assert bootstrap.block_length(np.array([1.0, 2.0] * 50)) == 1
    expected = (6 * 3000) ** (1 / 3) * (0.5 / 0.75) ** (2 / 3)
    assert bootstrap.block_length(SERIES) == pytest.approx(expected, rel=0.15)


def test_what_cannot_be_resampled() -> None:
    assert bootstrap.over_repeats([1.0], np.mean) is None
    assert bootstrap.over_repeats([2.0] * 4, np.median) == Interval(2, 2, "between repeats", 0.95, 4)
    assert bootstrap.within_run([], np.mean) is None
    assert bootstrap.within_run([0.1], np.mean) is None
    assert bootstrap.block_length(np.arange(9.0)) > 9 / 4, "hardly anything to draw from in a drift"
