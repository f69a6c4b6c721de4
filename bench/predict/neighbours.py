"""What measured runs say of the predictions for their neighbours: runs of the same model on the same machine."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.core.point_fields import MODEL_KERNELS
from bench.core.record import Observations, RunRecord
from bench.core.spec import ModelSpec

ENOUGH = 2
"""Measured runs before memory is corrected at all, and before those of one engine are preferred to those of all: a
single one may have met a mishap."""


class PredictedRun(NamedTuple):
    """What was predicted of a run; None where that is unknown."""

    step_s: float | None
    tensor_bytes: int | None  # live tensors at the highest peak, of building the engine or of a step


class Neighbour(NamedTuple):
    """A measured run beside its prediction: measured over predicted, None where either is unknown."""

    model: str  # as `identity` names it
    engine: str
    machine: str
    step: float | None
    memory: float | None


class Correction(NamedTuple):
    """Factors on the predicted time of a step and on the predicted bytes of live tensors."""

    step: float = 1.0
    memory: float = 1.0
    runs: int = 0  # measured runs behind them


UNCORRECTED = Correction()
"""Where nothing has been measured yet."""


def compare_with_prediction(record: RunRecord, predicted: PredictedRun | None) -> Neighbour | None:
    """Return a run beside its prediction; None unless it ended well, all of its ranks were real, and no fault was
    planted in it."""
    observed = record.observations
    if predicted is None or observed is None or observed.drill:
        return None
    if record.outcome.kind != "ok" or record.evidence != "measured":
        return None
    spec = record.spec
    return Neighbour(
        identify_model(spec.model.model_dump()),
        spec.engine.name,
        record.circumstance.machine.name,
        _compute_ratio(_compute_step_s(observed), predicted.step_s),
        _compute_ratio(_find_tensor_bytes(observed), predicted.tensor_bytes),
    )


def identify_model(model: Mapping[str, Any]) -> str:
    """Return what tells one plain ModelSpec from another: a sweep over shapes may give all of them one name, and other
    kernels are others to predict."""
    kernels = (model.get(name, ModelSpec.model_fields[name].default) for name in MODEL_KERNELS)
    return f"{model['name']} {json.dumps([model['shape'], *kernels], sort_keys=True)}"


def select_nearest(known: Sequence[Neighbour], model: str, engine: str, machine: str) -> list[Neighbour]:
    """Return the runs of a model on a machine: those with the same engine where there are enough, else all."""
    same_engine = [found for found in known if (found.model, found.machine) == (model, machine)]
    closest = [found for found in same_engine if found.engine == engine]
    return closest if len(closest) >= ENOUGH else same_engine


def compute_correction(known: Sequence[Neighbour]) -> Correction:
    """Return the geometric means of the ratios, 1 for those of which there are none, or too few."""
    steps = [found.step for found in known if found.step]
    memory = [found.memory for found in known if found.memory]
    return Correction(
        statistics.geometric_mean(steps) if steps else 1.0,
        statistics.geometric_mean(memory) if len(memory) >= ENOUGH else 1.0,
        len(known),
    )


def _compute_step_s(observed: Observations) -> float | None:
    """Median seconds per step of the window."""
    window = observed.steps.step_s[observed.steps.cut :] if observed.steps else ()
    return statistics.median(window) if window else None


def _find_tensor_bytes(observed: Observations) -> int | None:
    """Live tensors of the rank that held most, at its highest peak."""
    peaks = [
        peak
        for rank in observed.memory
        for peak in (rank.init_peak_bytes, rank.warmup_peak_bytes, rank.peak_allocated_bytes)
        if peak is not None
    ]
    return max(peaks, default=None)


def _compute_ratio(measured: float | None, predicted: float | None) -> float | None:
    if not measured or not predicted or not math.isfinite(measured / predicted):
        return None
    return measured / predicted
