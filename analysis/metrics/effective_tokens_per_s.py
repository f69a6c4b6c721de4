"""Throughput in tokens over all ranks, encoder and decoder, without padding."""

from analysis.observed import steps_per_s, tokens
from bench.record import RunRecord

LABEL, UNIT, BETTER = "tokens per second, without padding", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    rate, counted = steps_per_s(record), tokens(record)
    if rate is None or counted is None:
        return None
    return rate * (counted.encoder + counted.decoder - counted.encoder_padding - counted.decoder_padding)
