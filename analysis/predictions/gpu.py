"""Runs on GPUs, where any were recorded, beside what is predicted of them: peak memory by the allocator, step time."""

import statistics
from collections.abc import Iterable, Iterator

from analysis.predictions import PredictionComparison, PredictionPoint, build_point, estimators
from analysis.predictions.recorded import MemoryRun, RecordedRuns, format_label
from bench.errors import UserError
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.record import RunRecord
from bench.store import find_records, read_record

MEMORY, TIME = 5.0, 10.0
"""Percent of every point; bounds set before any GPU was seen."""
TEXT = (
    "Records in `results/measured` that were made on GPUs: the allocator's peak over steady steps, of the rank that "
    "has most. A run that ended out of memory is right if it was not predicted to fit for sure."
)
TEXT_TIME = "The median step of the same runs, beside what the machine's published numbers say of it."
NONE = "No GPU run is recorded yet, so nothing here can be compared."


def compare(found: Iterable[RunRecord]) -> list[PredictionComparison]:
    """Return memory and time of every run among `found` that was measured on GPUs."""
    runs = [run for run in found if run.evidence == "measured" and run.circumstance.machine.device == "cuda"]
    text, text_time = (f"{text_part} {'' if runs else NONE}".rstrip() for text_part in (TEXT, TEXT_TIME))
    peaks = tuple(point for run in runs if (point := _build_peak_point(run)))
    times = tuple(point for run in runs if (point := _build_time_point(run)))
    return [
        PredictionComparison(
            "gpu_memory", "Runs on GPUs: peak over steady steps", text, peaks, "bytes", each=MEMORY,
            rival="DeepSpeed's estimator",
        ),
        PredictionComparison("gpu_times", "Runs on GPUs: step time", text_time, times, "s", each=TIME),
    ]  # fmt: skip


def read_runs(recorded: RecordedRuns) -> Iterator[RunRecord]:
    """Yield every run that was measured, on whatever machine."""
    yield from map(read_record, find_records([recorded.measured]))


def _build_peak_point(run: RunRecord) -> PredictionPoint | None:
    """Return a run's peak as a point; None for one that says nothing of memory."""
    predicted = predict_memory(run.spec, "cuda", run.circumstance.machine.memory_bytes)
    observed = run.observations
    if run.outcome.kind == "oom":
        room = run.circumstance.machine.memory_bytes
        wrong = room is not None and predicted.fits(room) is True
        reason = "predicted to fit" if wrong else ""
        return PredictionPoint(
            _format_run_label(run),
            predicted.peak,
            "out of memory",
            verdict="exception" if wrong else "ok",
            reason=reason,
        )
    if run.outcome.kind != "ok" or observed is None:
        return None
    peaks = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    if not peaks:
        return PredictionPoint(
            _format_run_label(run), predicted.peak, None, verdict="not testable", reason="not recorded"
        )
    said = estimators.estimate_memory(run.spec, observed.parameters)
    return build_point(_format_run_label(run), predicted.peak, max(peaks), MEMORY, said)


def _build_time_point(run: RunRecord) -> PredictionPoint | None:
    """Return a run's median step as a point; None for one that was not timed."""
    steps = run.observations.steps if run.observations else None
    if run.outcome.kind != "ok" or steps is None:
        return None
    measured = statistics.median(steps.step_s[steps.cut :])
    try:
        predicted = predict_step_time(run.spec, run.circumstance.machine, "cuda").step_s
    except UserError as error:
        return PredictionPoint(_format_run_label(run), None, measured, verdict="not testable", reason=str(error))
    return build_point(_format_run_label(run), predicted, measured, TIME)


def _format_run_label(run: RunRecord) -> str:
    parameters = run.observations.parameters if run.observations else run.spec.model.parameters or 0
    repeat = run.circumstance.repeat
    return f"{run.circumstance.machine.name}: {format_label(MemoryRun(run.spec, parameters))}, repeat {repeat}"
