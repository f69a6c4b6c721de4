"""How sure a median is: rank-based intervals, for independent values and for a series in its order.

The harness closes its window by the same interval that the analysis shows.
"""

import functools
import math
import statistics
from collections.abc import Sequence

LEVEL = 0.95
"""Of every interval, unless it says another."""


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the rank-based interval of the median of independent values, or None where no such interval exists.

    The two order statistics nearest to the middle that hold the median with probability `level`, whatever the
    distribution (Hoefler & Belli, SC'15, section 3.1.3). None do below six values at 95 %.
    """
    rank = _rank(len(values), level)
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None


@functools.lru_cache(maxsize=1024)  # two columns and a flag ask for the same one
def series_interval(values: tuple[float, ...], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the rank-based interval of the median of a series in its order, or None where no such interval exists.

    An autocorrelated series tells less than its length says, so the ranks are those of its effective sample size,
    scaled to the series, rounded outwards and never nearer than those of independent values.
    """
    n, effective = len(values), math.floor(effective_size(values))
    scaled = math.floor(_rank(effective, level) * (n + 1) / (effective + 1))
    rank = min(_rank(n, level), scaled)
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def effective_size(values: Sequence[float]) -> float:
    """Return how many independent values tell as much about the median as `values` in their order do.

    n / (1 + 2 Σ ρ), over the autocorrelations of being above or below the median up to the first that is not positive;
    of the signs, since those are what a median averages, so that one outlier changes nothing. A short series hides its
    correlation: the interval above covers, for AR(1) with 0.5, 94 % at 30 values and 95 % at 300; with 0.8, 82 % and
    94 %. Of independent values it covers 95 to 98 %.
    """
    if not values:
        return 0.0
    middle = statistics.median(values)
    signs = [float((value > middle) - (value < middle)) for value in values]
    centre = statistics.fmean(signs)
    signs = [sign - centre for sign in signs]
    variance = sum(sign * sign for sign in signs)
    total, lag = 0.0, 1
    while variance > 0 and lag < len(values):
        correlation = sum(map(float.__mul__, signs[:-lag], signs[lag:])) / variance
        if correlation <= 0:
            break
        total, lag = total + correlation, lag + 1
    return len(values) / (1 + 2 * total)


@functools.cache
def _rank(n: int, level: float) -> int:
    """Return the highest rank r, from 1, with P(fewer than r of n values below the median) ≤ (1 - level) / 2; 0 if
    there is none."""
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + math.comb(n, rank) / 2**n <= (1 - level) / 2:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    return rank
