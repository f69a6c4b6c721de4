"""What a configuration's time scatters by, level by level, and what to buy next for an interval of an asked width.

Runs differ from nodes to nodes, between runs on the same nodes, and within a run from stretch to stretch of its window;
the levels are nested, and their variances are estimated by the method of moments, as Kalibera & Jones do (Rigorous
Benchmarking in Reasonable Time, ISMM 2013). All on logarithms of times.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from bench.statistics import LEVEL, quantile

MOST = 1000  # allocations that anybody is told to make

Purchase = Literal["enough", "allocations", "longer windows", "other nodes"]


class LevelRun(NamedTuple):
    """One allocation: where it ran, the logarithm of its mean time, and the variance of that from within its window."""

    hosts: tuple[str, ...]  # empty where nobody knows
    log: float
    within: float


class LevelVariances(NamedTuple):
    """Variances of the time of one allocation by level; `hosts` None where all ran on the same, or nobody knows."""

    hosts: float | None
    runs: float
    within: float
    host_sets: int  # 0 where nobody knows
    n: int

    @property
    def total(self) -> float:
        return (self.hosts or 0.0) + self.runs + self.within


class RepeatAdvice(NamedTuple):
    """What brings an interval to an asked width: so many more allocations, or windows so many times as long."""

    purchase: Purchase
    amount: float
    width: float  # of the interval as it is, relative


def find_variances(runs: Sequence[LevelRun]) -> LevelVariances | None:
    """Return the variances of at least two allocations by level; None below two."""
    if len(runs) < 2:
        return None
    within = float(np.mean([one.within for one in runs]))
    groups: dict[tuple[str, ...], list[float]] = {}
    for one in runs:
        groups.setdefault(one.hosts, []).append(one.log)
    logs, n = [np.array(one) for one in groups.values()], len(runs)
    known = () not in groups
    if not known or len(groups) in (1, n):  # one level cannot be told from the other
        spread = float(np.var([one.log for one in runs], ddof=1))
        return LevelVariances(None, max(spread - within, 0.0), within, len(groups) if known else 0, n)
    sizes = np.array([one.size for one in logs])
    same = sum(float(((one - one.mean()) ** 2).sum()) for one in logs) / (n - len(logs))
    whole = float(np.mean([one.log for one in runs]))
    apart = float((sizes * (np.array([one.mean() for one in logs]) - whole) ** 2).sum()) / (len(logs) - 1)
    usual = (n - float((sizes**2).sum()) / n) / (len(logs) - 1)
    hosts = max((apart - same) / usual, 0.0)
    return LevelVariances(hosts, max(same - within, 0.0), within, len(groups), n)


def advise(found: LevelVariances, width: float, level: float = LEVEL) -> RepeatAdvice:
    """Return what brings the interval between allocations to `width`, 0.02 for 2 % from end to end, for the least time.

    Longer windows take out what is within a run alone, and no more than that. Where the nodes differ by most of it and
    few sets of them were used, more allocations on the same ones do not: they have to be others.
    """
    now, wanted = _width(found.total, found.n, level), math.log1p(width)
    if now <= wanted:
        return RepeatAdvice("enough", 0, math.expm1(now))
    allocations = next((more for more in range(1, MOST) if _width(found.total, found.n + more, level) <= wanted), MOST)
    least = (wanted / (2 * quantile(found.n - 1, (1 + level) / 2))) ** 2 * found.n - found.total + found.within
    longer = found.within / least if least > 0 else math.inf
    if longer - 1 < allocations / found.n:
        return RepeatAdvice("longer windows", math.ceil(10 * longer) / 10, math.expm1(now))
    if found.hosts is not None and found.hosts > found.runs + found.within and found.host_sets < found.n:
        return RepeatAdvice("other nodes", allocations, math.expm1(now))
    return RepeatAdvice("allocations", allocations, math.expm1(now))


def _width(variance: float, n: int, level: float) -> float:
    """Return the width of the interval of a mean over so many allocations."""
    return 2 * quantile(n - 1, (1 + level) / 2) * math.sqrt(variance / n)
