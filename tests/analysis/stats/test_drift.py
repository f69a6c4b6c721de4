"""Tests of the drift of the nodes' speed in the course of an allocation. It is measured by a control configuration that
runs several times in the allocation, and must be separated from the usual difference between runs."""

import numpy as np
import pytest
from scipy import stats

from analysis.stats.change_points import measure_drift


def test_drift_is_the_regression_line_through_the_control_points() -> None:
    times = [0.100, 0.1012, 0.1019, 0.1031, 0.1042]
    found = measure_drift([[seconds] * 30 for seconds in times])
    line = stats.linregress(np.linspace(0, 1, 5), np.log(times))
    reach = stats.t.ppf(0.975, 3) * line.stderr
    assert found is not None
    assert found.change == pytest.approx(np.expm1(line.slope))
    assert found.interval is not None
    assert found.interval[:2] == pytest.approx((np.expm1(line.slope - reach), np.expm1(line.slope + reach)))
    assert found.interval[2:] == ("between repeats", 0.95, 5)
    assert found.detected


def test_two_control_runs_are_too_few_to_detect_drift() -> None:
    found = measure_drift([[0.100] * 30, [0.103] * 30])
    assert found is not None
    assert found.change == pytest.approx(0.03)
    assert (found.interval, found.detected) == (None, False)


@pytest.mark.parametrize("run_effect", [0.003, 0.01, 0.02])
def test_differences_between_equal_runs_are_called_drift_in_about_five_percent(run_effect: float) -> None:
    rng = np.random.default_rng(1)
    found = [measure_drift([[seconds] for seconds in np.exp(run_effect * rng.standard_normal(4))]) for _ in range(400)]
    assert 0.03 <= np.mean([one.detected for one in found if one]) <= 0.08


def test_one_control_run_gives_no_drift() -> None:
    assert measure_drift([[0.1] * 30]) is None
