"""When the window opens and closes, against hand calculations and a simulation with a known truth."""

import numpy as np
import pytest
from scipy import stats

from bench.measure.window import find_stop_reason, is_slower, is_steady, is_warmup_done, warmup_s
from bench.spec import MeasureSpec
from bench.statistics import is_changing, median_interval, series_interval


@pytest.mark.parametrize(
    ("n", "ranks"), [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (15, (4, 12)), (30, (10, 21)), (50, (18, 33))]
)
def test_the_medians_interval_has_the_ranks_of_the_published_table(n: int, ranks: tuple[int, int]) -> None:
    """Ranks for 95 %: Conover, Practical Nonparametric Statistics, table A3 by the binomial distribution."""
    assert median_interval(range(1, n + 1)) == ranks


def test_no_interval_is_claimed_where_even_the_extremes_do_not_cover() -> None:
    assert median_interval([1, 2, 3, 4, 5]) is None


@pytest.mark.parametrize("n", [6, 7, 20, 61, 200, 1001])
def test_the_interval_agrees_with_scipys_binomial(n: int) -> None:
    interval = median_interval(range(1, n + 1))
    assert interval is not None
    low, high = (int(value) for value in interval)
    assert stats.binom.cdf(low - 1, n, 0.5) <= 0.025 < stats.binom.cdf(low, n, 0.5)
    assert high == n + 1 - low


def test_the_interval_covers_the_true_median_of_independent_values_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        interval = median_interval(generator.lognormal(size=40).tolist())
        assert interval
        covered += interval[0] <= 1.0 <= interval[1]
    assert 0.945 <= covered / 2000 <= 0.985  # the exact coverage at n = 40 is 0.9615


def test_a_falling_series_is_not_steady_and_a_flat_noisy_one_is() -> None:
    falling = [1 / (1 + step) for step in range(10)]
    assert not is_steady(falling, 5)
    assert is_steady([1.0, 1.02, 0.99, 1.01, 1.0, 1.01, 0.98, 1.0, 1.02, 1.0], 5)
    assert not is_steady([1.0] * 9, 5), "two whole blocks are needed"


PROTOCOL = MeasureSpec(
    warmup_steps=10, warmup_max_steps=20, block_steps=5, min_steps=30, min_s=20, max_steps=100, max_s=60
)


def test_the_window_opens_when_steady_but_never_before_the_fixed_minimum() -> None:
    assert not is_warmup_done([1.0] * 9, PROTOCOL)
    assert is_warmup_done([1.0] * 10, PROTOCOL)


def test_the_window_opens_at_the_end_of_the_warm_up_budget_even_if_unsteady() -> None:
    falling = [1 / (1 + step) for step in range(20)]
    assert not is_warmup_done(falling[:15], PROTOCOL)
    assert is_warmup_done(falling, PROTOCOL)


def test_the_window_closes_when_long_enough_and_narrow_enough() -> None:
    assert find_stop_reason([1.0] * 29, 21.0, PROTOCOL) is None, "not 30 steps"
    assert find_stop_reason([0.6] * 30, 19.0, PROTOCOL) is None, "not 20 s"
    assert find_stop_reason([1.0] * 30, 20.0, PROTOCOL) == "width"
    assert find_stop_reason([1.0, 2.0] * 20, 59.0, PROTOCOL) is None, "too wide"


def end_early(median_s: float, generator: np.random.Generator) -> bool:
    """Whether a window of 100 steps with neighbours alike is ended by a limit of 1.1 s, looked at every 5 steps."""
    noise, steps = 0.0, list[float]()
    for _ in range(100):
        noise = 0.5 * noise + 0.05 * generator.standard_normal()
        steps.append(median_s * np.exp(noise + (generator.random() < 0.02)))
    return any(is_slower(steps[:seen], 1.1, 5) for seen in range(5, 101, 5))


def test_what_could_win_is_hardly_ever_ended_early_and_what_takes_half_as_long_again_is() -> None:
    """A limit is a tenth above the best's median: a trial as fast as the best or 5 % slower is to keep its window."""
    generator = np.random.default_rng(0)
    ended = {median: sum(end_early(median, generator) for _ in range(100)) for median in (1.0, 1.05, 1.1, 1.5)}
    assert (ended[1.0], ended[1.05]) == (0, 0)
    assert ended[1.1] <= 5, "twenty looks at one that is just at the limit"
    assert ended[1.5] >= 90


def drifting(by: float, noise: float = 0.002, n: int = 100) -> list[float]:
    """Steps of 1 s that end `by` longer than they began."""
    scatter = noise * np.random.default_rng(0).standard_normal(n)
    return list(np.linspace(1, 1 + by, n) * (1 + scatter))


@pytest.mark.parametrize(("by", "changing"), [(0.0, False), (0.005, False), (0.03, True), (-0.03, True)])
def test_a_window_whose_steps_still_change_is_known_afterwards(by: float, changing: bool) -> None:
    """Half a per cent, at a claim of two, does not matter."""
    assert is_changing(drifting(by), 0.02) is changing


def test_a_change_in_one_place_is_known_and_scatter_is_none() -> None:
    jump = drifting(0.0, 0.01, 40)
    assert not is_changing(jump, 0.02)
    assert is_changing([*jump[:15], *(1.1 * step for step in jump[15:])], 0.02)
    assert not is_changing([1.0] * 40, 0.02), "nothing scatters"
    assert not is_changing([1.0, 1.5] * 5, 0.02), "of a handful nothing is known"
    assert not is_changing([*jump[:20], 9.0, *jump[20:]], 0.02), "one slow step changes nothing"


def test_a_window_stays_open_while_its_steps_seem_to_change() -> None:
    """Its interval would be narrow enough: it is within 2 % of the median."""
    slower = drifting(0.012, 0.01)
    interval = series_interval(slower)
    assert interval and interval[1] - interval[0] < 0.02
    assert find_stop_reason(slower, 60.0 - 1, PROTOCOL.model_copy(update={"max_steps": 500})) is None
    assert find_stop_reason(drifting(0.0), 60.0 - 1, PROTOCOL.model_copy(update={"max_steps": 500})) == "width"


def test_a_gpu_warms_up_by_time_too_and_then_until_it_is_steady() -> None:
    assert (warmup_s(PROTOCOL, on_gpu=False), warmup_s(PROTOCOL, on_gpu=True)) == (0, 30)
    assert is_warmup_done([1.0] * 10, PROTOCOL, 0) and not is_warmup_done([1.0] * 29, PROTOCOL, 30)
    assert is_warmup_done([1.0] * 30, PROTOCOL, 30)
    late = [1.0] * 29 + [1 / (1 + step) for step in range(21)]  # step 29 reaches the 30 s; 20 more are the budget
    assert not is_warmup_done(late[:45], PROTOCOL, 30)
    assert is_warmup_done(late, PROTOCOL, 30)


def test_the_window_closes_when_a_budget_is_spent() -> None:
    assert find_stop_reason([1.0, 2.0] * 50, 59.0, PROTOCOL) == "steps"
    assert find_stop_reason([1.0, 2.0] * 20, 60.0, PROTOCOL) == "time"


def test_the_width_of_the_interval_is_heard_where_it_is_looked_at() -> None:
    heard: list[float] = []
    find_stop_reason([1.0] * 29, 21.0, PROTOCOL, follow=heard.append)
    assert heard == [], "not 30 steps"
    step_s = [1.0, 2.0] * 20
    assert find_stop_reason(step_s, 59.0, PROTOCOL, follow=heard.append) is None
    low, high = series_interval(step_s)
    assert heard == [pytest.approx((high - low) / 1.5)]
