"""FLOPs that the model needs, forward and backward, per second and device; recomputation is not counted."""

from analysis.observed import compute_tflops_per_device
from bench.record import RunRecord

LABEL, UNIT, BETTER = "model FLOP/s per device", "10^12 FLOP/s", "more"


def value(record: RunRecord) -> float | None:
    return compute_tflops_per_device(record, "model")
