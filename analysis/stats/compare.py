"""Which of two configurations is faster, among many such pairs: ratio, verdict, and what more repeats could show.

A run's time is the mean of its steps: what they cost, slow ones included.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import scipy.special

from analysis.stats.family import Noise, compute_chance, compute_pair_chance, corrected, equivalent, satterthwaite
from analysis.stats.intervals import Interval
from bench.core.statistics import LEAST, LEVEL, Array, mean_bounds, quantile, student

Runs = Sequence[Sequence[float]]
"""The steps, in their order and in seconds, of each run of one configuration."""


class Ratio(NamedTuple):
    """Time of one side over that of the other, its interval, and the probability of one so far from 1 by chance;
    without an interval that is 1, for nothing can be told."""

    value: float
    interval: Interval | None
    p: float


def ratio_of_runs(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Ratio:
    """Return the ratio of the geometric means of the runs' times, of at least two runs each side.

    Student's test on their logarithms: Welch's, or of the differences where they are `blocked`, the runs of one place
    sharing an allocation. Of three runs a side a rank test finds nothing, whatever they are (p ≥ 0.1), of five nothing
    among ten pairs; `tests/benchmarks/coverage.py` counts the false alarms of both where nothing is normal.
    """
    ours, theirs = (np.log([statistics.fmean(run) for run in runs]) for runs in (one, other))
    gap, n = float(np.mean(ours) - np.mean(theirs)), len(one) + len(other)
    value, sides = float(np.exp(gap)), [ours - theirs] if blocked else [ours, theirs]
    if not any(np.ptp(logs) for logs in sides):  # no spread to test by
        return Ratio(value, Interval(value, value, "between repeats", level, n), float(value == 1))
    shares = [float(logs.var(ddof=1)) / logs.size for logs in sides]
    freedom = satterthwaite(shares, [logs.size - 1 for logs in sides])
    reach = float(student(np.asarray(freedom), level) * np.sqrt(sum(shares)))
    low, high = (float(np.exp(end)) for end in (gap - reach, gap + reach))
    return Ratio(value, Interval(low, high, "between repeats", level, n), compute_chance(gap, shares, freedom))


def ratio_of_steps(one: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of the means of two series of steps: what more steps of the same runs would give.

    The interval joins those of the two sides as independent estimates, each end by itself (MOVER: Donner & Zou,
    Statistical Methods in Medical Research 21, 2012); p is the level at which such an interval ends at 1. There is none
    of fewer than six steps, nor where a side's mean may be as small as zero for all they tell.
    """
    n = len(one) + len(other)
    value = float(np.mean(one) / np.mean(other))
    sides = [_side(np.asarray(steps, float), level) for steps in (one, other) if len(steps) >= LEAST]
    known = [side for side in sides if side]
    if len(known) < 2:
        return Ratio(value, None, 1.0)
    ours, theirs = known
    log_ratio = ours.log - theirs.log
    below = np.hypot(ours.log - ours.low, theirs.high - theirs.log)
    above = np.hypot(ours.high - ours.log, theirs.log - theirs.low)
    low, high = (float(np.exp(end)) for end in (log_ratio - below, log_ratio + above))
    freedom = np.minimum(ours.freedom, theirs.freedom)
    chance = _chance(abs(log_ratio), below if log_ratio > 0 else above, freedom, level)
    return Ratio(value, Interval(low, high, "within the runs", level, n), chance)


class _Side(NamedTuple):
    """Logarithm of a mean step time, with the ends of its interval, and its degrees of freedom."""

    log: float
    low: float
    high: float
    freedom: Array


def _side(steps: Array, level: float) -> _Side | None:
    bounds = mean_bounds(steps, level)
    if bounds.low <= 0:
        return None
    log, low, high = (float(np.log(seconds)) for seconds in (steps.mean(), bounds.low, bounds.high))
    return _Side(log, low, high, bounds.degrees_of_freedom)


def _chance(log_ratio: float, reach: Array, freedom: Array, level: float) -> float:
    """Return the probability of an estimate so far away that an interval of `level` has the length `reach`."""
    if log_ratio == 0 or reach == 0:
        return float(log_ratio == 0)
    return float(2 * scipy.special.stdtr(freedom, -log_ratio * student(freedom, level) / reach))


Unit = Literal["run", "step"]
Verdict = Literal["faster", "slower", "equal within 3 %", "no detectable difference", "too few repeats to tell"]

INTEREST = 0.03
"""The smallest difference of times that anybody would act on. That two sides differ by less is a finding, and takes a
test of its own: that no difference was detected does not show it."""
EQUAL: Final = "equal within 3 %"

LEAST_RUNS = 3
"""Of each side, for runs to be the unit, and for a verdict."""
TOO_FEW: Final = "too few repeats to tell"
"""The verdict on fewer runs: nothing in them says how much other runs of the same configurations would differ."""
NOT_DETECTED: Final = "no detectable difference"
TIES: Final[tuple[Verdict, ...]] = (EQUAL, NOT_DETECTED)
"""What leaves open which of the two is faster."""


class Comparison(NamedTuple):
    """How the time of one configuration compares with that of another.

    Of the unit "run" it holds for other runs as well; of "step" for more steps of the same runs, whose nodes are in it.
    """

    ratio: float  # of times, one over other: below 1 the one is faster
    interval: Interval | None  # of the ratio
    p: float  # of a ratio so far from 1 by chance, for this pair alone
    superiority: float  # probability that a unit of the one is faster than one of the other, a tie counting half
    unit: Unit
    runs: tuple[int, int]  # that it rests on, of the one and of the other
    noises: tuple[Noise, ...] = ()  # of both sides' runs, or of their differences within allocations; by steps none

    @property
    def decides(self) -> bool:
        """Whether there are enough runs for a verdict."""
        return self.unit == "run"

    @property
    def cliffs_delta(self) -> float:
        """The effect size from -1, every unit of the one is slower, to 1, every one is faster."""
        return 2 * self.superiority - 1


def enough(runs: Collection[object]) -> bool:
    """Whether these are enough runs to be the unit of a comparison."""
    return len(runs) >= LEAST_RUNS


def blocks(one: Collection[str], other: Collection[str]) -> list[str]:
    """Return the allocations that two configurations shared, where these are enough to compare within each; else
    none."""
    shared = [name for name in one if name in other]
    return shared if enough(shared) else []


def compare(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Comparison:
    """Compare two configurations, each of at least one run with a step: by their runs from three of each side on, else
    by their steps, all runs of a side in a row.

    `blocked` says that the first run of both shared an allocation, and so the second …: good nodes then help both.
    """
    runs = len(one), len(other)
    if enough(one) and enough(other):
        means, others = ([statistics.fmean(run) for run in runs] for runs in (one, other))
        ratio = ratio_of_runs(one, other, level, blocked=blocked)
        return Comparison(*ratio, superiority(means, others), "run", runs, _noises(means, others, blocked=blocked))
    steps, others = ([step for run in runs for step in run] for runs in (one, other))
    return Comparison(*ratio_of_steps(steps, others, level), superiority(steps, others), "step", runs)


def superiority(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the part of all pairs in which the one has the lower value, ties counting half: Mann–Whitney's U over the
    number of pairs."""
    ours = np.sort(one)
    pairs = np.searchsorted(ours, other, "left") + np.searchsorted(ours, other, "right")  # each counts twice
    return float(pairs.sum()) / (2 * len(one) * len(other))


def verdicts(comparisons: Sequence[Comparison], level: float = LEVEL) -> list[Verdict]:
    """Return what each comparison tells, all of them taken together wrong with a probability of at most 1 - `level`
    (`analysis.stats.family`), whichever pairs were chosen before they were measured.

    So an interval may exclude 1 and yet the verdict be that no difference is detectable: it speaks for its pair alone.
    Where none is detected, two sides may still be shown to differ by less than INTEREST. Comparisons of steps, and of
    too few runs, have an effect and an interval, and no verdict.
    """
    known = [one for one in comparisons if one.decides]
    gaps, own = [math.log(one.ratio) for one in known], [one.p for one in known]
    judged = iter(corrected(gaps, [one.noises for one in known], own))
    equal = iter(are_equal(comparisons, level))
    return [_verdict(one, next(judged), level, equal=next(equal)) if one.decides else TOO_FEW for one in comparisons]


def judge_interval(interval: Interval) -> Verdict:
    """Return what the interval of a ratio tells that holds together with those of all other pairs: a difference where
    it excludes 1, else equality where it lies within INTEREST, as `verdicts` says by tests."""
    if interval.low > 1:
        return "slower"
    if interval.high < 1:
        return "faster"
    return EQUAL if interval.low > 1 / (1 + INTEREST) and interval.high < 1 + INTEREST else NOT_DETECTED


def are_equal(comparisons: Sequence[Comparison], level: float = LEVEL) -> list[bool]:
    """Return of each comparison that decides whether its sides are shown to differ by less than INTEREST."""
    known = [one for one in comparisons if one.decides]
    gaps = [math.log(one.ratio) for one in known]
    return [p <= 1 - level for p in equivalent(gaps, [one.noises for one in known], math.log1p(INTEREST))]


def exceed(comparisons: Sequence[Comparison], limit: float, level: float = LEVEL) -> list[bool]:
    """Return of each comparison whether its ratio is shown to be above 1 + `limit`, all of them taken together: where
    none is, one is called so with a probability of at most 1 - `level`."""
    known = [one for one in comparisons if one.decides]
    gaps = [math.log(one.ratio) - math.log1p(limit) for one in known]
    chances = [compute_pair_chance(gap, one.noises) for gap, one in zip(gaps, known, strict=True)]
    found = iter(corrected(gaps, [one.noises for one in known], chances))
    return [one.decides and next(found) <= 1 - level and one.ratio > 1 + limit for one in comparisons]


def _noises(one: Sequence[float], other: Sequence[float], *, blocked: bool) -> tuple[Noise, ...]:
    logs = np.log(one), np.log(other)
    return tuple(
        Noise(float(np.var(values, ddof=1)), len(values)) for values in ([logs[0] - logs[1]] if blocked else logs)
    )


def _verdict(comparison: Comparison, p: float, level: float, *, equal: bool) -> Verdict:
    if p > 1 - level:
        return EQUAL if equal else NOT_DETECTED
    return "faster" if comparison.ratio < 1 else "slower"


POWER = 0.8
"""How often a difference of the size that is told would be found."""
MOST = 1000  # repeats a side that anybody is told to make


def find_smallest_slowdown(comparison: Comparison, among: int, level: float = LEVEL) -> float | None:
    """Return the smallest slowdown, 0.03 for 3 %, that a comparison among so many would have found four times in five;
    None where too few repeats tell no noise."""
    if not comparison.decides:
        return None
    return math.expm1(_reach(comparison.noises, among, level))


def count_missing_repeats(comparison: Comparison, limit: float, among: int, level: float = LEVEL) -> int:
    """Return how many more repeats a side would find a slowdown of `limit`; where no noise is known, how many more it
    takes to know one."""
    least = min(comparison.runs)
    if not comparison.decides:
        return max(LEAST_RUNS - least, 1)
    wanted, low, high = math.log1p(limit), 0, MOST
    while low < high:
        more = (low + high) // 2
        noises = [one._replace(n=one.n + more) for one in comparison.noises]
        low, high = (low, more) if _reach(noises, among, level) <= wanted else (more + 1, high)
    return low


def _reach(noises: Sequence[Noise], among: int, level: float) -> float:
    """Return the logarithm of the ratio that is found with a probability of POWER, its chance corrected for the number
    of comparisons as for the smallest of them (Bonferroni's bound, where Holm's procedure begins)."""
    error = math.sqrt(sum(one.variance / one.n for one in noises))
    freedom = sum(one.freedom for one in noises)
    return error * (quantile(freedom, 1 - (1 - level) / 2 / among) + quantile(freedom, POWER))
