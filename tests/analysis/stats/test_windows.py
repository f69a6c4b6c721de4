"""Tests of confidence intervals that are computed for many windows in one call. A window has the timed steps of one
run. The intervals must equal those computed for each window alone."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from analysis.stats.intervals import FEW, SHARES, Interval, describe_window, prepare_windows
from bench.core.statistics import LEAST, LEVEL, SeriesBounds, effective_size, mean_bounds, median_bounds


def window(seed: int, length: int) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(rng.gauss(1, 0.1) for _ in range(length))


def alone(bounds: Callable[[np.ndarray], SeriesBounds], steps: tuple[float, ...]) -> Interval | None:
    """Return the interval that the function `bounds` computes from one window. Return None if there are too few steps
    for an interval."""
    if len(steps) < LEAST:
        return None
    low, high, _ = bounds(np.array(steps))
    return Interval(float(low), float(high), "within the run", LEVEL, len(steps)) if np.isfinite(low) else None


def test_intervals_of_a_batch_equal_intervals_computed_alone() -> None:
    given = [window(seed, length) for seed in range(5) for length in (0, 3, 6, 30, 31, 200)]
    given.append((0.1,) * 30)
    given.append((*window(7, 20), *(1.5 * step for step in window(8, 20))))
    prepare_windows(given)
    for steps in (*given, window(99, 40)):
        found_all = describe_window(steps)
        assert found_all.few == (len(steps) >= LEAST and float(effective_size(np.array(steps))) < FEW)
        assert list(found_all.quantiles) == ([np.quantile(steps, share) for share in SHARES] if steps else [])
        for found, expected in (
            (found_all.median, alone(median_bounds, steps)),
            (found_all.mean, alone(mean_bounds, steps)),
        ):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found[:2] == pytest.approx(expected[:2], rel=1e-12)
                assert found[2:] == expected[2:]


def noisy(level: float, seed: int, noise: float = 0.01, length: int = 50) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(level * rng.gauss(1, noise) for _ in range(length))


@pytest.mark.parametrize(
    ("steps", "changed"),
    [
        (noisy(1.0, 0) + noisy(1.05, 1), True),
        (noisy(1.05, 0) + noisy(1.0, 1), True),
        (noisy(1.0, 0) + noisy(1.015, 1), False),  # less than CHANGE
        (noisy(1.0, 0, 0.3) + noisy(1.05, 1, 0.3), False),  # less than the scatter
        ((*noisy(1.0, 0), 9.0, *noisy(1.0, 1)), False),  # a single slow step
        ((1.0,) * 5 + (2.0,) * 5, False),  # too few steps for intervals
        ((1.0,) * 40, False),
    ],
)
def test_window_has_changed_if_first_and_last_third_differ_by_more_than_the_scatter(
    steps: tuple[float, ...], changed: bool
) -> None:
    assert describe_window(steps).changed is changed


@pytest.mark.parametrize("share", [0.1, 0.2, 0.9])
def test_clock_that_drops_within_a_third_of_the_window_is_a_change(share: float) -> None:
    """The third that contains the drop has a wide interval, which overlaps that of the other third."""
    rng = np.random.default_rng(0)
    steps = 0.1 * (1 + 0.005 * rng.standard_normal((100, 300)))
    steps[:, : round(300 * share)] *= 1.1
    assert np.mean([describe_window(tuple(series)).changed for series in steps.tolist()]) > 0.95


def test_false_alarm_rate_of_changed_windows_is_at_most_two_percent() -> None:
    """Series of sixty steps have an autocorrelation of 0.5 and a scatter of 5 %, but no change. Nevertheless, the first
    and the last third differ by more than 2 % in nearly half of the series, by chance. At most 2 % of series may be
    called changed."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1000, 60))
    for step in range(1, 60):
        noise[:, step] = 0.5 * noise[:, step - 1] + math.sqrt(0.75) * noise[:, step]
    given = [tuple(series) for series in (1 + 0.05 * noise).tolist()]
    prepare_windows(given)
    thirds = np.array(given).reshape(1000, 3, 20).mean(axis=2)
    assert np.mean(np.abs(thirds[:, 2] - thirds[:, 0]) > 0.02) > 0.4
    assert np.mean([describe_window(steps).changed for steps in given]) <= 0.02
