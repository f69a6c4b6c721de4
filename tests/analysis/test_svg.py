"""Tests of the figures that the report's page contains as SVG elements. The tests parse them as XML."""

import dataclasses
import re
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from records import failed, results, run, scattered, spec, steps

from analysis.drawing import COLOURS, INK, Panel, choose_looks
from analysis.drawing.svg import render_key, render_panel
from analysis.figures import build_pictures, throughput
from analysis.report.page import Tips, render_figure
from analysis.report.texts import format_hover
from analysis.results import Results
from analysis.table import list_rows
from bench.core.record import RunRecord

WINDOW = scattered(0.09, 0.1, 0.11)
SVG = "{http://www.w3.org/2000/svg}"


def at(engine: str, micro: int = 2, seconds: tuple[float, ...] = WINDOW, **more: Any) -> RunRecord:
    return run(spec(engine, micro, **more), steps=steps(seconds))


def sweep() -> Results:
    """Return runs of ddp at micro-batches 2, 4 and 8, of which 8 is out of memory, and runs of zero1 at 2 and 8."""
    return results(
        at("ddp"), at("ddp", 4), failed("oom", spec("ddp", 8), reason="<b>full</b>"), at("zero1"), at("zero1", 8)
    )


def read(panel: Panel, describe: Any = lambda tip: "") -> Element:
    (svg,) = render_panel("name", panel, "words", describe)
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))


def test_points_of_a_series_refer_to_their_configurations_in_order() -> None:
    (panel,) = throughput.picture(sweep()).panels
    described: list[str] = []

    def describe(tip: Any) -> str:
        described.append(f"{tip['engine']} {tip['micro']}")
        return f'data-t="{len(described) - 1}"'

    shown: dict[str, list[str]] = {}
    for part in read(panel, describe).iter(f"{SVG}g"):
        for point in part.iter():
            if "data-series" in part.attrib and "data-t" in point.attrib:
                shown.setdefault(part.attrib["data-series"], []).append(described[int(point.attrib["data-t"])])
    assert shown == {"ddp": ["ddp 2", "ddp 4", "ddp 8"], "zero1": ["zero1 2", "zero1 8"]}, "the failure is a text below"


def test_points_are_in_order_of_micro_batch_from_left_to_right() -> None:
    (panel,) = throughput.picture(results(at("ddp"), at("ddp", 4), at("ddp", 8))).panels
    points = [point for point in read(panel, lambda row: f'data-t="{row["micro"]}"').iter() if "data-t" in point.attrib]
    assert [point.attrib["data-t"] for point in points] == ["2", "4", "8"]
    assert sorted(points, key=lambda point: float(point.attrib["x"])) == points
    assert sorted(points, key=lambda point: -float(point.attrib["y"])) == points, (
        "the larger batch computes more tokens per second"
    )


def test_svg_elements_have_a_label_unique_ids_and_the_colours_of_the_page() -> None:
    records = [*(run(spec("ddp", nodes=nodes)) for nodes in (1, 2)), run(), failed("oom", spec("zero3"))]
    found = results(*records)
    for figure, picture in build_pictures(found):
        for place, panel in enumerate(picture.panels):
            for number, svg in enumerate(render_panel(f"{figure.name}-{place}", panel, "a <label>")):
                assert ElementTree.fromstring(svg).get("aria-label") == "a <label>"
                ids = re.findall(r'\bid="([^"]+)"', svg)
                assert len(set(ids)) == len(ids) and all(
                    one.startswith(f"{figure.name}-{place}-{number}-") for one in ids
                )
                used = {one for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg) for one in pair if one}
                assert used <= set(ids)
                assert not any(colour.lower() in svg for colour in (*COLOURS, INK))
                assert "font-family" not in svg, "of the page"


def test_equal_results_give_equal_svg_elements() -> None:
    first, second = (
        [(render_panel(figure.name, panel, ""), [render_key(key, "") for key in picture.keys])
         for figure, picture in build_pictures(sweep()) for panel in picture.panels]
        for _ in range(2)
    )  # fmt: skip
    assert first == second


def test_coordinates_are_rounded_and_texts_are_not() -> None:
    panel = Panel(title=[], draw=lambda axes: axes.text(1 / 3, 1 / 7, "0.01234 s"))
    text = next(one for one in read(panel).iter(f"{SVG}text") if one.text == "0.01234 s")
    assert re.fullmatch(r"\d+\.\d{1,2}", text.attrib["x"])


def test_text_of_a_record_is_escaped_and_never_mathtext() -> None:
    odd = results(run(spec(model={"name": "tiny"}, optimizer={"eps": 1e-6})), run())
    found = dataclasses.replace(odd, table=odd.table.assign(engine="$zero_1$^{<b>"))
    for figure, picture in build_pictures(found):
        for panel in picture.panels:
            for svg in render_panel(figure.name, panel, "alt"):
                ElementTree.fromstring(svg)
                assert "<b>" not in svg


@pytest.mark.parametrize(("panels", "elements", "span"), [(1, 1, 1), (2, 2, 2), (3, 1, 3)])
def test_panels_have_one_svg_element_per_page_width(panels: int, elements: int, span: int) -> None:
    found = results(*(at("ddp", ranks=ranks) for ranks in range(1, panels + 1)))
    figure = next(
        render_figure(one.name, one.title, one.alt, picture, Tips())
        for one, picture in build_pictures(found)
        if one.name == "throughput"
    )
    assert figure.span == span
    assert [len(panel.svgs) for row in figure.rows for panel in row] == [elements] * panels


def test_hover_text_has_configuration_repeats_and_interval() -> None:
    ok, *_, bad = sorted(list_rows(sweep().summary), key=lambda row: row["outcome"])
    lines = format_hover(ok).replace("\xa0", " ").splitlines()
    assert lines[:2] == ["tiny: ddp, micro 2", "2 ranks, fp32, cpu"]
    assert lines[2].startswith("400 tokens/s, ") and lines[2].endswith("(from the steps of one run, indicative, n = 1)")
    assert "OOM: <b>full</b>" in format_hover(bad).splitlines()


def test_engines_of_one_page_have_distinct_colours_if_there_are_enough() -> None:
    for engines in (
        ("ddp", "pipeline"),
        ("zero1", "interleaved", "mine"),
        ("ddp", "zero1", "zero2", "zero3", "fsdp", "lga"),
    ):
        looks = choose_looks(engines)
        assert len({look.colour for look in looks.values()}) == len(engines)
    every = choose_looks(f"engine{number}" for number in range(20))
    assert len({(look.colour, look.marker) for look in every.values()}) == 20
