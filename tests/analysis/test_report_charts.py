"""The interactive figures, by what plotly is given to draw."""

from typing import Any

import plotly.graph_objects
import pytest
from records import MIB, failed, memory, results, run, scattered, spec, steps

from analysis.charts.looks import COLOURS, choose_colour
from analysis.figures import list_pictures
from analysis.report.charts import Page, PageChart, build_row_key, choose_symbol, render_chart
from analysis.report.facets import find_facets, find_place
from analysis.results import Results
from analysis.table import list_rows
from bench.record import RunRecord

WINDOW = scattered(0.09, 0.1, 0.11)


def drawn(of: Results) -> dict[str, PageChart]:
    among = find_facets(list_rows(of.table))
    places = {build_row_key(row): index for index, row in enumerate(list_rows(of.summary))}
    page = Page(among, places)
    return {one.name: render_chart(one.name, one.title, one.chart(of), page) for one in list_pictures(of) if one.chart}


def at(engine: str, micro: int = 2, seconds: tuple[float, ...] = WINDOW, **more: Any) -> RunRecord:
    return run(spec(engine, micro, **more), steps=steps(seconds))


def sweep() -> Results:
    """ddp until memory ends it, zero1 with a hole and one run too short for an interval."""
    return results(
        *(at("ddp", micro) for micro in (2, 4)),
        failed("oom", spec("ddp", 8), reason="<b>full</b>"),
        at("zero1", 2),
        at("zero1", 8, (0.1,) * 4),
    )


def numbers(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in panel["data"] if trace["mode"] == "lines+markers"}


def test_plotly_itself_accepts_every_panel() -> None:
    for chart in drawn(sweep()).values():
        for panel in chart.panels:
            plotly.graph_objects.Figure({"data": panel["data"], "layout": panel["layout"]})


def test_throughput_is_drawn_where_it_was_measured_with_its_interval() -> None:
    (panel,) = drawn(sweep())["throughput"].panels
    assert panel["title"] == "tiny · 2 ranks"
    ddp = numbers(panel)["ddp"]
    assert ddp["y"] == pytest.approx([40 * 30 / sum(WINDOW), 80 * 30 / sum(WINDOW)])
    assert [round(x) for x in ddp["x"]] == [0, 1]
    assert panel["layout"]["xaxis"]["ticktext"] == ["2", "4", "8"]
    summary = list_rows(sweep().summary)[0]
    assert ddp["y"][0] + ddp["error_y"]["array"][0] == pytest.approx(summary["tokens_per_s_high"])
    assert ddp["y"][0] - ddp["error_y"]["arrayminus"][0] == pytest.approx(summary["tokens_per_s_low"])


def test_points_are_joined_only_where_neighbours_were_measured() -> None:
    (panel,) = drawn(sweep())["throughput"].panels
    assert None not in numbers(panel)["ddp"]["y"]
    first, between, last = numbers(panel)["zero1"]["y"]
    assert between is None, "micro-batch 4 was not run"
    assert None not in (first, last)


def test_without_an_interval_a_point_is_hollow() -> None:
    (panel,) = drawn(sweep())["throughput"].panels
    assert numbers(panel)["zero1"]["marker"]["symbol"] == ["square", "circle", "square-open"]
    assert numbers(panel)["ddp"]["marker"]["symbol"] == ["circle", "circle"]


def test_what_has_no_number_says_why_below() -> None:
    (panel,) = drawn(sweep())["throughput"].panels
    said = {
        (t["name"], text, x)
        for t in panel["data"]
        if t["mode"] == "text"
        for text, x in zip(t["text"], t["x"], strict=True)
    }
    assert said == {("ddp", "OOM", 2)}, "zero1 was not run at 4, and did not fail there"


def test_hover_tells_configuration_n_and_interval_as_text() -> None:
    (panel,) = drawn(sweep())["throughput"].panels
    (lines,) = (text.replace("\xa0", " ").split("<br>") for text in numbers(panel)["ddp"]["hovertext"][:1])
    assert lines[:2] == ["<b>tiny: ddp, micro 2</b>", "2 ranks, fp32, cpu"]
    assert lines[2].startswith("400 tokens/s, ") and lines[2].endswith("(95 %, within the run, n = 1)")
    (failure,) = (t for t in panel["data"] if t["mode"] == "text" and t["name"] == "ddp")
    assert "OOM: &lt;b&gt;full&lt;/b&gt;" in failure["hovertext"][0]


def test_panels_of_a_model_share_their_scale_and_begin_at_zero() -> None:
    quick = [at("ddp", precision="fp32"), at("ddp", 2, (0.05,) * 30, precision="bf16"), at("ddp", ranks=1)]
    one, *others = [panel["layout"]["yaxis"]["range"] for panel in drawn(results(*quick))["throughput"].panels]
    assert one[0] == 0
    assert [one[1], *(other[1] for other in others)] == [pytest.approx(1.08 * 800)] * 3


def test_memory_is_in_the_largest_unit_that_it_fills() -> None:
    of = results(run(spec("ddp"), memory=memory(2, peak=3 * MIB)))
    (panel,) = drawn(of)["memory"].panels
    assert numbers(panel)["ddp"]["y"] == [4.0], "the rank with most has one MiB more"
    assert panel["layout"]["yaxis"]["title"]["text"] == "peak allocated, MiB"


def test_scaling_is_drawn_where_node_counts_differ() -> None:
    assert not {"weak_scaling", "strong_scaling"} & drawn(sweep()).keys()
    of = results(*(at("zero2", nodes=n, seconds=(s,) * 30) for n, s in ((1, 0.1), (2, 0.125))))
    (panel,) = drawn(of)["weak_scaling"].panels
    assert numbers(panel)["zero2"]["y"] == pytest.approx([1.0, 0.8])
    assert panel["layout"]["xaxis"]["ticktext"] == ["1", "2"]


def test_facets_are_what_differs_and_a_point_knows_its_place_among_them() -> None:
    of = sweep()
    among = find_facets(list_rows(of.table))
    assert [(facet.column, facet.texts) for facet in among] == [
        ("engine", ("ddp", "zero1")), ("micro", ("2", "4", "8")), ("outcome", ("ok", "oom")),
    ]  # fmt: skip
    assert [find_place(row, among) for row in list_rows(of.table)] == ["0,0,0", "0,1,0", "0,2,1", "1,0,0", "1,2,0"]
    (panel,) = drawn(of)["throughput"].panels
    assert numbers(panel)["ddp"]["customdata"][1] == {"f": "0,1,0", "c": 1}


def test_colours_that_come_again_have_another_symbol() -> None:
    looks = [(choose_colour(index), choose_symbol(index)) for index in range(2 * len(COLOURS))]
    assert len(set(looks)) == len(looks)


def test_without_any_number_there_is_no_scale_and_the_reason_stands_below() -> None:
    (panel,) = drawn(results(failed("oom", spec("ddp"))))["throughput"].panels
    assert panel["layout"]["yaxis"]["showticklabels"] is False
    assert [trace["text"] for trace in panel["data"] if trace["mode"] == "text"] == [["OOM"]]


def test_how_long_a_run_was_measured_names_no_series() -> None:
    both = results(at("ddp", 2), at("ddp", 2, measure={"min_steps": 40}), at("zero1", 2))
    assert [label for label, _, _ in drawn(both)["throughput"].keys] == ["ddp", "zero1"]


def test_a_single_value_is_said_beside_the_axis_and_is_no_tick() -> None:
    (panel,) = drawn(results(at("ddp", 2), at("zero1", 2)))["throughput"].panels
    axis = panel["layout"]["xaxis"]
    assert (axis["tickvals"], axis["title"]["text"]) == ([], "micro-batch 2")
