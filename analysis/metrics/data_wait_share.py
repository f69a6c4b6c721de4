"""Part of the window's steps that was spent waiting for the next batch, on the rank that waited longest.

On a GPU the host waits while the device may still have work, so that some of it can be hidden.
"""

from analysis.observed import get_window
from bench.record import RunRecord

LABEL, UNIT, BETTER = "wait for data, part of the steps' time", "of step time", "less"


def value(record: RunRecord) -> float | None:
    timed = get_window(record)
    return sum(timed.data_wait_s) / sum(timed.step_s) if timed and timed.data_wait_s else None
