"""Which of two configurations is faster, and whether that can be told at all, among many such pairs."""

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from scipy import stats

from analysis.stats.interval import LEVEL, Interval
from analysis.stats.ratio import Runs, of_runs, of_steps

Unit = Literal["run", "step"]
Verdict = Literal["faster", "slower", "no detectable difference"]

LEAST_RUNS = 3
"""Of each side, for runs to be the unit."""


class Comparison(NamedTuple):
    """How the step time of one configuration compares with that of another.

    Of the unit "run" it holds for other runs as well; of "step" for more steps of the same runs, whose nodes are in it.
    """

    ratio: float  # of step times, one over other: below 1 the one is faster
    interval: Interval | None  # of the ratio
    p: float  # of a ratio so far from 1 by chance, for this pair alone
    superiority: float  # probability that a unit of the one is faster than one of the other, a tie counting half
    unit: Unit

    @property
    def cliffs_delta(self) -> float:
        """The effect size from -1, every unit of the one is slower, to 1, every one is faster."""
        return 2 * self.superiority - 1


def compare(one: Runs, other: Runs, level: float = LEVEL, *, blocked: bool = False) -> Comparison:
    """Compare two configurations, each of at least one run with a step: by their runs from three of each side on, else
    by their steps, all runs of a side in a row.

    `blocked` says that the first run of both shared an allocation, and so the second …: good nodes then help both.
    """
    if min(len(one), len(other)) >= LEAST_RUNS:
        medians, others = ([statistics.median(run) for run in runs] for runs in (one, other))
        return Comparison(*of_runs(one, other, level, blocked=blocked), superiority(medians, others), "run")
    steps, others = ([step for run in runs for step in run] for runs in (one, other))
    return Comparison(*of_steps(steps, others, level), superiority(steps, others), "step")


def superiority(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the part of all pairs in which the one has the lower value, ties counting half: Mann–Whitney's U over the
    number of pairs."""
    ranks = stats.rankdata([*other, *one])[: len(other)]
    return float(ranks.sum() - len(other) * (len(other) + 1) / 2) / (len(one) * len(other))


def verdicts(comparisons: Sequence[Comparison], level: float = LEVEL) -> list[Verdict]:
    """Return what each comparison tells, all of them taken together wrong with a probability of at most 1 - `level`.

    So an interval may exclude 1 and yet the verdict be that no difference is detectable: it speaks for its pair alone.
    """
    corrected = holm([comparison.p for comparison in comparisons])
    return [
        "no detectable difference" if p > 1 - level else "faster" if comparison.ratio < 1 else "slower"
        for comparison, p in zip(comparisons, corrected, strict=True)
    ]


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: the k-th smallest of m times m - k + 1, never below a smaller one's
    (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    corrected, least = [1.0] * len(chances), 0.0
    for done, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        least = max(least, min(1.0, (len(chances) - done) * chances[index]))
        corrected[index] = least
    return corrected
