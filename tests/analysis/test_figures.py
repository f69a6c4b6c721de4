import dataclasses
import os
import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from records import failed, results, run, spec

from analysis import figures, plotting
from analysis.charts.looks import number_looks
from analysis.results import Results

RUNS = [*(run(spec("ddp", nodes=nodes)) for nodes in (1, 2)), run(), failed("oom", spec("zero3"))]


def test_series_differ_for_every_eye() -> None:
    keys = [plotting.build_legend_entry(str(i), i) for i in range(14)]
    assert len({key.get_color() for key in keys[:7]}) == len({key.get_marker() for key in keys[:7]}) == 7
    assert len({(key.get_color(), key.get_marker()) for key in keys}) == 14
    okabe_ito = {"#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(plotting.COLOURS) - okabe_ito == {"#7F7F7F"}


def test_an_engine_looks_the_same_whatever_stands_beside_it() -> None:
    alone, together = number_looks(["zero2"]), number_looks(["ddp", "mine", "zero1", "zero2", "zero2 checkpointed"])
    assert together["zero2"] == alone["zero2"]
    assert together["mine"] == number_looks(["mine"])["mine"]
    plain, other = (plotting.choose_marker_style(together[name]) for name in ("zero2", "zero2 checkpointed"))
    assert plain["color"] == other["color"] and plain["marker"] != other["marker"]
    engines = number_looks(path.stem for path in Path(__file__).parents[2].glob("conf/engine/*.yaml"))
    assert len(set(engines.values())) == len(engines)


def test_figures_keep_no_state_and_are_the_same_each_time() -> None:
    picture = figures.list_pictures()[0]
    before = matplotlib_state()
    first, second = (figures.render_picture(picture, results(run())) for _ in range(2))
    assert first == second
    assert matplotlib_state() == before
    assert first["pdf"].startswith(b"%PDF")
    assert first["png"].startswith(b"\x89PNG")


def matplotlib_state() -> tuple[list[int], float]:
    return plt.get_fignums(), plt.rcParams["font.size"]


def test_an_inline_figure_is_one_labelled_element_with_ids_of_its_own(svg_alone: None) -> None:
    found = results(*RUNS)
    for picture in figures.list_pictures(found):
        svg = figures.inline_svg(picture.name, figures.render_picture(picture, found)["svg"], picture.alt)
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == picture.alt
        ids = set(re.findall(r'\bid="([^"]+)"', svg))
        assert all(known.startswith(f"{picture.name}-") for known in ids)
        assert {used for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg) for used in pair if used} <= ids
        assert plotting.INK not in svg


def test_a_figure_with_nothing_to_show_is_left_out() -> None:
    one_node, nothing = results(run()), results(failed("oom"))
    names = [
        [picture.name for picture in figures.list_pictures(found)]
        for found in (None, results(*RUNS), one_node, nothing)
    ]
    everything = [
        "answers", "throughput", "step_time", "memory", "memory_by_stage", "strong_scaling", "weak_scaling",
        "best_configurations", "idle_share", "pass_lanes", "rank_spread", "step_series", "loss_curves",
    ]  # fmt: skip
    searches = ["search_history", "search_importance", "search_slices", "search_trials", "search_front"]
    assert names[0] == everything + searches
    without = ("strong_scaling", "idle_share", "pass_lanes", "loss_curves")
    assert names[1] == [name for name in everything if name not in without], "every node count its own global batch"
    assert names[2] == ["throughput", "step_time", "memory", "memory_by_stage", "rank_spread", "step_series"]
    assert names[3] == ["throughput", "step_time", "memory", "memory_by_stage"], "out of memory is shown"


def test_text_of_a_record_is_never_taken_for_mathematics(svg_alone: None) -> None:
    odd = results(run(spec(model={"name": "tiny"}, optimizer={"eps": 1e-6})), run())
    found = dataclasses.replace(odd, table=odd.table.assign(engine="$zero_1$^{"))
    for picture in figures.list_pictures(found):
        assert figures.render_picture(picture, found)["svg"]


@pytest.mark.processes
def test_several_processes_draw_what_one_does(svg_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(run(), run(spec("ddp")))
    alone = [(picture.name, files) for picture, files in figures.render_pictures(found)]
    monkeypatch.setattr(figures, "MANY", 1)
    heard: list[tuple[str, float]] = []
    assert [
        (picture.name, files) for picture, files in figures.render_pictures(found, lambda *one: heard.append(one))
    ] == alone
    of = len(alone)
    assert heard == [(f"drew {done} of {of} figures", done / of) for done in range(1, of + 1)]


@pytest.mark.processes
def test_what_an_ended_process_did_not_draw_is_drawn_here(svg_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found, here = results(run(), run(spec("ddp"))), os.getpid()
    alone = [(picture.name, files) for picture, files in figures.render_pictures(found)]
    draw = figures.render_picture

    def end_in_another_process(picture: figures.Picture, of: Results) -> dict[str, bytes]:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(picture, of)

    monkeypatch.setattr(figures, "MANY", 1)
    monkeypatch.setattr(figures, "render_picture", end_in_another_process)
    assert [(picture.name, files) for picture, files in figures.render_pictures(found)] == alone
