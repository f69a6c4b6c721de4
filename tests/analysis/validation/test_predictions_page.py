"""Tests of the page that compares predictions with measurements: signed errors, bounds on errors, and that the
committed files are up to date."""

import csv
import io
from decimal import Decimal
from pathlib import Path

import pytest

from analysis.validation import (
    PredictionComparison,
    PredictionPoint,
    judge_point,
    published_memory,
    recorded,
    summarise_comparison,
)
from analysis.validation import __main__ as ledger
from bench.core.store import find_records

ROOT = Path(__file__).parents[3]
PAGE_FOLDER = ROOT / "results" / "predictions"
RECORDED = recorded.RecordedRuns(ROOT / "results")
HOLDS = {
    "zero_table", "peak_memory_building", "rehearsed_resident", "rehearsed_building", "rehearsed_beside_real_resident",
    "fit_boundaries", "step_times_blind", "step_times", "published_steps_aside",
    "published_steps_left_out", "published_steps", "gpt_times_aside", "gpt_times", "t5_times", "frontier_peak",
}  # fmt: skip
"""Names of the comparisons whose errors are within their bound today. Later changes to predictions must keep them
within it."""


def comparison(*points: PredictionPoint, **more: object) -> PredictionComparison:
    return PredictionComparison("name", "Title", "Text.", points, unit="bytes", **more)  # type: ignore[arg-type]


def judged(
    what: str, predicted: float, truth: float, *, rival: float | None = None, reason: str = ""
) -> PredictionPoint:
    """Return a point of a comparison between predicted and published values. The comparison allows an error of 5 %."""
    return judge_point(PredictionPoint(what, predicted, truth, rival=rival, reason=reason), 5)


# -- points and bounds


def test_errors_are_signed_and_points_beyond_the_bound_are_exceptions() -> None:
    below, above = judged("a", 95, 100, reason="why"), judged("b", 106, 100, reason="why")
    assert below.error == pytest.approx(-5)
    assert above.error == pytest.approx(6)
    assert [(point.verdict, point.reason) for point in (below, above)] == [("ok", ""), ("exception", "why")]


def test_bound_of_the_mean_applies_to_absolute_errors() -> None:
    points = judged("a", 97, 100), judged("b", 103, 100)
    summary = summarise_comparison(comparison(*points, each=5.0, mean=2.0))
    assert summary.mean == pytest.approx(3)
    assert (summary.low, summary.high) == (pytest.approx(-3), pytest.approx(3))
    assert summary.verdict == "missed"
    assert summarise_comparison(comparison(*points, each=5.0, mean=3.1)).verdict == "holds"


def test_exception_misses_the_bound_unless_explained_and_excused() -> None:
    explained, bare = judged("a", 200, 100, reason="why"), judged("a", 200, 100)
    assert summarise_comparison(comparison(explained)).verdict == "missed"
    assert summarise_comparison(comparison(explained, excused=True)).verdict == "holds"
    assert summarise_comparison(comparison(bare, excused=True)).verdict == "missed"


def test_points_that_are_not_testable_are_counted_without_effect_on_the_verdict() -> None:
    unknown = PredictionPoint("a", 1.0, None, verdict="not testable", reason="not recorded")
    assert summarise_comparison(comparison(unknown)).verdict == "nothing to compare"
    summary = summarise_comparison(comparison(unknown, judged("b", 100, 100)))
    assert (summary.points, summary.not_testable, summary.verdict) == (2, 1, "holds")


def test_rival_predictions_are_compared_with_the_same_measurements() -> None:
    summary = summarise_comparison(comparison(judged("a", 100, 100, rival=150), judged("b", 100, 100)))
    assert summary.rival_mean == pytest.approx(50)


def test_comparison_without_points_is_listed_on_the_page() -> None:
    nothing = comparison()
    assert summarise_comparison(nothing).verdict == "nothing to compare"
    assert "| [Title](name.csv) | 0 | 0 | 0 | – |" in ledger.to_markdown([nothing])


def test_error_that_rounds_to_zero_has_no_sign() -> None:
    text = ledger.to_markdown([comparison(judged("a", 1e9 - 1, 1e9), judged("b", 96e7, 1e9))])
    assert "| -4.00 to 0.00 % |" in text


# -- ZeRO's table


@pytest.mark.parametrize(
    ("printed", "exact", "right"),
    [("41.3", "41.25", True), ("4187", "4187.5", True), ("1.88", "1.875", True), ("41.3", "41.2", False)],
)
def test_printed_cell_may_be_rounded_or_truncated(printed: str, exact: str, right: bool) -> None:
    assert published_memory.is_printed_form(printed, Decimal(exact)) is right


# -- the committed page


@pytest.fixture(scope="module")
def found() -> list[PredictionComparison]:
    return ledger.compare_all(RECORDED)


def test_committed_files_equal_the_output_of_the_command(found: list[PredictionComparison]) -> None:
    """After a failure, write the files again with `make predictions`, and review the changes before the commit."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in PAGE_FOLDER.iterdir() if path.is_file()}
    assert committed == ledger.render_files(found)


def test_bounds_that_hold_today_still_hold(found: list[PredictionComparison]) -> None:
    assert {one.name for one in found if summarise_comparison(one).verdict == "holds"} >= HOLDS


def test_predictions_made_before_the_runs_have_the_ids_of_the_runs() -> None:
    foretold = {row["config_id"] for row in RECORDED.table("predicted_blind")}
    assert foretold == {path.parts[-3] for path in find_records([RECORDED.runs / "peaks"])}


def test_each_recorded_run_is_a_point(found: list[PredictionComparison]) -> None:
    runs = list(find_records([RECORDED.runs / "peaks", RECORDED.runs / "smoke"]))
    of = {one.name: one for one in found}
    for name in ("peak_memory", "peak_memory_building"):
        assert len(of[name].points) == len(runs) + len(RECORDED.table("peaks"))


def test_names_of_points_are_unique_and_exceptions_have_a_reason(found: list[PredictionComparison]) -> None:
    for one in found:
        names = [point.what for point in one.points]
        assert len(set(names)) == len(names), one.name
        assert all(point.reason for point in one.points if point.verdict != "ok"), one.name
        assert one.why or summarise_comparison(one).verdict != "missed", one.name


def test_each_point_is_in_a_table_and_each_table_is_linked(found: list[PredictionComparison]) -> None:
    text = ledger.to_markdown(found)
    for one in found:
        rows = list(csv.DictReader(io.StringIO(ledger.to_csv(one))))
        assert [row["what"] for row in rows] == [point.what for point in one.points]
        assert f"]({one.name}.csv)" in text
        assert {row["error_unit"] for row in rows} <= {one.error_unit}
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 160


# -- the command


def test_command_writes_the_page_and_prints_every_comparison(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    found: list[PredictionComparison],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "compare_all", lambda _: found)
    assert ledger.main(["--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()] == [*(one.name for one in found), "written"]
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(ledger.render_files(found))


def test_folder_without_recorded_runs_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured" / "two_cores.zip").mkdir(parents=True)
    assert ledger.main([str(tmp_path), "--out", str(tmp_path / "new")]) == 2
    rule = "has no predictions/inputs, with which predictions are compared"
    remedy = "give the folder `results` of a checkout of the repository"
    assert capsys.readouterr().err == f"{tmp_path}: {rule}; {remedy}\n"
    assert not (tmp_path / "new").exists()
