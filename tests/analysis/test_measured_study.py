"""Tests of the Python interface with which notebooks read a study: tables with units, figures by name, and the answer
in sentences."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from records import run, save, spec

import analysis
from analysis.columns import list_all_columns
from analysis.measured_study import MeasuredStudy
from bench.core.errors import UserError

RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"


@pytest.fixture(scope="module")
def study() -> MeasuredStudy:
    return analysis.open_study(RECORDED / "testbed")


def test_dir_of_the_package_lists_documented_public_names() -> None:
    assert dir(analysis) == sorted(analysis.__all__)
    assert all(getattr(analysis, name).__doc__ for name in analysis.__all__)


@pytest.mark.processes
def test_importing_the_package_loads_no_table_or_drawing_library() -> None:
    code = (
        "import sys, analysis; print(sorted({'pandas', 'matplotlib', 'scipy', 'numpy', 'pydantic'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_each_column_of_each_table_has_a_meaning(study: MeasuredStudy) -> None:
    for frame in (study.table, study.full.summary, study.full.best, study.scaling):
        meanings = frame.attrs["meanings"]
        assert [name for name in frame.columns if not meanings.get(name)] == []
        assert frame.attrs["units"].keys() == meanings.keys()
    assert study.table.attrs["units"]["step_s"] == "s"
    assert study.full.best.attrs["units"]["tokens_per_s_low"] == "tokens/s"
    assert study.scaling.attrs["units"]["base_step_s_high"] == "s"


def test_tables_of_a_study_equal_those_of_its_results(study: MeasuredStudy) -> None:
    pd.testing.assert_frame_equal(study.table, study.results.table)
    pd.testing.assert_frame_equal(study.full.summary, study.results.summary)
    assert set(study.best["standing"]) <= {
        "fastest",
        "equal within 3 %",
        "tied",
        "slower",
        "failed",
        "too few repeats to tell",
    }
    assert (study.scaling["speedup"].dropna() > 0).all()
    assert not study.results.table.attrs, "the analysis itself makes no copies of the documentation"


KEEPING = {
    "columns": lambda frame: frame[["engine", "step_s"]],
    "one column": lambda frame: frame["step_s"],
    "rows": lambda frame: frame[frame["outcome"] == "ok"],
    "query": lambda frame: frame.query("nodes > 1"),
    "sort": lambda frame: frame.sort_values("step_s"),
    "head": lambda frame: frame.head(3),
    "copy": lambda frame: frame.copy(),
    "index": lambda frame: frame.set_index("engine").reset_index(),
    "assign": lambda frame: frame.assign(ms=frame["step_s"] * 1000),
    "dropna": lambda frame: frame.dropna(subset="step_s"),
    "concat": lambda frame: pd.concat([frame.head(2), frame.tail(2)]),
}


@pytest.mark.parametrize("operation", KEEPING)
def test_units_and_meanings_survive_the_usual_operations(study: MeasuredStudy, operation: str) -> None:
    kept = KEEPING[operation](study.table)
    assert kept.attrs["units"]["step_s"] == "s"
    assert kept.attrs["meanings"]["step_s"] == "median step time of the window"


def test_units_and_meanings_survive_a_parquet_file(study: MeasuredStudy, tmp_path: Path) -> None:
    study.table.to_parquet(tmp_path / "runs.parquet")
    assert pd.read_parquet(tmp_path / "runs.parquet").attrs == study.table.attrs


def test_columns_without_attributes_are_described_by_their_names(study: MeasuredStudy) -> None:
    found = analysis.describe_columns(study.table.groupby("engine")[["step_s", "nodes"]].median().assign(own=1))
    assert found.loc["step_s"].tolist() == ["s", "median step time of the window"]
    assert found.loc["own"].tolist() == ["", ""]
    assert list(analysis.describe_columns().index) == list(list_all_columns())


def test_figures_are_methods_listed_by_dir(study: MeasuredStudy) -> None:
    assert {"strong_scaling", "step_time"} <= {*dir(study.plot)}
    figure = study.plot.step_time()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it without pyplot"  # type: ignore[attr-defined]
    assert repr(study.plot).startswith("<figures: ")


def test_unknown_and_empty_figures_are_refused_in_one_line(study: MeasuredStudy) -> None:
    with pytest.raises(AttributeError, match=r"^plot\.step_times: no such figure; did you mean step_time\?$"):
        study.plot.step_times  # noqa: B018
    assert not hasattr(study.plot, "_repr_html_")
    smoke = analysis.open_study(RECORDED / "smoke")
    assert "strong_scaling" not in dir(smoke.plot)
    with pytest.raises(UserError, match=r"^plot\.strong_scaling: has no data in these runs; choose from "):
        smoke.plot.strong_scaling()


def test_repr_of_a_study_counts_runs_and_flags(study: MeasuredStudy) -> None:
    assert repr(study) == (
        "<MeasuredStudy: 24 runs of 12 configurations, 24 ok; flags: 24 short, 24 unverified, 23 dirty, 1 unsteady>"
    )


def test_tables_have_their_main_columns_and_full_tables_have_all(study: MeasuredStudy) -> None:
    for short, full in ((study.summary, study.full.summary), (study.best, study.full.best)):
        assert len(short.columns) <= 17 and "flags" in short
        pd.testing.assert_frame_equal(short, full[short.columns])


def test_trusted_runs_exclude_busy_runs_and_drills(tmp_path: Path) -> None:
    load = ({"node": 0, "others_share": 0.3},)
    quiet, busy, drill = run(spec("ddp")), run(spec("zero1"), load=load), run(spec("zero2"), drill="rank=1 step=3")
    study = analysis.open_study(save(tmp_path, quiet, busy, drill))
    assert study.trusted.table["engine"].tolist() == ["ddp"]
    assert study.trusted.summary["step_s"].tolist() == [0.1]
    assert study.trusted.results.record(0).spec.engine.name == "ddp"
    assert "busy" in repr(study) and "busy" not in repr(study.trusted)


def test_answer_without_trusted_runs_has_reason_and_remedy(tmp_path: Path) -> None:
    load = ({"node": 0, "others_share": 0.3},)
    busy = [run(spec("ddp"), load=load, repeat=repeat) for repeat in range(3)]
    study = analysis.open_study(save(tmp_path, *busy, run(spec("zero1"), drill="rank=1 step=3")))
    expected = (
        "None of 4 runs is trusted (3 busy, 1 drill); to add repeats without background load, run the same sweep "
        "command again with --repeats 6 "
        "launcher.quiet_within_s=600."
    )
    assert study.trusted.answer() == expected and study.trusted.trusted.full.answer() == expected
    assert analysis.open_study(save(tmp_path / "one", run(evidence="rehearsed"))).answer() == "No run was measured."


def test_repr_of_results_is_one_line(study: MeasuredStudy) -> None:
    assert repr(study.results) == repr(study).replace("MeasuredStudy", "Results")


def test_answer_is_a_short_text(study: MeasuredStudy) -> None:
    summary, *lines = study.answer().splitlines()
    assert summary.startswith("zero0 was fastest as measured in all 6 answered questions.")
    assert sum(line.startswith("On ") for line in lines) == 6 and len(lines) <= 9


def test_warning_counts_skipped_files_and_lists_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, run())
    for number in range(9):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "record.json").write_text("{}")
    before = set(tmp_path.rglob("*"))
    analysis.open_study(tmp_path)
    assert (
        "skipped, because they are not readable records: 9 of 10 files" in caplog.text and "… and 6 more" in caplog.text
    )
    assert len(caplog.messages) == 5
    assert set(tmp_path.rglob("*")) == before, "nothing is written into the folder"


def test_short_summary_has_the_level_of_its_intervals(tmp_path: Path) -> None:
    study = analysis.open_study(save(tmp_path, run(), run(repeat=1)))
    assert study.summary["interval_level"].tolist() == [0.5]
    for table in (study.table, study.summary):
        assert "of several, see interval_level" in table.attrs["meanings"]["step_s_low"]


def test_best_names_its_questions_and_adapters(tmp_path: Path) -> None:
    lora = {"adapter": {"name": "lora", "rank": 4}}
    records = [run(), run(spec("ddp")), run(spec(**lora)), run(spec("ddp", **lora))]
    best = analysis.open_study(save(tmp_path, *records)).best
    assert best["question"].tolist() == ["tiny · 2 ranks · lora rank=4"] * 2 + ["tiny · 2 ranks · no adapter"] * 2
    assert best["adapter"].tolist() == ["lora rank=4"] * 2 + ["none"] * 2


@pytest.mark.parametrize("wrong", [None, 5, "", [], [None], ["", "runs"]])
def test_paths_of_a_wrong_type_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=re.escape(f"{wrong!r}: is not a path or a list of paths; give a results")):
        analysis.open_study(wrong)


def test_columns_are_described_for_tables_only() -> None:
    with pytest.raises(UserError, match=r"^5: is not a DataFrame; give a table"):
        analysis.describe_columns(5)  # type: ignore[arg-type]
