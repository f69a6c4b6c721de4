"""Optimizer steps in the window."""

from analysis.observed import get_window
from bench.record import RunRecord

LABEL, UNIT, BETTER = "steps in the window", "steps", "neither"


def value(record: RunRecord) -> int | None:
    timed = get_window(record)
    return len(timed.step_s) if timed else None
