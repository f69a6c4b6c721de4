"""Median time that a step of the window waited for its batch, on the rank that waited longest."""

import statistics

from analysis.observed import get_window
from bench.record import RunRecord

LABEL, UNIT, BETTER = "median wait for data per step", "s", "less"


def value(record: RunRecord) -> float | None:
    timed = get_window(record)
    return statistics.median(timed.data_wait_s) if timed and timed.data_wait_s else None
