"""Tests of the memory of one rank of up to 1,024. Predictions are compared with rehearsals, in which one rank is real
and the others are simulated. Rehearsals are compared with real runs of all ranks."""

from pathlib import Path

import pytest

from analysis.validation.recorded import RecordedRuns
from bench.core.spec import MeasureSpec, RunSpec, canonical
from bench.predict.memory import predict_memory
from tests.benchmarks.rehearsals import SEEN, build_spec, list_cases

RECORDED = RecordedRuns(Path(__file__).parents[3] / "results")
REHEARSED = list(RECORDED.tabled("rehearsed"))
WITH_REAL_RUNS = RECORDED.table("rehearsed_beside_real")


def test_predicted_memory_is_within_3_percent_of_rehearsals() -> None:
    for run in REHEARSED:
        predicted = predict_memory(run.spec, "cpu", rehearsed=True)
        assert predicted.resident == pytest.approx(run.resident, rel=0.003)
        assert predicted.init_peak == pytest.approx(run.init_peak, rel=0.03)
        assert predicted.peak == pytest.approx(run.peak, rel=0.03)


def test_specs_of_recorded_rehearsals_equal_the_composed_cases() -> None:
    """The test fails if the settings of a case have changed since its rehearsal was recorded. In that case, rehearse it
    again with `tests.benchmarks.rehearsals`."""
    specs = ([run.spec for run in REHEARSED], [build_spec(case) for case in list_cases()])
    # Neither the number of steps nor, for synthetic samples, the mean of the loss changes the memory of a rehearsal.
    same = {"measure": MeasureSpec(), "loss_mean": "tokens"}
    rehearsed, composed = ([canonical(one.model_copy(update=same)) for one in of] for of in specs)
    assert rehearsed == composed


def test_every_stage_is_rehearsed_at_every_world_size() -> None:
    found = {
        (run.spec.engine.options["stage"], run.spec.world_size, run.spec.precision, run.parameters) for run in REHEARSED
    }
    assert len(found) == 4 * 6 * 2 * 2
    assert {ranks for _, ranks, _, _ in found} == {1, 2, 8, 64, 512, 1024}


def test_predicted_memory_is_within_6_percent_of_rehearsals_of_few_ranks() -> None:
    for row in WITH_REAL_RUNS:
        spec = RunSpec.model_validate_json(row["spec"])
        predicted = predict_memory(spec, "cpu", rehearsed=True)
        bounded = spec.engine.options.get("stage") == 3 and spec.activation_checkpointing
        assert 0.985 < predicted.peak / int(row["rehearsed_peak_bytes"]) < (1.052 if bounded else 1.03)
        assert predicted.resident == pytest.approx(int(row["rehearsed_resident_bytes"]), rel=0.003)


def test_table_of_rehearsals_has_the_memory_of_every_recorded_run() -> None:
    found = [(row["spec"], int(row["repeat"]), *(int(row[f"real_{name}"]) for name in SEEN)) for row in WITH_REAL_RUNS]
    assert found == [
        (canonical(run.spec), run.repeat, run.resident, run.init_peak, run.peak) for run in RECORDED.of_several_ranks()
    ]


def ratios(name: str) -> list[float]:
    return [int(row[f"rehearsed_{name}"]) / int(row[f"real_{name}"]) for row in WITH_REAL_RUNS]


def test_memory_between_steps_is_equal_in_rehearsals_and_real_runs() -> None:
    assert ratios("resident_bytes") == pytest.approx([1.0] * len(WITH_REAL_RUNS), rel=0.01)


@pytest.mark.parametrize(("peak", "least", "same"), [("peak_bytes", 0.89, 66), ("init_peak_bytes", 0.87, 70)])
def test_peaks_of_rehearsals_are_at_most_13_percent_below_real_runs(peak: str, least: float, same: int) -> None:
    found = ratios(peak)
    assert least < min(found) <= max(found) <= 1
    assert sum(ratio > 0.9999 for ratio in found) >= same
