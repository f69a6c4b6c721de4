"""Tests of time limits of jobs, which are derived from predicted step times.

The limits have a wide margin. If measured runs of similar points took longer than predicted, limits become longer. A
point that reaches its limit runs again with the longest limit.
"""

import statistics
from pathlib import Path

import pytest
from sweeps import attempt, point, spec, sweep

from bench.core import store
from bench.core.record import RunRecord
from bench.predict.neighbours import Correction
from bench.sweep import definition
from bench.sweep.corrections import MeasuredCorrections, extend_time_limits
from bench.sweep.definition import SweepDefinition, SweepPoint
from bench.sweep.forecast import MARGIN, START_S, Forecast, StepForecast, compute_limit_min, compute_longest_s
from bench.sweep.snapshot import read_snapshot
from bench.sweep.status import StudyState, list_statuses

RUNS = Path(__file__).parents[2] / "data/runs.zip"
FOUR = spec(batch__micro=4)
STEP = StepForecast(low_s=0.05, s=0.1, high_s=0.15)
"""Predicted seconds of a step at micro-batch 4.

The time limit `LIMIT_MIN` is 10 + ((10 + 135 + 3 + 5) × 3 × 0.15 + 30) / 60 min. There are 10 warm-up steps, 135 steps
of the window, 3 inspected steps, and one block of 5 steps on a GPU. A window of 60 s has 134 steps of 0.45 s, rounded
up to blocks. With steps of 0.675 s, it has 90 steps.
"""
LIMIT_MIN = 10 + (153 * 3 * 0.15 + 30) / 60


def predicted_sweep() -> SweepDefinition:
    update = {"forecast": Forecast(step=STEP), "bound_min": 20.0, "time_limit_min": LIMIT_MIN}
    predicted: SweepPoint = point(FOUR).model_copy(update=update)
    return sweep([predicted]).model_copy(update={"launcher": {"name": "slurm", "setup_min": 10}})


class Slower(MeasuredCorrections):
    """Replacement for the class `MeasuredCorrections`. According to it, all measured runs took `factor` times as long
    as predicted."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def correction(self, point: SweepPoint) -> Correction:
        return Correction(step=self.factor, runs=3)


def limit_of(folder: Path, corrections: MeasuredCorrections) -> float | None:
    one, seen = predicted_sweep(), read_snapshot(folder)
    view = StudyState(folder, [one], seen, {}, list_statuses(definition.merge_sweeps([one]), seen, {}))
    [point_status] = extend_time_limits(view.statuses, view, corrections)
    return point_status.point.time_limit_min


@pytest.mark.parametrize(
    ("factor", "limit"), [(1.0, LIMIT_MIN), (1.5, 10 + (108 * 3 * 0.225 + 30) / 60), (0.5, LIMIT_MIN)]
)
def test_measured_neighbours_lengthen_a_time_limit_and_never_shorten_it(
    factor: float, limit: float, tmp_path: Path
) -> None:
    assert limit_of(tmp_path, Slower(factor)) == pytest.approx(limit)
    assert limit_of(tmp_path, Slower(100)) == 20


def test_point_gets_the_longest_limit_after_a_timeout(tmp_path: Path) -> None:
    attempt(tmp_path, FOUR, "node_failure")
    assert limit_of(tmp_path, Slower(1)) == pytest.approx(LIMIT_MIN)
    attempt(tmp_path, FOUR, "timeout")
    assert limit_of(tmp_path, Slower(1)) == 20


def test_time_limit_set_by_the_user_is_not_changed(tmp_path: Path) -> None:
    one = predicted_sweep()
    plain = one.points[0].model_copy(update={"bound_min": None, "time_limit_min": 7.0})
    one, seen = one.model_copy(update={"points": (plain,)}), read_snapshot(tmp_path)
    view = StudyState(tmp_path, [one], seen, {}, list_statuses(definition.merge_sweeps([one]), seen, {}))
    assert extend_time_limits(view.statuses, view, Slower(9))[0].point.time_limit_min == 7.0


def recorded() -> list[RunRecord]:
    found = map(store.read_record, store.find_records(RUNS / folder for folder in ("smoke", "testbed", "memory")))
    return [record for record in found if record.outcome.kind == "ok"]


def test_limits_from_half_the_measured_step_time_suffice_for_all_recorded_runs() -> None:
    """The predicted step time is assumed to be half of the measured median, so every run is slower than predicted. Some
    runs shared their cores with fifteen other processes. `setup_min` adds time for the start of a run."""
    for record in recorded():
        assert record.observations and record.observations.steps
        steps, protocol = record.observations.steps, record.spec.measure
        median = statistics.median(steps.step_s[steps.cut :])
        assert sum(steps.step_s) <= compute_longest_s(protocol, MARGIN * median / 2), record.config_id
        duration_s = sum(steps.step_s) + sum(record.observations.phases_s.values())
        assert duration_s <= 60 * compute_limit_min(protocol, median / 2, setup_min=3, bound_min=20), record.config_id


def test_start_of_recorded_runs_took_at_most_the_predicted_seconds() -> None:
    for record in recorded():
        assert record.observations
        assert sum(record.observations.phases_s.values()) <= 1.01 * START_S[1]
