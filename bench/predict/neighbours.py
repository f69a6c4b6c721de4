"""Measured runs compared with their predictions.

A measured run gives the step time of its configuration, or shows that the configuration runs out of memory. It also
corrects the predictions of neighbours, which are configurations of the same model on the same machine.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.core.machine import Machine
from bench.core.point_fields import MODEL_KERNELS, select
from bench.core.record import Observations, RunRecord
from bench.core.spec import ModelSpec, RunSpec
from bench.predict.step_time.network import read_link_speed

ENOUGH = 2
"""Minimum number of measured runs for a correction of predicted memory, since a single run may have been disturbed. If
at least this many runs used the engine whose prediction is corrected, the runs of other engines are ignored."""


class PredictedRun(NamedTuple):
    """Predicted step time and memory of a run; a field is None if it is unknown."""

    step_s: float | None
    tensor_bytes: int | None  # highest peak of live tensors, while the engine is built or in a step


class Neighbour(NamedTuple):
    """A measured run with its ratios of measured to predicted step time and memory. A ratio is None if either value is
    unknown."""

    model: str  # text returned by `identify_model`
    engine: str
    machine: str
    step: float | None
    memory: float | None


class Correction(NamedTuple):
    """Factors that correct a predicted step time and the predicted bytes of live tensors."""

    step: float = 1.0
    memory: float = 1.0
    runs: int = 0  # number of measured runs from which the factors follow


UNCORRECTED = Correction()
"""Correction without any measured run: both factors are 1."""


def compare_with_prediction(record: RunRecord, predicted: PredictedRun | None) -> Neighbour | None:
    """Return the measured-to-predicted ratios of a run. Return None for a run that failed, was a rehearsal of one rank,
    had a fault injected (a drill), or has no prediction."""
    observed = record.observations
    if predicted is None or observed is None or observed.drill:
        return None
    if record.outcome.kind != "ok" or record.evidence != "measured":
        return None
    window = _get_window(observed)
    peaks = [
        peak
        for rank in observed.memory
        for peak in (rank.init_peak_bytes, rank.warmup_peak_bytes, rank.peak_allocated_bytes)
        if peak is not None
    ]
    spec = record.spec
    return Neighbour(
        identify_model(spec.model.model_dump()),
        spec.engine.name,
        record.circumstance.machine.name,
        _compute_ratio(statistics.median(window) if window else None, predicted.step_s),
        _compute_ratio(max(peaks, default=None), predicted.tensor_bytes),
    )


def _compute_ratio(measured: float | None, predicted: float | None) -> float | None:
    if not measured or not predicted or not math.isfinite(measured / predicted):
        return None
    return measured / predicted


def identify_model(model: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal models, given a ModelSpec as a plain mapping.

    The text includes shape and kernels, not only the name. A sweep over shapes may give all shapes one name, and step
    times depend on the kernels.
    """
    kernels = (model.get(name, ModelSpec.model_fields[name].default) for name in MODEL_KERNELS)
    return f"{model['name']} {json.dumps([model['shape'], *kernels], sort_keys=True)}"


def select_nearest(known: Sequence[Neighbour], model: str, engine: str, machine: str) -> list[Neighbour]:
    """Return the runs in `known` that used this model on this machine. If at least ENOUGH (2) of these runs used
    `engine`, return only the runs with this engine."""
    of_model = [found for found in known if (found.model, found.machine) == (model, machine)]
    of_engine = [found for found in of_model if found.engine == engine]
    return of_engine if len(of_engine) >= ENOUGH else of_model


def compute_correction(known: Sequence[Neighbour]) -> Correction:
    """Return the factors that correct a prediction: the geometric means of the measured-to-predicted ratios of step
    time and of memory. The factor for step time is 1 if no run has this ratio. The factor for memory is 1 if fewer than
    ENOUGH (2) runs have this ratio."""
    steps = [found.step for found in known if found.step]
    memory = [found.memory for found in known if found.memory]
    return Correction(
        statistics.geometric_mean(steps) if steps else 1.0,
        statistics.geometric_mean(memory) if len(memory) >= ENOUGH else 1.0,
        len(known),
    )


# -- measured points


class TimedPoint(NamedTuple):
    """Measured step time of one configuration in seconds, with an uncertainty interval. The step time is the median
    over runs of each run's median.

    The uncertainty interval contains the confidence interval of each run's median. For a run that is too short for a
    confidence interval, it contains all measured step times of the run instead.
    """

    step_s: float
    low_s: float
    high_s: float
    runs: int


class MeasuredPoints(NamedTuple):
    """Measurements of configurations on one machine: step times, configurations that ran out of memory, and
    `neighbours`, the measured runs with which predictions are corrected. A configuration is identified by the text that
    `format_decisive` returns."""

    timed: dict[str, TimedPoint] = {}
    out_of_memory: frozenset[str] = frozenset()
    neighbours: tuple[Neighbour, ...] = ()

    def near(self, engine: str) -> list[Neighbour]:
        """Return the measured runs with which predictions for `engine` are corrected. If fewer than ENOUGH (2) runs
        used this engine, the runs of all engines are returned. All of them ran the same model on the same machine."""
        every = self.neighbours
        return select_nearest(every, every[0].model, engine, every[0].machine) if every else []

    def fits(self, spec: RunSpec) -> bool | None:
        """Return True if a run of `spec` was ok and False if it ran out of memory; None if it was never measured."""
        if not self.timed and not self.out_of_memory:
            return None
        key = format_decisive(spec)
        return True if key in self.timed else False if key in self.out_of_memory else None


def format_decisive(spec: RunSpec, part: str | None = None) -> str:
    """Return the fields of a spec that affect the time of a step, as JSON text. Fields without an effect on the time
    are excluded, such as names, data, seed and measurement protocol. `part` selects one section of the spec, such as
    `model`."""
    decisive = select(spec.model_dump(mode="json", by_alias=True), "step_time")
    return json.dumps(decisive if part is None else decisive[part], sort_keys=True)


def collect_measured(
    records: Iterable[RunRecord], like: RunSpec, machine: Machine, predict: Callable[[RunSpec], float | None]
) -> MeasuredPoints:
    """Return the measurements from `records` that were made on `machine` and are comparable with `like`: model,
    precision, objective and sequence lengths are equal.

    `predict` returns the predicted step time of a spec in seconds, or None. The measured step times are compared with
    these predictions. If a configuration ran in several environments (devices and versions of software), only the
    environment of its latest run is used. Runs in its other environments are ignored.
    """
    points: dict[str, list[RunRecord]] = {}
    for record in records:
        if _is_comparable(record, like, machine):
            points.setdefault(format_decisive(record.spec), []).append(record)
    ok = {key: _select_latest([r for r in runs if r.outcome.kind == "ok"]) for key, runs in points.items()}
    timed = {key: found for key, runs in ok.items() if (found := _time_point(runs))}
    # a configuration that once ran does fit, so an earlier run out of memory had another cause
    out = frozenset(key for key in points if key not in timed and points[key][-1].outcome.kind == "oom")
    compared = [compare_with_prediction(r, PredictedRun(predict(r.spec), None)) for key in timed for r in ok[key]]
    model = identify_model(like.model.model_dump())
    named = (found._replace(model=model, machine=machine.name) for found in compared if found and found.step)
    return MeasuredPoints(timed, out, tuple(named))


def _is_comparable(record: RunRecord, like: RunSpec, machine: Machine) -> bool:
    """Return True if the run of a record measured the same model and workload as `like`, on a machine of the same kind
    as `machine`. Only runs that were completed, and runs that ended because memory ran out, are comparable."""
    recorded, spec = record.circumstance.machine, record.spec
    device_name = record.environment.classification.device if record.environment else ""
    if recorded.name != machine.name:
        if not (machine.device_names and machine.accepts(device_name)):
            return False
        if spec.nodes > 1 and read_link_speed(recorded) != read_link_speed(machine):  # same device, but another network
            return False
    if record.evidence != "measured" or (record.observations and record.observations.drill) or record.outcome.paused_s:
        return False
    work = (spec.objective, spec.sequence, spec.precision) == (like.objective, like.sequence, like.precision)
    return (
        work
        and record.outcome.kind in ("ok", "oom")
        and format_decisive(spec, "model") == format_decisive(like, "model")
    )


def _select_latest(runs: list[RunRecord]) -> list[RunRecord]:
    """Return the runs that have the same environment as the run that started last."""
    ids = [record.environment.environment_id if record.environment else None for record in runs]
    last = max(range(len(runs)), key=lambda place: runs[place].circumstance.started_at, default=0)
    return [record for record, identity in zip(runs, ids, strict=True) if identity == ids[last]]


def _time_point(runs: list[RunRecord]) -> TimedPoint | None:
    from bench.core.statistics import series_interval  # imports scipy, which most commands do not need

    observed = [record.observations for record in runs if record.observations]
    windows = [window for one in observed if (window := _get_window(one))]
    if not windows:
        return None
    medians = [statistics.median(window) for window in windows]
    inside = [series_interval(window) or (min(window), max(window)) for window in windows]
    ends = [*medians, *(end for interval in inside for end in interval)]
    return TimedPoint(statistics.median(medians), min(ends), max(ends), len(medians))


def _get_window(observed: Observations) -> tuple[float, ...]:
    """Return the seconds of each measured step; warm-up steps are excluded."""
    return observed.steps.step_s[observed.steps.cut :] if observed.steps else ()
