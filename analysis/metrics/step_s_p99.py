"""Step time that one step in a hundred of the window exceeds; of fewer than a hundred, nearly the longest."""

from analysis.observed import compute_step_quantile
from bench.record import RunRecord

LABEL, UNIT, BETTER = "step time, 99th percentile of the window", "s", "less"


def value(record: RunRecord) -> float | None:
    return compute_step_quantile(record, 0.99)
