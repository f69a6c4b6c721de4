"""Lower end of the 95 % interval of the median step time, from this run's own steps."""

from analysis.observed import compute_step_interval
from bench.record import RunRecord

LABEL, UNIT, BETTER = "lower end of the median step time's 95 % interval within the run", "s", "less"


def value(record: RunRecord) -> float | None:
    interval = compute_step_interval(record)
    return interval.low if interval else None
