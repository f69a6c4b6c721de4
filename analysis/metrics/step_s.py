"""Median time of an optimizer step in the window; a step takes as long as its slowest rank."""

import statistics

from analysis.observed import get_window
from bench.record import RunRecord

LABEL, UNIT, BETTER = "median step time", "s", "less"


def value(record: RunRecord) -> float | None:
    timed = get_window(record)
    return statistics.median(timed.step_s) if timed else None
