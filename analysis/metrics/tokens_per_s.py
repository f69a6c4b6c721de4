"""Throughput in tokens over all ranks, encoder and decoder, padding included."""

from analysis.observed import steps_per_s, tokens
from bench.record import RunRecord

LABEL, UNIT, BETTER = "tokens per second, padding included", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    rate, counted = steps_per_s(record), tokens(record)
    return None if rate is None or counted is None else rate * (counted.encoder + counted.decoder)
