"""Memory of recorded runs on CPUs as points: what the formulas say beside what one rank held."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from analysis.predictions import PredictionPoint, build_point, estimators
from analysis.predictions.recorded import MemoryRun, format_label
from bench.predict.memory import MemoryPrediction, predict_memory

Reasons = Mapping[int, str]
"""Why a prediction may be off, by ZeRO stage."""


class MemoryQuantity(NamedTuple):
    """A number of bytes that is both recorded and predicted."""

    title: str
    recorded: Callable[[MemoryRun], int | None]
    predicted: Callable[[MemoryPrediction], int]


RESIDENT = MemoryQuantity("between steps", lambda run: run.resident, lambda predicted: predicted.resident)
STEADY = MemoryQuantity("peak over steady steps", lambda run: run.peak, lambda predicted: predicted.peak)
BUILDING = MemoryQuantity("peak while built", lambda run: run.init_peak, lambda predicted: predicted.init_peak)


def build_points(
    runs: Iterable[MemoryRun], quantity: MemoryQuantity, each: float, reasons: Reasons, *, rehearsed: bool = False
) -> tuple[PredictionPoint, ...]:
    """Return each run as a point; `reasons` say why one may be off by more than `each` percent. Collectives of
    `rehearsed` runs were pretended."""
    return tuple(_build_bytes_point(run, quantity, each, reasons, rehearsed) for run in runs)


def get_stage(run: MemoryRun) -> int:
    """Return a run's ZeRO stage; DDP divides as little as stage 0."""
    return estimators.find_stage(run.spec) or 0


def _build_bytes_point(
    run: MemoryRun, quantity: MemoryQuantity, each: float, reasons: Reasons, rehearsed: bool
) -> PredictionPoint:
    truth, predicted = quantity.recorded(run), quantity.predicted(predict_memory(run.spec, "cpu", rehearsed=rehearsed))
    if truth is None:
        return PredictionPoint(format_label(run), predicted, None, verdict="not testable", reason="not recorded")
    said = None if quantity is BUILDING else estimators.estimate_memory(run.spec, run.parameters)
    return build_point(format_label(run), predicted, truth, each, said, reasons.get(get_stage(run), ""))
