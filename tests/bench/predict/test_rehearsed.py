"""Memory of one rank of up to 1,024: predictions compared with rehearsals, and rehearsals with real runs."""

from pathlib import Path

import pytest

from analysis.validation.recorded import RecordedRuns
from bench.core.spec import MeasureSpec, RunSpec, canonical
from bench.predict.memory import predict_memory
from tests.benchmarks.rehearsals import SEEN, build_spec, list_cases

RECORDED = RecordedRuns(Path(__file__).parents[3] / "results")
REHEARSED = list(RECORDED.tabled("rehearsed"))
BESIDE_REAL = RECORDED.table("rehearsed_beside_real")


def test_predictions_are_within_three_percent_of_rehearsals() -> None:
    for run in REHEARSED:
        foretold = predict_memory(run.spec, "cpu", rehearsed=True)
        assert foretold.resident == pytest.approx(run.resident, rel=0.003)
        assert foretold.init_peak == pytest.approx(run.init_peak, rel=0.03)
        assert foretold.peak == pytest.approx(run.peak, rel=0.03)


def test_every_case_was_rehearsed_as_it_is_composed() -> None:
    """A failure means that the configuration of a case has changed. Rehearse the case again with
    `tests.benchmarks.rehearsals`."""
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


def test_rehearsals_of_few_ranks_are_foretold_and_bounded_where_a_checkpointed_forward_has_the_peak() -> None:
    for row in BESIDE_REAL:
        spec = RunSpec.model_validate_json(row["spec"])
        foretold = predict_memory(spec, "cpu", rehearsed=True)
        bounded = spec.engine.options.get("stage") == 3 and spec.activation_checkpointing
        assert 0.985 < foretold.peak / int(row["rehearsed_peak_bytes"]) < (1.052 if bounded else 1.03)
        assert foretold.resident == pytest.approx(int(row["rehearsed_resident_bytes"]), rel=0.003)


def test_real_numbers_are_those_recorded_and_no_run_is_left_out() -> None:
    found = [(row["spec"], int(row["repeat"]), *(int(row[f"real_{name}"]) for name in SEEN)) for row in BESIDE_REAL]
    assert found == [
        (canonical(run.spec), run.repeat, run.resident, run.init_peak, run.peak) for run in RECORDED.of_several_ranks()
    ]


def ratios(name: str) -> list[float]:
    return [int(row[f"rehearsed_{name}"]) / int(row[f"real_{name}"]) for row in BESIDE_REAL]


def test_between_steps_a_rehearsal_holds_what_a_real_rank_holds() -> None:
    assert ratios("resident_bytes") == pytest.approx([1.0] * len(BESIDE_REAL), rel=0.01)


@pytest.mark.parametrize(("peak", "least", "same"), [("peak_bytes", 0.89, 66), ("init_peak_bytes", 0.87, 70)])
def test_at_its_peak_it_lacks_at_most_what_gloo_copies_and_keeps(peak: str, least: float, same: int) -> None:
    found = ratios(peak)
    assert least < min(found) <= max(found) <= 1
    assert sum(ratio > 0.9999 for ratio in found) >= same
