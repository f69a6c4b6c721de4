"""Samples, tokens and FLOPs per second over the whole window, and FLOPs utilisation."""

from analysis.metrics import Metric
from analysis.observed import (
    compute_rate_interval,
    compute_steps_per_s,
    compute_tflops_per_device,
    compute_token_rate,
    compute_utilisation,
    remember_latest,
)
from analysis.stats.intervals import Interval
from bench.core.record import RunRecord


def compute_sample_s(record: RunRecord) -> float | None:
    """Return the time per sample, which ranks configurations. It is a mean over the window, so slow steps count."""
    rate = compute_steps_per_s(record)
    return None if rate is None else 1 / rate / record.spec.global_batch


def compute_samples_per_s(record: RunRecord) -> float | None:
    """Return the samples of the window divided by its time, over all ranks."""
    rate = compute_steps_per_s(record)
    return None if rate is None else rate * record.spec.global_batch


@remember_latest
def compute_tokens_per_s(record: RunRecord) -> float | None:
    """Return tokens per second over all ranks: tokens of all kinds, padding included."""
    return compute_token_rate(record, lambda counted: counted.all)


@remember_latest  # both ends of it are columns
def _compute_tokens_interval(record: RunRecord) -> Interval | None:
    return compute_rate_interval(record, compute_tokens_per_s(record))


METRICS = (
    Metric("sample_s", "time per sample, over the whole window", "s", "less", compute_sample_s),
    Metric("samples_per_s", "samples per second", "samples/s", "more", compute_samples_per_s),
    Metric("tokens_per_s", "tokens per second, padding included", "tokens/s", "more", compute_tokens_per_s),
    Metric(
        "tokens_per_s_low",
        "lower end of tokens_per_s's 95 % interval within the run",
        "tokens/s",
        "more",
        lambda record: getattr(_compute_tokens_interval(record), "low", None),
    ),
    Metric(
        "tokens_per_s_high",
        "upper end of tokens_per_s's 95 % interval within the run",
        "tokens/s",
        "more",
        lambda record: getattr(_compute_tokens_interval(record), "high", None),
    ),
    Metric(
        "encoder_tokens_per_s",  # missing where a sample has no such tokens
        "encoder tokens per second, padding included",
        "tokens/s",
        "more",
        lambda record: compute_token_rate(record, lambda counted: counted.of("encoder")),
    ),
    Metric(
        "decoder_tokens_per_s",
        "decoder tokens per second, padding included",
        "tokens/s",
        "more",
        lambda record: compute_token_rate(record, lambda counted: counted.of("decoder")),
    ),
    Metric(
        "effective_tokens_per_s",
        "tokens per second, without padding",
        "tokens/s",
        "more",
        lambda record: compute_token_rate(record, lambda counted: counted.all - counted.padding),
    ),
    Metric(
        "padding_tokens_per_s",  # padding is computed like any other token
        "padding tokens per second",
        "tokens/s",
        "less",
        lambda record: compute_token_rate(record, lambda counted: counted.padding),
    ),
    # "hardware" counts recomputed activations, "model" does not
    Metric("mfu", "model FLOPs utilisation", "of peak", "more", lambda r: compute_utilisation(r, "model")),
    Metric("hfu", "hardware FLOPs utilisation", "of peak", "neither", lambda r: compute_utilisation(r, "hardware")),
    Metric(
        "model_tflops_per_device",
        "model FLOP/s per device",
        "10^12 FLOP/s",
        "more",
        lambda record: compute_tflops_per_device(record, "model"),
    ),
    Metric(
        "hardware_tflops_per_device",
        "hardware FLOP/s per device",
        "10^12 FLOP/s",
        "neither",
        lambda record: compute_tflops_per_device(record, "hardware"),
    ),
)
