"""Tests with points (configurations) that were not run, because they were predicted to exceed the device's memory
(outcome `infeasible`). Tables and figures show these points next to comparable runs, but never as measured points."""

from drawn import draw
from records import failed, results, run, spec

from analysis.drawing import compose
from analysis.figures import build_pictures, memory_by_stage
from analysis.questions import group_by_question
from analysis.scaling.best import best
from analysis.table import list_rows
from bench.core.record import RunRecord

TOO_LARGE = spec("zero0")


def infeasible() -> RunRecord:
    prediction = {"predicted": {"low_bytes": 99}}
    return failed(
        "infeasible",
        TOO_LARGE,
        "predicted to need 99 GB",
        evidence="predicted",
        outcome_evidence=prediction,
        torch=None,
    )


def test_infeasible_point_has_a_row_with_evidence_predicted_and_no_numbers() -> None:
    (row,) = list_rows(results(infeasible()).table)
    assert (row["outcome"], row["evidence"], row["reason"]) == ("infeasible", "predicted", "predicted to need 99 GB")
    assert (row["step_s"], row["peak_allocated_bytes"], row["environment_id"]) == (None, None, None)


def test_infeasible_point_is_listed_under_the_question_of_its_runs() -> None:
    found = results(infeasible(), run())
    [(question, rows)] = group_by_question(found.summary)
    assert question["evidence"] == "measured" and {row["outcome"] for row in rows} == {"ok", "infeasible"}
    [answer] = best(found)
    assert answer.fastest and [row["outcome"] for row in answer.failed] == ["infeasible"]


def test_measured_run_replaces_the_infeasible_point_except_in_the_run_table() -> None:
    found = results(infeasible(), run(TOO_LARGE), run())
    [(_, rows)] = group_by_question(found.summary)
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert len(found.table) == 3


def test_rehearsals_are_a_separate_question() -> None:
    found = results(infeasible(), run(), run(spec("zero3"), evidence="rehearsed"))
    assert [question["evidence"] for question, _ in group_by_question(found.summary)] == ["measured", "rehearsed"]


def test_figures_label_infeasible_points_and_call_no_number_predicted() -> None:
    found = results(infeasible(), run())
    drawn = draw(memory_by_stage, found)
    texts = [text.get_text() for axes in drawn.axes for text in axes.texts]
    assert "infeasible" in texts
    legend = [text.get_text() for one in drawn.legends for text in one.get_texts()]
    assert "measured: peak allocated memory" in legend
    assert all(compose(picture).axes for _, picture in build_pictures(found))
