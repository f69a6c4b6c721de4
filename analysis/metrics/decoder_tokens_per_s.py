"""Throughput in tokens of the decoder over all ranks, padding included; missing where a sample has none."""

from analysis.observed import compute_token_rate
from bench.record import RunRecord

LABEL, UNIT, BETTER = "decoder tokens per second, padding included", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    return compute_token_rate(record, lambda counted: counted.of("decoder"))
