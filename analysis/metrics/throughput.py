"""Samples, tokens and FLOPs per second over the whole window of timed steps, and FLOPs utilisation."""

from collections.abc import Callable, Mapping

from analysis.metrics import Better, Metric, build_interval_ends, build_metric
from analysis.observed import (
    FlopsKind,
    compute_steps_per_s,
    compute_tflops_per_device,
    compute_token_rate,
    compute_utilisation,
    get_window,
    remember_latest,
)
from analysis.stats.intervals import Interval, describe_window, rate_interval
from bench.core.record import RunRecord, Tokens


def compute_sample_s(record: RunRecord) -> float | None:
    """Return the mean time per sample over the timed window, in seconds. Configurations are ranked by this mean and not
    by a median, so that slow steps count."""
    rate = compute_steps_per_s(record)
    return None if rate is None else 1 / rate / record.spec.global_batch


def compute_samples_per_s(record: RunRecord) -> float | None:
    """Return the samples per second over all ranks: all samples of the timed window, divided by the duration of the
    window."""
    rate = compute_steps_per_s(record)
    return None if rate is None else rate * record.spec.global_batch


@remember_latest
def compute_tokens_per_s(record: RunRecord) -> float | None:
    """Return the tokens per second, summed over all ranks. All kinds of tokens count, such as encoder and decoder
    tokens, and so does padding."""
    return compute_token_rate(record, lambda counted: counted.all)


@remember_latest  # both ends of the interval are columns, so it is needed twice
def _compute_tokens_interval(record: RunRecord) -> Interval | None:
    timed, rate = get_window(record), compute_tokens_per_s(record)
    return rate_interval(describe_window(timed.step_s).mean, timed.step_s, rate) if timed and rate is not None else None


def _build_token_rate(
    name: str, label: str, counted: Callable[[Tokens], float | None], better: Better = "more"
) -> Metric:
    """Return a metric of tokens per second over all ranks. `counted` selects the kind of tokens, such as encoder
    tokens."""
    return Metric(name, label, "tokens/s", better, lambda record: compute_token_rate(record, counted))


_FLOPS: Mapping[FlopsKind, str] = {
    "model": "FLOPs that the model needs",
    "hardware": "executed FLOPs, with recomputation of activations",
}


def _build_flops_rate(kind: FlopsKind, better: Better) -> Metric:
    name, label = f"{kind}_tflops_per_device", f"{_FLOPS[kind]}, per device and second"
    return Metric(name, label, "10^12 FLOP/s", better, lambda record: compute_tflops_per_device(record, kind))


def _build_utilisation(name: str, kind: FlopsKind, rate: str, better: Better) -> Metric:
    label = f"{kind} FLOPs utilisation: {rate}, divided by the peak FLOP/s"
    return Metric(name, label, "of peak", better, lambda record: compute_utilisation(record, kind))


METRICS = (
    build_metric(compute_sample_s, "mean time per sample over the whole window", "s"),
    build_metric(compute_samples_per_s, "samples per second over all ranks", "samples/s", "more"),
    build_metric(compute_tokens_per_s, "tokens per second over all ranks, padding included", "tokens/s", "more"),
    *build_interval_ends("tokens_per_s", "tokens_per_s", "tokens/s", "more", _compute_tokens_interval),
    # missing if samples have no tokens of this kind
    _build_token_rate(
        "encoder_tokens_per_s", "encoder tokens per second over all ranks, padding included", lambda t: t.of("encoder")
    ),
    _build_token_rate(
        "decoder_tokens_per_s", "decoder tokens per second over all ranks, padding included", lambda t: t.of("decoder")
    ),
    _build_token_rate(
        "effective_tokens_per_s", "tokens per second over all ranks, without padding", lambda t: t.all - t.padding
    ),
    # fewer padding tokens are better, since each costs as much as any other token
    _build_token_rate("padding_tokens_per_s", "padding tokens per second over all ranks", lambda t: t.padding, "less"),
    # "hardware" FLOPs include recomputation of activations, so a higher value is not better
    _build_utilisation("mfu", "model", "FLOP/s that the model needs", "more"),
    _build_utilisation("hfu", "hardware", "executed FLOP/s, with recomputation", "neither"),
    _build_flops_rate("model", "more"),
    _build_flops_rate("hardware", "neither"),
)
