"""Lower end of the 95 % rank-based interval of the median step time, from this run's own steps."""

from analysis.observed import window
from bench.intervals import series_interval
from bench.record import RunRecord

LABEL, UNIT, BETTER = "lower end of the median step time's 95 % interval within the run", "s", "less"


def value(record: RunRecord) -> float | None:
    timed = window(record)
    interval = series_interval(timed.step_s) if timed else None
    return interval[0] if interval else None
