"""Which of two configurations is faster, and whether that can be told at all, among many such pairs."""

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from analysis.stats.family import Noise, compute_pair_chance, corrected, equivalent
from analysis.stats.interval import Interval
from analysis.stats.ratio import Runs, of_runs, of_steps
from bench.statistics import LEVEL

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
        ratio = of_runs(one, other, level, blocked=blocked)
        return Comparison(*ratio, superiority(means, others), "run", runs, _noises(means, others, blocked=blocked))
    steps, others = ([step for run in runs for step in run] for runs in (one, other))
    return Comparison(*of_steps(steps, others, level), superiority(steps, others), "step", runs)


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
