"""Many windows at once have the intervals that each has by itself."""

import random

import numpy as np
import pytest

from analysis.stats import series, windows
from bench.statistics import SURE, SUSPECTED, is_changing


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
        assert found_all.few == series.few(steps)
        for level in (SURE, SUSPECTED):
            assert windows.is_changing(steps, 0.02, level) == is_changing(steps, 0.02, level)
        assert list(found_all.quantiles) == ([np.quantile(steps, share) for share in windows.SHARES] if steps else [])
        expected = series.median_interval(steps), series.mean_interval(steps)
        for found, alone in zip(found_all[:2], expected, strict=True):
            assert (found is None) == (alone is None)
            if found is not None and alone is not None:
                assert found[:2] == pytest.approx(alone[:2], rel=1e-12)
                assert found[2:] == alone[2:]
