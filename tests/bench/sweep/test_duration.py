"""Tests of the predicted duration of an attempt, which is one try at a run. The duration follows from the measurement
protocol (numbers of steps and time limits). Predicted durations are compared with hand calculations and with recorded
runs."""

import pytest

from bench.core.spec import MeasureSpec
from bench.sweep.forecast import (
    LEAST_MIN,
    MARGIN,
    compute_bound_min,
    compute_limit_min,
    compute_longest_s,
    compute_minutes,
    compute_shortest_s,
)

DEFAULT = MeasureSpec()  # warm-up: 10 steps, on a GPU 30 s; window: 30 steps and 60 s, at most 300 s, in blocks of 5


@pytest.mark.parametrize(("step_s", "shortest", "longest"), [
    (0.01, (10 + 6000 + 3) * 0.01, (10 + 6005 + 3) * 0.01 + 30),  # 60 s of steps; a GPU adds 30 s and one block
    (1.0, (10 + 60 + 3) * 1.0, (10 + 65 + 3) * 1.0 + 30),
    (7.0, (10 + 30 + 3) * 7.0, (10 + 35 + 3) * 7.0 + 30),  # a window has at least 30 steps
    (70.0, (10 + 5 + 3) * 70.0, (10 + 10 + 3) * 70.0 + 30),  # a window of 300 s, in whole blocks
    (400.0, (10 + 5 + 3) * 400.0, (10 + 10 + 3) * 400.0 + 30),  # a window has at least one block
])  # fmt: skip
def test_shortest_and_longest_duration_follow_from_the_measurement_protocol(
    step_s: float, shortest: float, longest: float
) -> None:
    assert compute_shortest_s(DEFAULT, step_s) == pytest.approx(shortest)
    assert compute_longest_s(DEFAULT, step_s) == pytest.approx(longest)


def test_window_of_zero_seconds_has_the_minimum_number_of_steps() -> None:
    few = MeasureSpec(warmup_steps=3, gpu_warmup_s=0, block_steps=2, min_steps=4, inspect=False, window_s=0)
    assert compute_shortest_s(few, 1.0) == 3 + 4
    assert compute_longest_s(few, 1.0) == 3 + 4 + 2


def test_time_limit_suffices_for_steps_of_three_times_the_predicted_time() -> None:
    limit = compute_limit_min(DEFAULT, 0.01, setup_min=10, bound_min=20)
    assert limit == pytest.approx(10 + ((10 + 2000 + 3 + 5) * 0.03 + 30) / 60)  # 60 s are 2000 steps of 0.03 s
    assert 60 * (limit - 10) >= compute_longest_s(DEFAULT, MARGIN * 0.01) * 0.999


def test_time_limit_lies_between_the_least_limit_and_the_limit_without_a_prediction() -> None:
    bound = compute_bound_min(DEFAULT, setup_min=10)
    assert bound == 10 + 2 * 300 / 60
    assert compute_limit_min(DEFAULT, 100.0, 10, bound) == bound
    assert compute_bound_min(DEFAULT, 10, 0.1) == bound
    slow = compute_bound_min(DEFAULT, 10, 100.0)
    assert slow == pytest.approx(10 + (10 + 5 + 5 + 3) * 100 / 60 + 0.5), "warm-up, one block above max_s, one launched"
    assert compute_limit_min(DEFAULT, 1e-6, 0, bound) == LEAST_MIN
    assert compute_limit_min(DEFAULT, 1e-6, 0, 1.5) == 1.5


def test_predicted_minutes_range_from_the_shortest_to_the_longest_attempt() -> None:
    minutes = compute_minutes(DEFAULT, 0.5, 1.0)
    assert minutes == pytest.approx(((2.5 + (10 + 120 + 3) * 0.5) / 60, (17 + (10 + 60 + 5 + 3) + 30) / 60))
