"""Lower end of the 95 % interval of the median step time, from this run's own steps."""

from analysis.observed import window
from analysis.stats.series import median_interval
from bench.record import RunRecord

LABEL, UNIT, BETTER = "lower end of the median step time's 95 % interval within the run", "s", "less"


def value(record: RunRecord) -> float | None:
    timed = window(record)
    interval = median_interval(timed.step_s) if timed else None
    return interval.low if interval else None
