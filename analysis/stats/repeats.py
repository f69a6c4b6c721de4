"""How sure the median of independent repeats is."""

from collections.abc import Sequence

from analysis.stats.interval import Interval
from bench import statistics
from bench.statistics import LEVEL


def median_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the rank-based interval of the median of independent repeats (Hoefler & Belli, SC'15, section 3.1.3).

    Where so few repeats have none of that level, their range with the level that it has, 1 - 2^(1 - n); None below two.
    """
    n = len(values)
    if n < 2:
        return None
    if ends := statistics.median_interval(values, level):
        return Interval(*ends, "between repeats", level, n)
    return Interval(min(values), max(values), "range of repeats", 1 - 2 ** (1 - n), n)
