"""Lower end of the 95 % interval of the throughput, from this run's own steps."""

from analysis.metrics import tokens_per_s
from analysis.observed import compute_rate_interval
from bench.record import RunRecord

LABEL, UNIT, BETTER = "lower end of tokens_per_s's 95 % interval within the run", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    interval = compute_rate_interval(record, tokens_per_s.value(record))
    return interval.low if interval else None
