"""Who holds the others up: the rules, for those who read runs and those who decide where the next one may start."""

import statistics
from bisect import bisect_left
from collections.abc import Sequence

_SLOWER, _LATER_S = 1.2, 0.02  # below 20 ms the operating system alone makes ranks differ
_SLOW_LINK = 0.5


def find_slow_ranks(outside_s: Sequence[float], parts: int = 1) -> list[int]:
    """Return the ranks whose own time in a step, outside its collectives, exceeds the others' median (the larger of two
    middle ones) by more than 20 % and by more than 20 ms. Others are those with the same of so many `parts` of the
    layers, which stand next to each other: another part is other work."""
    alike = len(outside_s) // parts or 1
    firsts = range(0, len(outside_s), alike)
    return [first + rank for first in firsts for rank in _find_slow_alike(outside_s[first : first + alike])]


def compare_to_alike(values: Sequence[float], parts: int = 1) -> list[tuple[float, float]]:
    """Return each rank's value with the median of the ranks that have the same of so many `parts` of the layers."""
    alike = len(values) // parts or 1
    medians = [statistics.median(values[first : first + alike]) for first in range(0, len(values), alike)]
    return [(own, medians[rank // alike]) for rank, own in enumerate(values)]


def _find_slow_alike(outside_s: Sequence[float]) -> list[int]:
    ordered, middle = sorted(outside_s), (len(outside_s) - 1) // 2
    found = []
    for rank, own in enumerate(outside_s if len(ordered) > 1 else ()):
        usual = ordered[middle + (bisect_left(ordered, own) <= middle)]  # the middle of all without this one
        if own > _SLOWER * usual and own > usual + _LATER_S:
            found.append(rank)
    return found


def find_slow_links(nodes_bytes_per_s: Sequence[float | None]) -> list[int]:
    """Return the nodes whose bandwidth is below half of the median; a node whose bandwidth is unknown is not judged."""
    known = [rate for rate in nodes_bytes_per_s if rate is not None]
    if not known:
        return []
    limit = _SLOW_LINK * statistics.median(known)
    return [node for node, rate in enumerate(nodes_bytes_per_s) if rate is not None and rate < limit]
