"""Many windows at once have the intervals that each has by itself."""

import math
import random

import numpy as np
import pytest

from analysis.stats import intervals, windows


def window(seed: int, length: int) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(rng.gauss(1, 0.1) for _ in range(length))


def test_each_has_the_intervals_of_its_own_steps() -> None:
    given = [window(seed, length) for seed in range(5) for length in (0, 3, 6, 30, 31, 200)]
    given.append((0.1,) * 30)
    given.append((*window(7, 20), *(1.5 * step for step in window(8, 20))))
    windows.prepare(given)
    for steps in (*given, window(99, 40)):
        found_all = windows.of(steps)
        assert found_all.few == intervals.few(steps)
        assert list(found_all.quantiles) == ([np.quantile(steps, share) for share in windows.SHARES] if steps else [])
        expected = intervals.median_interval(steps), intervals.mean_interval(steps)
        for found, alone in zip(found_all[:2], expected, strict=True):
            assert (found is None) == (alone is None)
            if found is not None and alone is not None:
                assert found[:2] == pytest.approx(alone[:2], rel=1e-12)
                assert found[2:] == alone[2:]


def noisy(level: float, seed: int, noise: float = 0.01, length: int = 50) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(level * rng.gauss(1, noise) for _ in range(length))


@pytest.mark.parametrize(
    ("steps", "changed"),
    [
        (noisy(1.0, 0) + noisy(1.05, 1), True),
        (noisy(1.05, 0) + noisy(1.0, 1), True),
        (noisy(1.0, 0) + noisy(1.015, 1), False),  # by less than matters
        (noisy(1.0, 0, 0.3) + noisy(1.05, 1, 0.3), False),  # by less than the steps scatter
        ((*noisy(1.0, 0), 9.0, *noisy(1.0, 1)), False),  # one slow step is no change
        ((1.0,) * 5 + (2.0,) * 5, False),  # of a handful nothing is known
        ((1.0,) * 40, False),
    ],
)
def test_a_window_changed_where_its_first_and_last_third_differ_by_more_than_they_scatter(
    steps: tuple[float, ...], changed: bool
) -> None:
    assert windows.of(steps).changed is changed


def test_alike_thirds_are_hardly_ever_called_changed() -> None:
    """Sixty steps, each like the one before by 0.5, with a scatter of 5 %: thirds differ by 2 % in nearly half."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1000, 60))
    for step in range(1, 60):
        noise[:, step] = 0.5 * noise[:, step - 1] + math.sqrt(0.75) * noise[:, step]
    given = [tuple(series) for series in (1 + 0.05 * noise).tolist()]
    windows.prepare(given)
    thirds = np.array(given).reshape(1000, 3, 20).mean(axis=2)
    assert np.mean(np.abs(thirds[:, 2] - thirds[:, 0]) > 0.02) > 0.4
    assert np.mean([windows.of(steps).changed for steps in given]) <= 0.02
