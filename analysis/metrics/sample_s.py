"""Time per sample over the whole window, what configurations are ranked by: a mean, so that slow steps count."""

from analysis.observed import compute_steps_per_s
from bench.record import RunRecord

LABEL, UNIT, BETTER = "time per sample, over the whole window", "s", "less"


def value(record: RunRecord) -> float | None:
    rate = compute_steps_per_s(record)
    return None if rate is None else 1 / rate / record.spec.global_batch
