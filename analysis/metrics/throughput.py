"""Samples and tokens per second, over all ranks."""

from analysis.metrics import Metric
from analysis.observed import compute_rate_interval, compute_steps_per_s, compute_token_rate, remember_latest
from analysis.stats.intervals import Interval
from bench.core.record import RunRecord


def compute_sample_s(record: RunRecord) -> float | None:
    """Time per sample over the whole window, what configurations are ranked by: a mean, so that slow steps count."""
    rate = compute_steps_per_s(record)
    return None if rate is None else 1 / rate / record.spec.global_batch


def compute_samples_per_s(record: RunRecord) -> float | None:
    """Throughput in samples over all ranks: samples of the window divided by its time."""
    rate = compute_steps_per_s(record)
    return None if rate is None else rate * record.spec.global_batch


@remember_latest
def compute_tokens_per_s(record: RunRecord) -> float | None:
    """Throughput in tokens over all ranks, of all kinds, padding included."""
    return compute_token_rate(record, lambda counted: counted.all)


@remember_latest
def _compute_tokens_interval(record: RunRecord) -> Interval | None:
    return compute_rate_interval(record, compute_tokens_per_s(record))


def compute_tokens_per_s_low(record: RunRecord) -> float | None:
    """Lower end of the 95 % interval of the throughput, from this run's own steps."""
    interval = _compute_tokens_interval(record)
    return interval.low if interval else None


def compute_tokens_per_s_high(record: RunRecord) -> float | None:
    """Upper end of the 95 % interval of the throughput, from this run's own steps."""
    interval = _compute_tokens_interval(record)
    return interval.high if interval else None


def compute_encoder_tokens_per_s(record: RunRecord) -> float | None:
    """Throughput in tokens of the encoder over all ranks, padding included; missing where a sample has none."""
    return compute_token_rate(record, lambda counted: counted.of("encoder"))


def compute_decoder_tokens_per_s(record: RunRecord) -> float | None:
    """Throughput in tokens of the decoder over all ranks, padding included; missing where a sample has none."""
    return compute_token_rate(record, lambda counted: counted.of("decoder"))


def compute_effective_tokens_per_s(record: RunRecord) -> float | None:
    """Throughput in tokens over all ranks, of all kinds, without padding."""
    return compute_token_rate(record, lambda counted: counted.all - counted.padding)


def compute_padding_tokens_per_s(record: RunRecord) -> float | None:
    """Padding that is computed like any other token, over all ranks, of all kinds."""
    return compute_token_rate(record, lambda counted: counted.padding)


METRICS = (
    Metric("sample_s", "time per sample, over the whole window", "s", "less", compute_sample_s),
    Metric("samples_per_s", "samples per second", "samples/s", "more", compute_samples_per_s),
    Metric("tokens_per_s", "tokens per second, padding included", "tokens/s", "more", compute_tokens_per_s),
    Metric(
        "tokens_per_s_low",
        "lower end of tokens_per_s's 95 % interval within the run",
        "tokens/s",
        "more",
        compute_tokens_per_s_low,
    ),
    Metric(
        "tokens_per_s_high",
        "upper end of tokens_per_s's 95 % interval within the run",
        "tokens/s",
        "more",
        compute_tokens_per_s_high,
    ),
    Metric(
        "encoder_tokens_per_s",
        "encoder tokens per second, padding included",
        "tokens/s",
        "more",
        compute_encoder_tokens_per_s,
    ),
    Metric(
        "decoder_tokens_per_s",
        "decoder tokens per second, padding included",
        "tokens/s",
        "more",
        compute_decoder_tokens_per_s,
    ),
    Metric(
        "effective_tokens_per_s",
        "tokens per second, without padding",
        "tokens/s",
        "more",
        compute_effective_tokens_per_s,
    ),
    Metric("padding_tokens_per_s", "padding tokens per second", "tokens/s", "less", compute_padding_tokens_per_s),
)
