"""Throughput in tokens over all ranks, of all kinds, without padding."""

from analysis.observed import compute_token_rate
from bench.record import RunRecord

LABEL, UNIT, BETTER = "tokens per second, without padding", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    return compute_token_rate(record, lambda counted: counted.all - counted.padding)
