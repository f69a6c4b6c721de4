"""Step time that one step in twenty of the window exceeds."""

from analysis.observed import step_quantile
from bench.record import RunRecord

LABEL, UNIT, BETTER = "step time, 95th percentile of the window", "s", "less"


def value(record: RunRecord) -> float | None:
    return step_quantile(record, 0.95)
