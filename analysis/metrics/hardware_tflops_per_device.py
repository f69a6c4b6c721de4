"""FLOPs that are run per second and device: those of the model, and recomputed activations as well."""

from analysis.observed import compute_tflops_per_device
from bench.record import RunRecord

LABEL, UNIT, BETTER = "hardware FLOP/s per device", "10^12 FLOP/s", "neither"


def value(record: RunRecord) -> float | None:
    return compute_tflops_per_device(record, "hardware")
