"""Model FLOPs utilisation: model FLOP/s per device divided by the dense peak of the precision used."""

from analysis.observed import compute_utilisation
from bench.record import RunRecord

LABEL, UNIT, BETTER = "model FLOPs utilisation", "of peak", "more"


def value(record: RunRecord) -> float | None:
    return compute_utilisation(record, "model")
