"""The longest step of the window."""

from analysis.observed import compute_step_quantile
from bench.record import RunRecord

LABEL, UNIT, BETTER = "longest step of the window", "s", "less"


def value(record: RunRecord) -> float | None:
    return compute_step_quantile(record, 1)
