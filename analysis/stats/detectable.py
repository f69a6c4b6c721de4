"""What repeats could have shown: the smallest difference that they would have found, and how many more find a smaller.

From the noise that was measured, as if the next repeats had the same.
"""

import math
from collections.abc import Sequence

from analysis.stats.compare import LEAST_RUNS, Comparison
from analysis.stats.family import Noise
from bench.statistics import LEVEL, quantile

POWER = 0.8
"""How often a difference of the size that is told would be found."""
MOST = 1000  # repeats a side that anybody is told to make


def smallest(comparison: Comparison, among: int, level: float = LEVEL) -> float | None:
    """Return the smallest slowdown, 0.03 for 3 %, that a comparison among so many would have found four times in five;
    None where too few repeats tell no noise."""
    if not comparison.decides:
        return None
    return math.expm1(_reach(comparison.noises, among, level))


def missing(comparison: Comparison, limit: float, among: int, level: float = LEVEL) -> int:
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
