"""Tests that the example notebooks run from top to bottom on recorded runs, and that their results agree with those of
the analysis."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

import analysis
from analysis import results
from bench.core import store
from docs.generate.notebooks import RUNS, run_notebook

RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"
NOTEBOOKS = sorted(Path(analysis.__file__).parent.glob("notebooks/*.ipynb"))


def executed(name: str, folder: Path, **parameters: Any) -> list[Any]:
    """Execute a notebook with `folder` as working directory. The given parameters replace those in the notebook. Return
    the outputs of its cells in order."""
    cells = run_notebook(name, folder, parameters).cells
    return [output for cell in cells for output in cell.get("outputs", ())]


def join_outputs(outputs: list[Any]) -> str:
    return "\n".join(output.get("data", {}).get("text/html", output.get("text", "")) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_and_begins_with_its_parameters(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}
    assert code[0].metadata.tags == ["parameters"]
    (runs,) = re.findall(r'^RUNS = "(.*)"$', code[0].source, re.MULTILINE)
    assert list(store.find_records([path.parent / runs])), "the default is a path from the notebook to recorded runs"


def test_gallery_contains_every_notebook() -> None:
    assert {*RUNS} == {path.stem for path in NOTEBOOKS}


@pytest.mark.processes
@pytest.mark.thorough
def test_first_look_shows_a_figure_and_column_meanings(tmp_path: Path) -> None:
    outputs = executed("first_look", tmp_path, RUNS=str(RECORDED / "testbed"))
    assert "image/png" in outputs[0].data, "a figure is shown without pyplot"
    assert "median step time" in join_outputs(outputs)


@pytest.mark.processes
@pytest.mark.thorough
def test_reading_results_shows_tables_and_one_figure(tmp_path: Path) -> None:
    outputs = executed("reading_results", tmp_path, RUNS=str(RECORDED / "smoke"))
    first, picture = outputs[0], [output for output in outputs if "image/png" in output.get("data", {})]
    assert first.data["text/html"].count("<tr>") == 20
    assert len(picture) == 1
    for column in ("padding_tokens", "init_peak_bytes"):
        assert f"<th>{column}</th>" in join_outputs(outputs), "every column is explained"


@pytest.mark.processes
@pytest.mark.thorough
def test_scaling_study_writes_a_figure_of_all_engines(tmp_path: Path) -> None:
    outputs = executed("scaling_study", tmp_path, RUNS=str(RECORDED / "testbed"), FIGURE="figure.svg")
    engines = set(results.read([RECORDED / "testbed"]).table["engine"])
    drawn = (tmp_path / "figure.svg").read_text()
    assert all(f"<!-- {engine} -->" in drawn for engine in engines), "each has its entry in the legend"
    assert "too few repeats to tell" in join_outputs(outputs), (
        "two stages cross or do not only where runs were repeated"
    )


@pytest.mark.processes
@pytest.mark.thorough
def test_comparing_machines_reports_too_few_repeats(tmp_path: Path) -> None:
    machines = ("testbed_400mbit", "testbed_100mbit")
    outputs = executed("comparing_machines", tmp_path, RUNS=str(RECORDED / "testbed"), MACHINES=machines)
    assert "<td>too few repeats to tell</td>" in join_outputs(outputs), "each configuration was measured once"
