"""Median time that a rehearsed rank computes in a step; communication is absent, so it is no step time."""

import statistics

from bench.record import RunRecord

LABEL, UNIT, BETTER = "median compute time per step, rehearsed", "s", "less"


def value(record: RunRecord) -> float | None:
    observed = record.observations
    return statistics.median(observed.compute_s) if observed and observed.compute_s else None
