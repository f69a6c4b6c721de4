"""Straggling: the slowest rank's own time in a step, outside its collectives, over the median rank's."""

import statistics

from analysis.observed import list_own_seconds
from bench.record import RunRecord

LABEL, UNIT, BETTER = "slowest rank over median rank, outside collectives", "ratio", "less"


def value(record: RunRecord) -> float | None:
    ranks = list_own_seconds(record)
    if len(ranks) < 2 or statistics.median(ranks) <= 0:
        return None
    return max(ranks) / statistics.median(ranks)
