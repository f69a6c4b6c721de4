"""Ratio of two configurations' times, verdicts on many such ratios, and the number of repeats that a verdict needs.

The time of a run is the mean of its step times, slow steps included, because users pay for slow steps too.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import scipy.special

from analysis.stats.family import (
    Noise,
    compute_equivalence,
    compute_noise,
    compute_p_value,
    compute_pair_p_value,
    correct_p_values,
    satterthwaite,
)
from analysis.stats.intervals import Interval
from bench.core import quantities
from bench.core.statistics import LEAST, LEVEL, Array, mean_bounds, quantile, student

Runs = Sequence[Sequence[float]]
"""Step times in seconds, in order, of each run of one configuration."""
Unit = Literal["run", "step"]
Verdict = Literal["faster", "slower", "equal within 3 %", "no detectable difference", "too few repeats to tell"]

INTEREST = 0.03
"""The smallest relevant relative difference of times, 3 %. Configurations are called equal only if a separate test
shows that their difference is smaller, since an undetected difference may still be larger."""
LEAST_RUNS = quantities.LEAST_RUNS
"""Smallest number of runs on each side for a verdict."""
EQUAL: Final = "equal within 3 %"
TOO_FEW: Final = "too few repeats to tell"
"""The verdict if a configuration has too few runs to estimate how much its runs usually differ."""
NOT_DETECTED: Final = "no detectable difference"
TIES: Final[tuple[Verdict, ...]] = (EQUAL, NOT_DETECTED)
"""Verdicts that do not decide which of two configurations is faster."""
POWER = 0.8
"""Probability of detecting a difference of the reported size; 80 % is the usual convention."""
MOST = 1000
"""Largest number of additional repeats that is reported as needed."""


class Ratio(NamedTuple):
    """Time of one configuration divided by the time of another, with its interval and p-value. If the interval is None,
    the p-value is 1."""

    value: float
    interval: Interval | None
    p_value: float


def ratio_of_runs(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Ratio:
    """Return the ratio of the geometric means of the runs' times. Each side needs at least two runs.

    The p-value comes from a t-test on the logarithms of the times. It is Welch's test or, if `blocked`, the paired
    test, in which run i of both sides shares an allocation.

    A rank test would detect nothing with three runs per side (p ≥ 0.1). With five runs per side, it would detect
    nothing after correction for ten pairs. `tests/benchmarks/coverage.py` counts the false alarms of the rank test and
    the t-test for noise that is not normal.
    """
    ours, theirs = (np.log([statistics.fmean(run) for run in runs]) for runs in (one, other))
    gap, n = float(np.mean(ours) - np.mean(theirs)), len(one) + len(other)
    value, sides = float(np.exp(gap)), [ours - theirs] if blocked else [ours, theirs]
    if not any(np.ptp(logs) for logs in sides):  # identical repeats have zero variance, so no test is possible
        return Ratio(value, Interval(value, value, "between repeats", level, n), float(value == 1))
    shares = [float(logs.var(ddof=1)) / logs.size for logs in sides]
    degrees_of_freedom = satterthwaite(shares, [logs.size - 1 for logs in sides])
    margin = float(student(np.asarray(degrees_of_freedom), level) * np.sqrt(sum(shares)))
    low, high = (float(np.exp(end)) for end in (gap - margin, gap + margin))
    interval = Interval(low, high, "between repeats", level, n)
    return Ratio(value, interval, compute_p_value(gap, shares, degrees_of_freedom))


class _Side(NamedTuple):
    """One side of a comparison: the logarithm of its mean step time, the ends of the confidence interval of this
    logarithm, and the degrees of freedom."""

    log: float
    low: float
    high: float
    degrees_of_freedom: Array


def ratio_of_steps(one: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of the mean step times of two series of steps. The interval of the ratio holds for further steps
    of the same runs, but not for further runs.

    Each end of the interval is computed from the intervals of both means. The two means count as independent estimates
    (MOVER: Donner & Zou, Statistical Methods in Medical Research 21, 2012). The p-value belongs to the null hypothesis
    that the ratio is 1. The p-value is below 1 - `level` exactly if the interval excludes 1. There is no interval if
    one of the two series has fewer than six steps, or if the interval of one of the means reaches zero.
    """
    n = len(one) + len(other)
    value = float(np.mean(one) / np.mean(other))
    sides = [_build_side(np.asarray(steps, float), level) for steps in (one, other) if len(steps) >= LEAST]
    known = [side for side in sides if side]
    if len(known) < 2:
        return Ratio(value, None, 1.0)
    ours, theirs = known
    log_ratio = ours.log - theirs.log
    # MOVER: each end of the ratio combines the distances to opposite ends of the two sides
    below = np.hypot(ours.log - ours.low, theirs.high - theirs.log)
    above = np.hypot(ours.high - ours.log, theirs.log - theirs.low)
    low, high = (float(np.exp(end)) for end in (log_ratio - below, log_ratio + above))
    degrees_of_freedom = np.minimum(ours.degrees_of_freedom, theirs.degrees_of_freedom)
    margin = below if log_ratio > 0 else above
    if log_ratio == 0 or margin == 0:
        p_value = float(log_ratio == 0)
    else:  # the standard error is the margin divided by its quantile
        t = abs(log_ratio) * student(degrees_of_freedom, level) / margin
        p_value = float(2 * scipy.special.stdtr(degrees_of_freedom, -t))
    return Ratio(value, Interval(low, high, "within the runs", level, n), p_value)


def _build_side(steps: Array, level: float) -> _Side | None:
    bounds = mean_bounds(steps, level)
    if bounds.low <= 0:
        return None
    log, low, high = (float(np.log(seconds)) for seconds in (steps.mean(), bounds.low, bounds.high))
    return _Side(log, low, high, bounds.degrees_of_freedom)


class Comparison(NamedTuple):
    """Comparison of the times of two configurations, `one` and `other`.

    If `unit` is "run", the mean times of runs were compared. The result then also holds for further runs. If `unit` is
    "step", the times of single steps were compared. The result then holds only for further steps of the same runs. In
    this case, a difference between the nodes of the runs may look like a difference between the configurations.
    """

    ratio: float  # time of `one` divided by time of `other`; below 1, `one` is faster
    interval: Interval | None  # of the ratio
    p_value: float  # that the ratio is 1, for this pair alone
    superiority: float  # share of pairs in which a run (or step) of `one` is faster than that of `other`; ties: half
    unit: Unit
    runs: tuple[int, int]  # number of compared runs of `one` and of `other`
    # of the runs of each side, or of their differences within allocations; empty for steps
    noises: tuple[Noise, ...] = ()

    @property
    def decides(self) -> bool:
        """Return True if there are enough runs for a verdict."""
        return self.unit == "run"

    @property
    def cliffs_delta(self) -> float:
        """Cliff's delta, an effect size. The value is 1 if every run (or step) of `one` is faster than every run (or
        step) of `other`, and -1 if every run (or step) of `one` is slower."""
        return 2 * self.superiority - 1


def enough(runs: Collection[object]) -> bool:
    """Return True if the number of runs is enough for a verdict."""
    return len(runs) >= LEAST_RUNS


def blocks(one: Collection[str], other: Collection[str]) -> list[str]:
    """Return the allocations (scheduler jobs) that two configurations share. Empty if these are too few for a
    comparison within allocations, or fewer than half of those of a configuration. Such a comparison leaves out all
    others."""
    shared = [name for name in one if name in other]
    return shared if enough(shared) and 2 * len(shared) >= max(len(one), len(other)) else []


def compare(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Comparison:
    """Compare two configurations. Each has at least one run of at least one step.

    If both sides have enough runs, the means of the runs are compared. Otherwise the steps are compared, after the
    steps of all runs of a side are joined. Set `blocked` if run i of one side and run i of the other were measured
    in the same allocation. Such runs are compared in pairs, so that good nodes favour neither side.
    """
    runs = len(one), len(other)
    if enough(one) and enough(other):
        means, others = ([statistics.fmean(run) for run in runs] for runs in (one, other))
        ratio = ratio_of_runs(one, other, level, blocked=blocked)
        logs = np.log(means), np.log(others)
        noises = tuple(map(compute_noise, [logs[0] - logs[1]] if blocked else logs))
        return Comparison(*ratio, superiority(means, others), "run", runs, noises)
    steps, others = ([step for run in runs for step in run] for runs in (one, other))
    return Comparison(*ratio_of_steps(steps, others, level), superiority(steps, others), "step", runs)


def superiority(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the fraction of pairs (a value of `one`, a value of `other`) in which `one` is lower. Ties count half.

    This is the Mann-Whitney statistic U divided by the number of pairs.
    """
    ours = np.sort(one)
    pairs = np.searchsorted(ours, other, "left") + np.searchsorted(ours, other, "right")  # each pair counts twice
    return float(pairs.sum()) / (2 * len(one) * len(other))


def verdicts(comparisons: Sequence[Comparison], level: float = LEVEL) -> list[Verdict]:
    """Return the verdict on each comparison. The compared pairs must have been chosen before they were measured.

    The probability that any verdict of the set is wrong is at most 1 - `level` (`analysis.stats.family`). In contrast,
    the interval of a comparison is not corrected and holds for its pair alone. So an interval may exclude 1 although
    the verdict is that no difference is detected.

    If no difference is detected, a second test may show that the two configurations differ by less than the fraction
    INTEREST; the verdict is then that they are equal. If there are too few runs, single steps were compared. Such a
    comparison has a ratio and an interval, but the verdict is that there are too few repeats.
    """
    known = [one for one in comparisons if one.decides]
    gaps, own = [math.log(one.ratio) for one in known], [one.p_value for one in known]
    corrected = iter(correct_p_values(gaps, [one.noises for one in known], own))
    found: list[Verdict] = []
    for one, equal in zip(comparisons, are_equal(comparisons, level), strict=True):
        if not one.decides:
            found.append(TOO_FEW)
        elif next(corrected) <= 1 - level:
            found.append("faster" if one.ratio < 1 else "slower")
        else:
            found.append(EQUAL if equal else NOT_DETECTED)
    return found


def judge_interval(interval: Interval) -> Verdict:
    """Return the verdict from the interval of a ratio. The intervals of all judged pairs must hold simultaneously.

    Two sides differ if the interval excludes 1. They are equal if the interval contains 1 and lies between
    1 / (1 + INTEREST) and 1 + INTEREST.
    """
    if interval.low > 1:
        return "slower"
    if interval.high < 1:
        return "faster"
    return EQUAL if interval.low > 1 / (1 + INTEREST) and interval.high < 1 + INTEREST else NOT_DETECTED


def are_equal(comparisons: Sequence[Comparison], level: float = LEVEL) -> list[bool]:
    """Return for each comparison True if its two configurations are shown to differ by less than the fraction
    INTEREST."""
    known = [one for one in comparisons if one.decides]
    gaps = [math.log(one.ratio) for one in known]
    p_values = iter(compute_equivalence(gaps, [one.noises for one in known], math.log1p(INTEREST)))
    return [one.decides and next(p_values) <= 1 - level for one in comparisons]


def exceed(comparisons: Sequence[Comparison], limit: float, level: float = LEVEL) -> list[bool]:
    """Return for each comparison True if its ratio is shown to be above 1 + `limit`.

    If no true ratio is above this limit, the probability that any result is True is at most 1 - `level`.
    """
    known = [one for one in comparisons if one.decides]
    gaps = [math.log(one.ratio) - math.log1p(limit) for one in known]
    own = [compute_pair_p_value(gap, one.noises) for gap, one in zip(gaps, known, strict=True)]
    corrected = iter(correct_p_values(gaps, [one.noises for one in known], own))
    return [one.decides and next(corrected) <= 1 - level and one.ratio > 1 + limit for one in comparisons]


def find_smallest_slowdown(comparison: Comparison, among: int, level: float = LEVEL) -> float | None:
    """Return the smallest true slowdown (0.03 for 3 %) that this comparison would detect with probability POWER; None
    if there are too few repeats to estimate the noise.

    `among` is the number of comparisons for which the verdict is corrected.
    """
    if not comparison.decides:
        return None
    return math.expm1(_compute_detectable(comparison.noises, among, level))


def count_missing_repeats(comparison: Comparison, limit: float, among: int, level: float = LEVEL) -> int:
    """Return the number of additional repeats of each of the two configurations that would detect a slowdown of
    `limit`; at most MOST.

    If there are too few repeats to estimate the noise, return the number of additional repeats that this estimate
    needs. `among` is the number of comparisons for which verdicts are corrected.
    """
    least = min(comparison.runs)
    if not comparison.decides:
        return max(LEAST_RUNS - least, 1)
    wanted, low, high = math.log1p(limit), 0, MOST
    while low < high:
        more = (low + high) // 2
        noises = [one._replace(n=one.n + more) for one in comparison.noises]
        low, high = (low, more) if _compute_detectable(noises, among, level) <= wanted else (more + 1, high)
    return low


def _compute_detectable(noises: Sequence[Noise], among: int, level: float) -> float:
    """Return the logarithm of the smallest true ratio that is detected with probability POWER.

    The correction for several comparisons multiplies the p-value by their number `among`. Holm's procedure does the
    same with the smallest p-value (Bonferroni's bound). The degrees of freedom are the lower of both sides, because a
    verdict uses the strictest of its tests.
    """
    error = math.sqrt(sum(one.variance / one.n for one in noises))
    degrees_of_freedom = min(one.degrees_of_freedom for one in noises)
    return error * (quantile(degrees_of_freedom, 1 - (1 - level) / 2 / among) + quantile(degrees_of_freedom, POWER))
