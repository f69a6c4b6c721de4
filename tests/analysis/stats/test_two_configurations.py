import math

import numpy as np
import pytest
from scipy import stats
from simulated import PROCESSES, ar1

from analysis.stats.compare import (
    EQUAL,
    NOT_DETECTED,
    TOO_FEW,
    Verdict,
    are_equal,
    blocks,
    compare,
    judge_interval,
    ratio_of_runs,
    ratio_of_steps,
    superiority,
    verdicts,
)
from analysis.stats.family import compute_equivalence, holm
from analysis.stats.intervals import Interval, describe_window

FAST, SLOW = [[0.100], [0.101], [0.103]], [[0.200], [0.203], [0.201]]


def noisy(centre: float, seed: int, runs: int = 1, n: int = 400) -> list[list[float]]:
    series = ar1(0.5)(np.random.default_rng(seed), runs, n)
    return (centre * np.exp(0.02 * series)).tolist()


def test_comparison_of_runs_equals_welchs_test_on_logarithms() -> None:
    ours, theirs = ([math.log(run[0]) for run in side] for side in (FAST, SLOW))
    parts = [np.var(side, ddof=1) / 3 for side in (ours, theirs)]
    degrees_of_freedom = sum(parts) ** 2 / sum(part**2 / 2 for part in parts)
    apart, error = np.mean(ours) - np.mean(theirs), math.sqrt(sum(parts))
    margin = stats.t.ppf(0.975, degrees_of_freedom) * error
    told = ratio_of_runs(FAST, SLOW)
    assert told.value == pytest.approx(math.exp(apart))
    assert told.interval is not None
    assert told.interval[:2] == pytest.approx((math.exp(apart - margin), math.exp(apart + margin)))
    assert told.interval[2:] == ("between repeats", 0.95, 6)
    assert told.p_value == pytest.approx(2 * stats.t.sf(abs(apart) / error, degrees_of_freedom))


def test_blocking_by_allocation_removes_differences_between_nodes() -> None:
    nodes = np.array([1.0, 1.3, 0.8, 1.1])
    one, other = ([[seconds] for seconds in nodes * scale] for scale in ([1, 1.01, 1, 1.01], [1.05, 1.05, 1.06, 1.05]))
    assert compare(one, other).p_value > 0.5
    assert compare(one, other, blocked=True).p_value < 0.01


def test_allocations_are_the_blocks_of_a_comparison_only_if_most_are_shared() -> None:
    """With blocks, runs in other allocations are left out. That must not be the majority."""
    names = [str(number) for number in range(10)]
    assert blocks(names[:5], names[1:6]) == names[1:5]
    assert blocks(names, names[7:] + ["x"] * 7) == []
    assert blocks(names[:3], names[:2]) == [], "two shared allocations show no scatter"


def test_blocked_comparison_equals_the_paired_t_test_on_logarithms() -> None:
    one, other = [[1.0], [1.3], [0.8], [1.1]], [[1.05], [1.37], [0.85], [1.15]]
    test = stats.ttest_rel(np.log(one).ravel(), np.log(other).ravel())
    told = ratio_of_runs(one, other, blocked=True)
    assert told.interval is not None
    assert told.interval[:2] == pytest.approx(tuple(np.exp(test.confidence_interval(0.95))))
    assert told.p_value == pytest.approx(test.pvalue)


def test_comparison_of_steps_combines_the_intervals_of_both_means() -> None:
    one, other = noisy(0.1, 1)[0], noisy(0.11, 2)[0]
    ours, theirs = (describe_window(tuple(steps)).mean for steps in (one, other))
    assert ours is not None
    assert theirs is not None
    middles = math.log(np.mean(one)), math.log(np.mean(other))
    below = math.hypot(middles[0] - math.log(ours.low), math.log(theirs.high) - middles[1])
    told = ratio_of_steps(one, other)
    assert told.value == pytest.approx(math.exp(middles[0] - middles[1]))
    assert told.interval is not None
    assert told.interval.low == pytest.approx(told.value * math.exp(-below))
    assert told.interval[2:] == ("within the runs", 0.95, 800)


def test_six_steps_are_enough_for_an_interval_of_the_ratio() -> None:
    """Each side has one run, and each run has six step times. Six step times are too few for a 95 % interval of a
    median, but enough for an interval of the ratio of the two means."""
    one, other = [1.41, 1.34, 1.36, 1.32, 1.35, 1.32], [2.32, 2.35, 2.39, 2.44, 2.36, 2.55]
    assert describe_window(tuple(other)).median is None
    told = ratio_of_steps(one, other)
    assert told.value == pytest.approx(np.mean(one) / np.mean(other))
    assert told.interval is not None
    assert 0.45 < told.interval.low < told.value < told.interval.high < 0.7
    assert told.p_value < 0.01


@pytest.mark.parametrize("n", [8, 16, 40])
def test_false_alarm_rate_of_a_few_steps_is_at_most_five_percent(n: int) -> None:
    rng = np.random.default_rng(n)
    pairs = zip(*(np.exp(0.03 * ar1(0.5)(rng, 1000, n)) for _ in range(2)), strict=True)
    assert np.mean([ratio_of_steps(*pair).p_value <= 0.05 for pair in pairs]) <= 0.05


def test_p_value_is_the_level_at_which_the_interval_ends_at_ratio_one() -> None:
    one, other = noisy(0.1, 1)[0], noisy(0.1001, 2)[0]
    p = ratio_of_steps(one, other).p_value
    interval = ratio_of_steps(one, other, level=1 - p).interval
    assert 0.01 < p < 0.99
    assert interval is not None
    assert 1 in (pytest.approx(interval.low, abs=2e-4), pytest.approx(interval.high, abs=2e-4))


def test_unit_of_comparison_is_the_run_from_three_runs_per_side() -> None:
    assert compare(FAST, SLOW).unit == "run"
    few = compare(noisy(0.1, 1, runs=3), noisy(0.1, 2, runs=2))
    assert few.unit == "step"
    assert few.interval is not None
    assert few.interval.kind == "within the runs"
    assert few.interval.n == 5 * 400


def test_one_short_run_per_side_has_no_interval_and_no_verdict() -> None:
    told = compare([[0.1, 0.1]], [[0.2] * 50])
    assert (told.ratio, told.interval, told.p_value) == (pytest.approx(0.5), None, 1.0)
    assert verdicts([told]) == [TOO_FEW]


def test_steps_without_scatter_give_p_value_zero_or_one() -> None:
    assert compare([[0.1] * 30], [[0.1] * 30]).p_value == compare([[0.1] * 30] * 3, [[0.1] * 30] * 3).p_value == 1
    assert compare([[0.1] * 30], [[0.2] * 30]).p_value == compare([[0.1] * 30] * 3, [[0.2] * 30] * 3).p_value == 0


def test_superiority_and_cliffs_delta_computed_by_hand() -> None:
    # Pairs of values: 1 is below 2, 3, 4; 2 is below 3, 4 and ties once; 3 is below 4 and ties once. Total 7 of 9.
    assert superiority([1, 2, 3], [2, 3, 4]) == pytest.approx(7 / 9)
    told = compare([[1.0], [2.0], [3.0]], [[2.0], [3.0], [4.0]])
    assert (told.superiority, told.cliffs_delta) == (pytest.approx(7 / 9), pytest.approx(5 / 9))


def test_holms_correction_computed_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_verdicts_of_four_comparisons() -> None:
    alike, few = (compare(noisy(0.1, 3, runs), noisy(0.1, 4, runs)) for runs in (3, 1))
    assert verdicts([compare(FAST, SLOW), few, compare(SLOW, FAST), alike]) == [
        "faster", "too few repeats to tell", "slower", "equal within 3 %",
    ]  # fmt: skip


def test_equality_within_three_percent_agrees_with_two_one_sided_tests() -> None:
    """The reference is the larger p-value of two one-sided Welch tests by scipy. Our p-value must be at least this
    reference, and at most twice as large."""
    one, other = ([[seconds * by] for by in (0.995, 1.0, 1.004, 1.001)] for seconds in (1.0, 1.012))
    logs = np.log(one).ravel(), np.log(other).ravel()
    margin = math.log(1.03)
    below = stats.ttest_ind(logs[0] + margin, logs[1], equal_var=False, alternative="greater").pvalue
    above = stats.ttest_ind(logs[0] - margin, logs[1], equal_var=False, alternative="less").pvalue
    told = compare(one, other)
    (p,) = compute_equivalence([math.log(told.ratio)], [told.noises], margin)
    assert max(below, above) * 0.999 <= p <= 2 * max(below, above)
    assert are_equal([told]) == [p <= 0.05] == [True]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.98, 1.02, EQUAL), (0.9710, 1.0299, EQUAL), (0.9708, 1.02, NOT_DETECTED), (0.98, 1.031, NOT_DETECTED),
        (1.001, 1.002, "slower"), (1.1, 1.2, "slower"), (0.998, 0.999, "faster"), (1.0, 1.02, EQUAL),
    ],
)  # fmt: skip
def test_verdict_of_a_simultaneous_interval(low: float, high: float, verdict: Verdict) -> None:
    """The verdict "equal within 3 %" requires that the interval of the ratio of times lies between 1 / 1.03 = 0.9709
    and 1.03."""
    assert judge_interval(Interval(low, high, "between repeats", 0.95, 6)) == verdict


def test_two_runs_per_side_have_no_verdict() -> None:
    told = compare(FAST[:2], SLOW)
    assert (told.ratio, told.unit) == (pytest.approx(0.1005 / 0.2013, rel=1e-3), "step")
    assert verdicts([told]) == [TOO_FEW]


def test_slow_steps_count_in_the_ratio_of_means() -> None:
    """In the configuration `tails`, one step in five takes three times as long as the other steps. These slow steps
    raise the mean by 40 %, and do not change the median. The other configuration has no slow steps."""
    tails = [[by * (3.0 if step % 5 == 4 else 1.0) for step in range(30)] for by in (0.1, 0.1001, 0.0999)]
    steady = [[0.11 * by] * 30 for by in (1.0, 1.001, 0.999)]
    told = compare(tails, steady)
    assert told.ratio == pytest.approx(1.4 / 1.1)
    assert verdicts([told]) == ["slower"]


def test_comparisons_without_a_verdict_do_not_enter_the_correction() -> None:
    one = compare(FAST, SLOW)._replace(p_value=0.03)
    assert verdicts([one, *[one._replace(unit="step")] * 9])[0] == "faster"


def test_p_value_of_one_in_forty_is_no_difference_among_many_pairs() -> None:
    one = compare([[1.00], [1.02], [1.04]], [[1.058], [1.078], [1.098]])
    assert 0.02 < one.p_value < 0.03
    assert verdicts([one]) == ["faster"]
    alike = compare([[1.00], [1.02], [1.04]], [[1.00], [1.02], [1.04]])
    assert verdicts([one, *[alike] * 20])[0] == "no detectable difference"
    assert verdicts([one, *[alike] * 20], level=0.5)[0] == "faster"


def test_pooled_scatter_of_many_pairs_increases_power() -> None:
    """The two configurations of one pair differ by 9 %, and each has three runs. A test of this pair alone, corrected
    for 11 comparisons, does not detect the difference. Ten other pairs have the same scatter between runs. With a
    scatter that is estimated from all pairs, the difference is detected."""
    apart = compare([[1.00], [1.02], [1.04]], [[1.09], [1.11], [1.13]])
    alike = compare([[1.00], [1.02], [1.04]], [[1.00], [1.02], [1.04]])
    assert apart.p_value > 0.05 / 11
    assert verdicts([apart, *[alike] * 10])[0] == "faster"


def test_three_runs_detect_a_clear_difference_among_ten_pairs() -> None:
    assert verdicts([compare(FAST, SLOW)] * 10) == ["faster"] * 10
    ranks = stats.mannwhitneyu([0.100, 0.101, 0.103], [0.200, 0.203, 0.201], method="exact")
    assert ranks.pvalue == pytest.approx(0.1), "the smallest p-value that a rank test can reach"


@pytest.mark.parametrize("name", ["independent, lognormal", "AR(1) 0.5, lognormal"])
def test_coverage_and_false_alarm_rate_of_the_comparison_of_steps(name: str) -> None:
    rng = np.random.default_rng(7)
    one, other = (PROCESSES[name].draw(rng, 600, 500) for _ in range(2))
    told = [ratio_of_steps(*pair) for pair in zip(one, 1.1 * other, strict=True)]
    covered = np.mean([ratio.interval.low <= 1 / 1.1 <= ratio.interval.high for ratio in told if ratio.interval])
    assert 0.93 <= covered <= 0.98
    alarms = np.mean([ratio_of_steps(*pair).p_value <= 0.05 for pair in zip(one, other, strict=True)])
    assert 0.02 <= alarms <= 0.07
