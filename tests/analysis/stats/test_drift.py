import numpy as np
import pytest
from simulated import ar1

from analysis.stats.drift import drift
from analysis.stats.ratio import of_steps


def control(centre: float, seed: int) -> list[float]:
    return (centre * np.exp(0.01 * ar1(0.5)(np.random.default_rng(seed), 1, 300)[0])).tolist()


def test_it_is_the_last_control_point_over_the_first() -> None:
    found = drift([[0.100] * 30, [0.150] * 30, [0.103] * 30])
    assert found is not None
    assert found.change == pytest.approx(0.03)
    assert found.interval is not None
    assert found.interval[:2] == pytest.approx((0.03, 0.03))
    assert found.detected


def test_its_interval_is_that_of_the_ratio() -> None:
    first, last = control(0.1, 1), control(0.102, 2)
    found, ratio = drift([first, last]), of_steps(last, first).interval
    assert found is not None
    assert found.interval is not None
    assert ratio is not None
    assert found.interval == ratio._replace(low=pytest.approx(ratio.low - 1), high=pytest.approx(ratio.high - 1))
    assert found.detected


def test_noise_is_no_drift_and_nor_are_runs_too_short_to_tell() -> None:
    assert not drift([control(0.1, 1), control(0.1, 3)]).detected
    assert not drift([[0.1] * 2, [0.2] * 2]).detected


def test_one_control_point_tells_of_none() -> None:
    assert drift([[0.1] * 30]) is None
