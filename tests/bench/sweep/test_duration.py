"""How long an attempt takes by its protocol, worked out by hand, and beside recorded runs."""

import pytest

from bench.spec import MeasureSpec
from bench.sweep.duration import (
    LEAST_MIN,
    MARGIN,
    compute_bound_min,
    compute_limit_min,
    compute_longest_s,
    compute_minutes,
    compute_shortest_s,
)

DEFAULT = MeasureSpec()  # warm-up 5 to 60 steps in blocks of 5; window 30 steps and 20 s, to 500 steps or 300 s


@pytest.mark.parametrize(("step_s", "shortest", "longest"), [
    (0.01, (10 + 2000 + 3) * 0.01, (60 + 2000 + 3) * 0.01 + 30),  # two blocks tell steadiness; 20 s are not in 500
    (0.1, (10 + 200 + 3) * 0.1, (60 + 500 + 3) * 0.1 + 30),  # 20 s; a GPU warms up for 30
    (1.0, (10 + 30 + 3) * 1.0, (60 + 300 + 3) * 1.0 + 30),  # 30 steps; 300 s are over
    (7.0, (10 + 30 + 3) * 7.0, (60 + 45 + 3) * 7.0 + 30),  # in whole blocks: 300 s are 43
    (400.0, (10 + 5 + 3) * 400.0, (60 + 5 + 3) * 400.0 + 30),  # one block is the least
])  # fmt: skip
def test_the_protocol_tells_the_fewest_and_the_most_steps(step_s: float, shortest: float, longest: float) -> None:
    assert compute_shortest_s(DEFAULT, step_s) == pytest.approx(shortest)
    assert compute_longest_s(DEFAULT, step_s) == pytest.approx(longest)


def test_a_protocol_of_few_steps_is_bounded_by_them() -> None:
    few = MeasureSpec(
        warmup_steps=2, warmup_max_steps=3, block_steps=2, min_steps=3, max_steps=3, inspect=False, min_s=0
    )
    assert compute_shortest_s(few, 1.0) == compute_longest_s(few, 1.0) == 3 + 3


def test_a_minimum_of_seconds_that_is_zero_asks_for_the_steps() -> None:
    assert compute_shortest_s(MeasureSpec(min_s=0), 7.0) == (10 + 30 + 3) * 7.0


def test_a_limit_holds_if_steps_take_three_times_as_long_as_predicted_at_most() -> None:
    limit = compute_limit_min(DEFAULT, 0.01, setup_min=10, bound_min=20)
    assert limit == pytest.approx(10 + (733 * 0.03 + 30) / 60)  # 670 steps are 20 s of so long ones
    assert 60 * (limit - 10) >= compute_longest_s(DEFAULT, MARGIN * 0.01) * 0.999


def test_a_limit_is_never_longer_than_without_a_prediction_nor_shorter_than_a_start() -> None:
    bound = compute_bound_min(DEFAULT, setup_min=10)
    assert bound == 10 + 2 * 300 / 60
    assert compute_limit_min(DEFAULT, 100.0, 10, bound) == bound
    assert compute_limit_min(DEFAULT, 1e-6, 0, bound) == LEAST_MIN
    assert compute_limit_min(DEFAULT, 1e-6, 0, 1.5) == 1.5


def test_an_attempt_takes_from_its_quickest_to_its_slowest() -> None:
    taken = compute_minutes(DEFAULT, 0.5, 1.0)
    assert taken == pytest.approx(((2.5 + 53 * 0.5) / 60, (17 + 363 + 30) / 60))
