"""Points that are predicted far out of memory, and need not run. Pure, and open to audit."""

import functools
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import engines, predict
from bench.machine import Machine
from bench.predict.memory import format_gigabytes, predict_memory
from bench.predict.neighbours import UNCORRECTED, Correction
from bench.record import Outcome
from bench.spec import RunSpec
from bench.sweep.forecast import FAR_OUT_FACTOR, Forecast, MemoryForecast


def is_far_out_of_memory(forecast: Forecast | None, machine: Machine, correction: Correction = UNCORRECTED) -> bool:
    """Whether a point is surely out of memory.

    Measured neighbours may take that back, or add points beyond the edge; what fits by the low estimate alone is never
    far out. Where the device's memory is not known, nothing is.
    """
    room, there = forecast.room if forecast else None, machine.memory_bytes
    if room is None or there is None or room.low_bytes <= there:
        return False
    return room.corrected(correction.memory).low_bytes > FAR_OUT_FACTOR * there


def find_infeasible_outcome(
    plain_spec: dict[str, Any], forecast: Forecast | None, machine: Machine, correction: Correction
) -> Outcome | None:
    """Return why a point need not run, with the whole prediction as evidence, or None."""
    if not is_far_out_of_memory(forecast, machine, correction):
        return None
    assert forecast and forecast.room and machine.memory_bytes
    room = forecast.room.corrected(correction.memory)
    needs, has = format_gigabytes(room.low_bytes), format_gigabytes(machine.memory_bytes)
    reason = f"predicted to need at least {needs} GB, and a device of {machine.name} has {has} GB"
    return Outcome(kind="infeasible", reason=reason, evidence=_build_evidence(plain_spec, room, machine, correction))


def _build_evidence(
    plain_spec: dict[str, Any], room: MemoryForecast, machine: Machine, correction: Correction
) -> dict[str, Any]:
    """Return the prediction by phase and term, and by which formulas; the phases are as predicted, uncorrected."""
    spec = RunSpec.model_validate(plain_spec)
    needed = predict_memory(spec, "cpu" if machine.device == "cpu" else "cuda", machine.memory_bytes)
    return {
        "predicted": {
            "low_bytes": room.low_bytes,
            "high_bytes": room.high_bytes,
            "phases": {phase.name: phase.terms for phase in needed.phases},
            "base_bytes": needed.base,
            "reserve_bytes": needed.reserve,
        },
        "machine": {"name": machine.name, "memory_bytes": machine.memory_bytes},
        "far_out": FAR_OUT_FACTOR,
        "correction": {"memory": correction.memory, "runs": correction.runs},
        "formulas": read_formula_versions(),
    }


@functools.cache
def read_formula_versions() -> dict[str, str]:
    """Return what tells one version of the formulas from another: of the release, and of their text."""
    packages = {package.__name__: _compute_digest(Path(package.__path__[0])) for package in (predict, engines)}
    return {"zeroscale": metadata.version("zeroscale")} | packages


def _compute_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
