"""Tests of the begin and the end of the measured window. They are compared with hand calculations, and with simulated
steps whose true step time is known."""

import numpy as np
import pytest
from scipy import stats

from bench.core.spec import MeasureSpec
from bench.core.statistics import median_interval
from bench.measure.loop import find_stop_reason, is_slower, is_warmup_done


@pytest.mark.parametrize(
    ("n", "ranks"), [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (15, (4, 12)), (30, (10, 21)), (50, (18, 33))]
)
def test_median_interval_has_the_order_statistics_of_the_published_table(n: int, ranks: tuple[int, int]) -> None:
    """The 95 % interval of a median extends from one of the sorted values to another. Their ranks must be those of
    table A3 (binomial distribution) in Conover, Practical Nonparametric Statistics."""
    assert median_interval(range(1, n + 1)) == ranks


def test_no_interval_is_given_if_the_extremes_do_not_cover() -> None:
    assert median_interval([1, 2, 3, 4, 5]) is None


@pytest.mark.parametrize("n", [6, 7, 20, 61, 200, 1001])
def test_interval_agrees_with_scipys_binomial_distribution(n: int) -> None:
    interval = median_interval(range(1, n + 1))
    assert interval is not None
    low, high = (int(value) for value in interval)
    assert stats.binom.cdf(low - 1, n, 0.5) <= 0.025 < stats.binom.cdf(low, n, 0.5)
    assert high == n + 1 - low


def test_interval_covers_the_true_median_at_its_nominal_rate() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        interval = median_interval(generator.lognormal(size=40).tolist())
        assert interval
        covered += interval[0] <= 1.0 <= interval[1]
    assert 0.945 <= covered / 2000 <= 0.985  # the exact coverage at n = 40 is 0.9615


PROTOCOL = MeasureSpec(warmup_steps=10, gpu_warmup_s=30, block_steps=5, window_s=60, min_steps=30, max_s=300)


@pytest.mark.parametrize(
    ("steps", "elapsed_s", "done_on_cpu", "done_on_gpu"),
    [(9, 90.0, False, False), (10, 29.9, True, False), (10, 30.0, True, True)],
)
def test_warm_up_has_its_steps_and_on_a_gpu_its_seconds(
    steps: int, elapsed_s: float, done_on_cpu: bool, done_on_gpu: bool
) -> None:
    found = [is_warmup_done(steps, elapsed_s, PROTOCOL, on_gpu=on_gpu) for on_gpu in (False, True)]
    assert found == [done_on_cpu, done_on_gpu]


@pytest.mark.parametrize(
    ("steps", "elapsed_s", "reason"),
    [
        (6000, 59.9, None),  # many steps do not end a window early
        (29, 299.9, None),  # too few steps, and max_s is not reached
        (30, 60.0, "window"),
        (30, 300.0, "window"),
        (29, 300.0, "time"),
    ],
)
def test_window_has_its_seconds_and_steps_or_ends_at_its_time_limit(
    steps: int, elapsed_s: float, reason: str | None
) -> None:
    assert find_stop_reason(steps, elapsed_s, PROTOCOL) == reason


def test_window_ends_at_its_time_limit_below_its_minimum() -> None:
    assert find_stop_reason(100, 5.0, PROTOCOL.model_copy(update={"max_s": 5.0})) == "time"


def end_early(median_s: float, generator: np.random.Generator) -> bool:
    """Simulate 100 autocorrelated step times with the median `median_s`. Every 5 steps, all steps so far are compared
    with a limit of 1.1 s. Return True if a comparison finds that the steps are slower than the limit, which would end
    the measurement early."""
    noise, steps = 0.0, list[float]()
    for _ in range(100):
        noise = 0.5 * noise + 0.05 * generator.standard_normal()
        steps.append(median_s * np.exp(noise + (generator.random() < 0.02)))
    return any(is_slower(steps[:seen], 1.1, 5) for seen in range(5, 101, 5))


def test_slow_trials_are_ended_early_and_close_ones_rarely() -> None:
    """The best trial has a median of 1 s, and the limit is 10 % above it. A trial that is at most 5 % slower than the
    best must never be ended early. A trial that is 50 % slower must almost always be ended early."""
    generator = np.random.default_rng(0)
    ended = {median: sum(end_early(median, generator) for _ in range(100)) for median in (1.0, 1.05, 1.1, 1.5)}
    assert (ended[1.0], ended[1.05]) == (0, 0)
    assert ended[1.1] <= 5, "twenty looks at one that is just at the limit"
    assert ended[1.5] >= 90
