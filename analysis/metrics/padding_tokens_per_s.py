"""Padding that is computed like any other token, over all ranks, of all kinds."""

from analysis.observed import compute_token_rate
from bench.record import RunRecord

LABEL, UNIT, BETTER = "padding tokens per second", "tokens/s", "less"


def value(record: RunRecord) -> float | None:
    return compute_token_rate(record, lambda counted: counted.padding)
