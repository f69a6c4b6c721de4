"""Step time that one step in twenty of the window exceeds."""

from analysis.observed import compute_step_quantile
from bench.record import RunRecord

LABEL, UNIT, BETTER = "step time, 95th percentile of the window", "s", "less"


def value(record: RunRecord) -> float | None:
    return compute_step_quantile(record, 0.95)
