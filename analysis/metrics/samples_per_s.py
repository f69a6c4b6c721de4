"""Throughput in samples over all ranks: samples of the window divided by its time."""

from analysis.observed import compute_steps_per_s
from bench.record import RunRecord

LABEL, UNIT, BETTER = "samples per second", "samples/s", "more"


def value(record: RunRecord) -> float | None:
    rate = compute_steps_per_s(record)
    return None if rate is None else rate * record.spec.global_batch
