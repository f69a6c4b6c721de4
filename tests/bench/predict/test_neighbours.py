"""Tests of the correction of predictions by measured runs of similar configurations."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.core import store
from bench.core.record import Outcome, RunRecord
from bench.predict.neighbours import (
    UNCORRECTED,
    Correction,
    PredictedRun,
    compare_with_prediction,
    compute_correction,
    identify_model,
    select_nearest,
)

SMOKE = Path(__file__).parents[2] / "data/runs.zip/smoke"
ONE, TWO = (store.read_record(path) for path in list(store.find_records([SMOKE]))[:2])


def median_s(record: RunRecord) -> float:
    assert record.observations and record.observations.steps
    window = sorted(record.observations.steps.step_s[record.observations.steps.cut :])
    middle = len(window) // 2
    return window[middle] if len(window) % 2 else (window[middle - 1] + window[middle]) / 2


def peak_bytes(record: RunRecord) -> int:
    assert record.observations
    return max(
        max(rank.init_peak_bytes or 0, rank.warmup_peak_bytes or 0, rank.peak_allocated_bytes or 0)
        for rank in record.observations.memory
    )


def scaled(step: float, memory: float) -> Any:
    """Return a function that makes a wrong prediction for a recorded run. It predicts the measured step time of the run
    divided by `step`, and the measured memory divided by `memory`."""
    return lambda record: PredictedRun(median_s(record) / step, round(peak_bytes(record) / memory))


def corrections(records: Iterable[RunRecord], predict: Callable[[RunRecord], PredictedRun | None]) -> Correction:
    """Compare recorded runs with their predictions, and return the correction of predictions that follows from their
    errors. Runs without a prediction are ignored."""
    return compute_correction(
        [found for record in records if (found := compare_with_prediction(record, predict(record)))]
    )


def test_correction_without_runs_is_one() -> None:
    assert corrections([], scaled(2, 2)) == UNCORRECTED == (1.0, 1.0, 0)


def test_correction_is_the_geometric_mean_of_measured_over_predicted() -> None:
    factors = {ONE.config_id: scaled(2, 1.1), TWO.config_id: scaled(8, 1.1)}
    found = corrections([ONE, TWO], lambda record: factors[record.config_id](record))
    assert found == (pytest.approx(4), pytest.approx(1.1, rel=1e-6), 2)


def test_one_run_corrects_time_but_not_memory() -> None:
    assert corrections([ONE], scaled(2, 1.5)) == (pytest.approx(2), 1.0, 1)


def test_runs_without_prediction_do_not_change_the_correction() -> None:
    assert corrections([ONE, TWO], lambda record: PredictedRun(None, None)) == (1.0, 1.0, 2)
    assert corrections([ONE, TWO], lambda record: None) == UNCORRECTED


@pytest.mark.parametrize("update", [
    {"outcome": Outcome(kind="oom")}, {"evidence": "rehearsed"},
    {"observations": ONE.observations and ONE.observations.model_copy(update={"drill": "rank=1"})},
])  # fmt: skip
def test_failed_rehearsed_and_drill_runs_do_not_change_the_correction(update: dict[str, Any]) -> None:
    assert corrections([ONE.model_copy(update=update)], scaled(2, 2)) == UNCORRECTED


def test_two_runs_with_the_same_engine_replace_runs_with_other_engines() -> None:
    found = compare_with_prediction(ONE, scaled(2, 2)(ONE))
    assert found
    model, machine = found.model, found.machine
    assert model == identify_model(ONE.spec.model.model_dump())
    same, other = found._replace(engine="zero2"), found._replace(engine="ddp")
    assert select_nearest([same, other], model, "zero2", machine) == [same, other]
    assert select_nearest([same, other, same], model, "zero2", machine) == [same, same]
    assert select_nearest([same, other], model, "zero3", machine) == [same, other]
    assert select_nearest([same, other], model, "zero2", "another machine") == []
    assert (
        select_nearest([same, other], identify_model({"name": "tiny", "shape": {"d_model": 7}}), "zero2", machine) == []
    )
