"""FLOPs per second, and their part of the peak: those of the model, and all that are run."""

from analysis.metrics import Metric
from analysis.observed import compute_tflops_per_device, compute_utilisation
from bench.core.record import RunRecord


def compute_mfu(record: RunRecord) -> float | None:
    """Model FLOPs utilisation: model FLOP/s per device divided by the dense peak of the precision used."""
    return compute_utilisation(record, "model")


def compute_hfu(record: RunRecord) -> float | None:
    """Hardware FLOPs utilisation: as MFU, with recomputed activations counted as well."""
    return compute_utilisation(record, "hardware")


def compute_model_tflops_per_device(record: RunRecord) -> float | None:
    """FLOPs that the model needs, forward and backward, per second and device; recomputation is not counted."""
    return compute_tflops_per_device(record, "model")


def compute_hardware_tflops_per_device(record: RunRecord) -> float | None:
    """FLOPs that are run per second and device: those of the model, and recomputed activations as well."""
    return compute_tflops_per_device(record, "hardware")


METRICS = (
    Metric("mfu", "model FLOPs utilisation", "of peak", "more", compute_mfu),
    Metric("hfu", "hardware FLOPs utilisation", "of peak", "neither", compute_hfu),
    Metric(
        "model_tflops_per_device", "model FLOP/s per device", "10^12 FLOP/s", "more", compute_model_tflops_per_device
    ),
    Metric(
        "hardware_tflops_per_device",
        "hardware FLOP/s per device",
        "10^12 FLOP/s",
        "neither",
        compute_hardware_tflops_per_device,
    ),
)
