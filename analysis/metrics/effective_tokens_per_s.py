"""Throughput in tokens over all ranks, encoder and decoder, without padding."""

from analysis.observed import token_rate
from bench.record import RunRecord, Tokens

LABEL, UNIT, BETTER = "tokens per second, without padding", "tokens/s", "more"


def value(record: RunRecord) -> float | None:
    return token_rate(record, _effective)


def _effective(counted: Tokens) -> float:
    return counted.encoder + counted.decoder - counted.encoder_padding - counted.decoder_padding
