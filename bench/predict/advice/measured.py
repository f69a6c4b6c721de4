"""What recorded runs say of candidates on the same machine: their own step times, that they ran out of memory, and how
far predictions were from those of their neighbours. Runs outrank formulas."""

import json
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bench.core.machine import Machine
from bench.core.point_fields import select
from bench.core.record import RunRecord
from bench.core.spec import RunSpec
from bench.predict.neighbours import Neighbour, PredictedRun, compare_with_prediction, identify_model, select_nearest
from bench.predict.step_time.network import read_link_speed


class TimedPoint(NamedTuple):
    """Seconds of a step over the runs of one point: the median of their medians, and the interval that holds those of
    all; of a run too short to bound its median, all of its steps."""

    step_s: float
    low_s: float
    high_s: float
    runs: int


class MeasuredPoints(NamedTuple):
    """What is known of points on a machine, by the text of `format_decisive`."""

    timed: dict[str, TimedPoint] = {}
    out_of_memory: frozenset[str] = frozenset()
    neighbours: tuple[Neighbour, ...] = ()

    def near(self, engine: str) -> list[Neighbour]:
        """Return the runs that correct predictions for `engine`; all are of one model and machine."""
        every = self.neighbours
        return select_nearest(every, every[0].model, engine, every[0].machine) if every else []

    def fits(self, spec: RunSpec) -> bool | None:
        """Whether `spec` was seen to run, or to run out of memory; None where nobody tried."""
        if not self.timed and not self.out_of_memory:
            return None
        key = format_decisive(spec)
        return True if key in self.timed else False if key in self.out_of_memory else None


def format_decisive(spec: RunSpec) -> str:
    """Return what decides how long a step takes, as text: everything but names, data, seed and protocol."""
    return json.dumps(_decisive(spec), sort_keys=True)


def _decisive(spec: RunSpec) -> dict[str, Any]:
    return select(spec.model_dump(mode="json", by_alias=True), "step_time")


def collect_measured(
    records: Iterable[RunRecord], like: RunSpec, machine: Machine, predict: Callable[[RunSpec], float | None]
) -> MeasuredPoints:
    """Return what `records` say of points on `machine` with model, precision, objective and lengths of `like`;
    `predict` gives the seconds of a step, or None.

    Of a point that ran in several environments the one that started last counts.
    """
    comparable = [record for record in records if _is_comparable(record, like, machine)]
    points: dict[str, list[RunRecord]] = {}
    for record in comparable:
        points.setdefault(format_decisive(record.spec), []).append(record)
    ok = {key: _select_latest([r for r in runs if r.outcome.kind == "ok"]) for key, runs in points.items()}
    timed = {key: found for key, runs in ok.items() if (found := _time_point(runs))}
    out = frozenset(key for key in points if key not in timed and points[key][-1].outcome.kind == "oom")
    compared = [compare_with_prediction(r, PredictedRun(predict(r.spec), None)) for key in timed for r in ok[key]]
    model = identify_model(like.model.model_dump())
    named = (found._replace(model=model, machine=machine.name) for found in compared if found and found.step)
    return MeasuredPoints(timed, out, tuple(named))


def _is_comparable(record: RunRecord, like: RunSpec, machine: Machine) -> bool:
    """Whether a record is a measurement of such a model on such a machine."""
    there, spec = record.circumstance.machine, record.spec
    named = record.environment.classification.device if record.environment else ""
    if there.name != machine.name:
        if not (machine.device_names and machine.accepts(named)):
            return False
        if spec.nodes > 1 and read_link_speed(there) != read_link_speed(machine):  # the same device on another network
            return False
    if record.evidence != "measured" or (record.observations and record.observations.drill) or record.outcome.paused_s:
        return False
    work = (spec.objective, spec.sequence, spec.precision) == (like.objective, like.sequence, like.precision)
    if not work or _decisive(spec)["model"] != _decisive(like)["model"]:
        return False
    return record.outcome.kind in ("ok", "oom")


def _select_latest(runs: list[RunRecord]) -> list[RunRecord]:
    """Return the runs of the environment that was met last."""
    if not runs:
        return []
    last = max(runs, key=lambda record: record.circumstance.started_at)
    return [record for record in runs if _get_environment_id(record) == _get_environment_id(last)]


def _get_environment_id(record: RunRecord) -> str | None:
    return record.environment.environment_id if record.environment else None


def _time_point(runs: list[RunRecord]) -> TimedPoint | None:
    from bench.core.statistics import series_interval  # here, since it takes its time and most commands need none

    windows = [_get_window(record) for record in runs]
    medians = [statistics.median(window) for window in windows if window]
    if not medians:
        return None
    inside = [series_interval(window) or (min(window), max(window)) for window in windows if window]
    ends = [end for interval in inside for end in interval]
    return TimedPoint(statistics.median(medians), min(medians + ends), max(medians + ends), len(medians))


def _get_window(record: RunRecord) -> tuple[float, ...]:
    steps = record.observations.steps if record.observations else None
    return steps.step_s[steps.cut :] if steps else ()
