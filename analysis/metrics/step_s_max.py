"""The longest step of the window."""

from analysis.observed import step_quantile
from bench.record import RunRecord

LABEL, UNIT, BETTER = "longest step of the window", "s", "less"


def value(record: RunRecord) -> float | None:
    return step_quantile(record, 1)
