"""Memory of recorded runs on CPUs as points: what the formulas say beside what one rank held."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from analysis.predictions import Point, estimators, within
from analysis.predictions.recorded import MemoryRun, label
from bench.predict.memory import Memory, memory

Reasons = Mapping[int, str]
"""Why a prediction may be off, by ZeRO stage."""


class Quantity(NamedTuple):
    """A number of bytes that is both recorded and foretold."""

    words: str
    recorded: Callable[[MemoryRun], int | None]
    foretold: Callable[[Memory], int]


RESIDENT = Quantity("between steps", lambda run: run.resident, lambda foretold: foretold.resident)
STEADY = Quantity("peak over steady steps", lambda run: run.peak, lambda foretold: foretold.peak)
BUILDING = Quantity("peak while built", lambda run: run.init_peak, lambda foretold: foretold.init_peak)


def points(
    runs: Iterable[MemoryRun], quantity: Quantity, each: float, reasons: Reasons, *, rehearsed: bool = False
) -> tuple[Point, ...]:
    """Return each run as a point; `reasons` say why one may be off by more than `each` percent. Collectives of
    `rehearsed` runs were pretended."""
    return tuple(_point(run, quantity, each, reasons, rehearsed) for run in runs)


def stage(run: MemoryRun) -> int:
    """Return a run's ZeRO stage; DDP divides as little as stage 0."""
    return estimators.stage(run.spec) or 0


def _point(run: MemoryRun, quantity: Quantity, each: float, reasons: Reasons, rehearsed: bool) -> Point:
    truth, foretold = quantity.recorded(run), quantity.foretold(memory(run.spec, "cpu", rehearsed=rehearsed))
    if truth is None:
        return Point(label(run), foretold, None, verdict="not testable", reason="not recorded")
    said = None if quantity is BUILDING else estimators.memory(run.spec, run.parameters)
    return within(label(run), foretold, truth, each, said, reasons.get(stage(run), ""))
