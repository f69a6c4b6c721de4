"""Each technique against its degree: which points make a curve, what it shows, and what was observed on Frontier."""

import re
from pathlib import Path

import numpy as np
import pytest

from analysis.answer_pages.degrees import DegreeCurve, TechniqueDegrees, build_degrees, draw_degrees, list_degree_rows
from bench import api
from bench.cli import main

T5 = "model=mt5_base machine=h100 devices_per_node=8 nodes=1 batch.micro=1"
SLICED = f"{T5} engine=pipeline batch.global=32 parallel.tensor=1,2,4 parallel.pipeline=2"
FRONTIER = (
    "machine=mi250x engine=pipeline devices_per_node=8 batch.micro=1 activation_checkpointing=true "
    "optimizer.implementation=fused"
)
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "predict.md"


def ask(words: str) -> dict[str, TechniqueDegrees]:
    return {one.name: one for one in build_degrees(api.predict(overrides=words))}


def ask_curve(words: str) -> DegreeCurve:
    """Return the only curve that there is."""
    (technique,) = ask(words).values()
    (curve,) = technique.curves
    return curve


def test_a_curve_shows_what_is_predicted_of_its_points() -> None:
    curve = ask_curve(SLICED)
    assert [point.degree for point in curve.points] == [1, 2, 4]
    for point, one in zip(curve.points, api.predict(overrides=SLICED), strict=True):
        assert one.memory and one.time
        assert (point.memory_bytes, point.mfu) == (one.memory.device, one.time.mfu)
        moved = sum(one.time.parts.get(name, 0.0) for name in ("all-reduce", "gather", "reduce-scatter"))
        assert point.exposed_s == pytest.approx(moved)
        assert point.communication_s == pytest.approx(moved + one.time.hidden_s)


def test_what_else_differs_makes_curves_of_its_own() -> None:
    found = ask(SLICED.replace("pipeline=2", "pipeline=1,2").replace("tensor=1,", "tensor="))
    assert {name: [curve.label for curve in one.curves] for name, one in found.items()} == {
        "tensor parallelism": ["pipeline 1", "pipeline 2"],
        "pipeline": ["tensor 2", "tensor 4"],
    }


@pytest.mark.parametrize(
    "batch", ["batch.accumulation=1", "batch.global=64"], ids=["samples for each rank", "samples in all"]
)
def test_more_copies_are_a_curve_for_each_engine(batch: str) -> None:
    words = T5.replace("nodes=1", "nodes=1,2,4")
    (copies,) = ask(f"{words} engine=zero1,zero3 {batch}").values()
    assert copies.name == "data parallelism"
    assert {curve.label: [point.degree for point in curve.points] for curve in copies.curves} == {
        "zero1": [8, 16, 32],
        "zero3": [8, 16, 32],
    }


def test_points_of_one_degree_or_without_a_time_make_no_curve() -> None:
    assert ask(f"{T5} engine=ddp,zero3") == {}
    assert ask(f"{T5.replace('nodes=1', 'nodes=1,2')} engine=ddp machine.memory_bytes_per_s=null") == {}


def test_the_figure_has_the_points_of_every_curve_and_the_device() -> None:
    (shown,) = ask(SLICED).values()
    (curve,) = shown.curves
    drawn = {
        line.get_gid(): [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]
        for axes in draw_degrees(shown).axes
        for line in axes.lines
    }
    assert drawn["memory-0"] == [(point.degree, point.memory_bytes[0] / 1e9) for point in curve.points]
    assert drawn["communication-0"] == [(point.degree, point.communication_s) for point in curve.points]
    assert drawn["efficiency-0"] == [(point.degree, 100 * (point.mfu or 0)) for point in curve.points]
    assert shown.room_bytes and {y for _, y in drawn["room"]} == {shown.room_bytes / 1e9}


def test_the_page_has_a_table_of_each_technique(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["predict", *SLICED.split(), "--page", "page.html"]) == 0
    page = Path("page.html").read_text()
    section = page[page.index('id="degrees"') : page.index('id="values"')]
    (shown,) = ask(SLICED).values()
    for row in list_degree_rows(shown):
        assert "".join(f'<td class="number">{cell}</td>' for cell in row[1:]) in section
    assert capsys.readouterr().err == ""


# -- what was observed on Frontier (results/published/claims.csv)


def test_slices_over_more_devices_than_a_node_has_make_steps_slower() -> None:
    """F1."""
    words = f"model=gpt_22b {FRONTIER} nodes=16 batch.global=640 parallel.pipeline=8 parallel.tensor=8,16"
    inside, across = ask_curve(words).points
    assert across.step_s > inside.step_s


def test_more_stages_at_as_many_micro_batches_leave_ranks_idle_for_longer() -> None:
    """F2: of stages that take equally long, p - 1 of m + p - 1 passes' time (arXiv 2104.04473, section 2.2.1)."""
    room = "machine.memory_bytes=2e11"  # two stages need more than a device of Frontier has
    words = f"model=gpt_22b {FRONTIER} {room} batch.accumulation=16 engine.cut=blocks nodes=2"
    shares = {}
    for stages in (2, 4, 8):
        (one,) = api.predict(overrides=f"{words} parallel.pipeline={stages}")
        assert one.time
        shares[stages] = one.time.parts["idle"] / one.time.step_s
    assert list(shares.values()) == sorted(shares.values())
    assert shares[8] == pytest.approx(7 / (16 + 7), rel=0.25)


def test_the_guide_has_what_is_predicted() -> None:
    section = (
        GUIDE.read_text(encoding="utf-8").partition("### Each technique against its degree")[2].partition("\n#")[0]
    )
    written = [line for line in section.splitlines() if line.startswith("| gpt_")]
    found = []
    for words in re.findall(r"^zeroscale predict (.*) --page \S+$", section, re.MULTILINE):
        (technique,) = ask(words).values()
        model = words.partition("model=")[2].split()[0]
        found += [f"| {' | '.join([model, technique.name, *cells])} |" for _, *cells in list_degree_rows(technique)]
    assert written == found
