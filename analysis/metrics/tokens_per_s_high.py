"""Upper end of the 95 % interval of the throughput, from this run's own steps."""

from analysis.metrics import tokens_per_s
from analysis.observed import window
from analysis.stats.series import rate_interval
from bench.record import RunRecord

LABEL, UNIT, BETTER = "upper end of tokens_per_s's 95 % interval within the run", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    timed, rate = window(record), tokens_per_s.value(record)
    interval = rate_interval(timed.step_s, rate) if timed and rate is not None else None
    return interval.high if interval else None
