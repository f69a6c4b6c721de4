"""Hardware FLOPs utilisation: as MFU, with recomputed activations counted as well."""

from analysis.observed import compute_utilisation
from bench.record import RunRecord

LABEL, UNIT, BETTER = "hardware FLOPs utilisation", "of peak", "neither"


def value(record: RunRecord) -> float | None:
    return compute_utilisation(record, "hardware")
