import itertools
from types import ModuleType

import pytest
from drawn import draw, intervals, joins, legend, note, places, points, reasons, shows, strip, titles
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from records import MIB, failed, memory, results, run, scattered, spec, steps

from analysis.drawing import COLOURS, MOST, WHOLE, curves
from analysis.figures import memory as memory_figure
from analysis.figures import memory_by_stage, step_time, throughput
from analysis.stats.intervals import describe_window, rate_interval
from bench.core.spec import RunSpec

WINDOW = scattered(0.09, 0.1, 0.11)


def sweep() -> Figure:
    """Return the throughput figure of three curves over the micro-batch.

    On 2 ranks, ddp runs out of memory at micro-batch 8, and zero1 was not run at micro-batch 4. On 1 rank, only ddp was
    run.
    """
    return draw(
        throughput,
        results(
            *(run(spec("ddp", micro), steps=steps(WINDOW)) for micro in (2, 4)),
            failed("oom", spec("ddp", 8)),
            *(run(spec("zero1", micro), steps=steps(WINDOW)) for micro in (2, 8)),
            run(spec("ddp", 2, ranks=1), steps=steps((0.1,) * 3)),
        ),
    )


def test_throughput_has_a_panel_per_question_in_order_of_ranks() -> None:
    assert titles(sweep()) == ["tiny · 1 rank", "tiny · 2 ranks"]


def test_throughput_draws_measured_rates_at_their_micro_batches() -> None:
    axes = sweep().axes[1]
    assert places(axes) == ["2", "4", "8"]
    rates = [micro * 2 * 10 * 10 for micro in (2, 2, 4, 8)]
    assert [y for _, y in points(axes)] == pytest.approx(rates)
    assert [round(x) for x, _ in points(axes)] == [0, 0, 1, 2]


def test_throughput_joins_only_neighbouring_points() -> None:
    (line,) = joins(sweep().axes[1])  # ddp is joined from 2 to 4; zero1 has no point at 4
    assert to_hex(line.get_color()) == COLOURS[0].lower()
    assert [round(x) for x in line.get_xdata()] == [0, 1]


def test_throughput_shows_out_of_memory_and_nothing_for_points_not_run() -> None:
    axes = sweep().axes[1]
    assert reasons(axes) == {("OOM", "8")}
    assert [line.get_marker() for line in strip(axes)] == ["o"], (
        "its line carries the marker of ddp; zero1 was not run at 4, and did not fail"
    )
    assert min(axes.get_yticks()) == 0


def test_throughput_draws_intervals_and_hollow_points_without_an_interval() -> None:
    one, two = sweep().axes
    assert (len(intervals(one)), len(intervals(two))) == (0, 4)
    (hollow,) = [line for line in one.lines if line.get_marker() == "o"]
    assert hollow.get_markerfacecolor() == "none"
    interval = rate_interval(describe_window(WINDOW).mean, WINDOW, 400)
    assert interval is not None
    assert intervals(two)[0] == pytest.approx(interval[:2])


def test_comparable_panels_share_one_y_axis() -> None:
    """Readers compare neighbouring panels by eye, so all panels have the same y axis."""
    records = [
        run(),
        run(spec(precision="bf16"), steps=steps((0.01,) * 30)),
        run(spec(ranks=1), memory=memory(1, peak=99)),
    ]
    assert len({axes.get_ylim() for axes in draw(memory_figure, results(*records)).axes}) == 1
    assert len({axes.get_ylim() for axes in draw(throughput, results(*records)).axes}) == 1, (
        "comparable panels are in one row"
    )


def test_set_with_only_failures_is_drawn_with_their_reasons() -> None:
    for module in (throughput, memory_figure, step_time):
        (axes,) = draw(module, results(failed("host_oom"), failed("hang", spec("zero2")))).axes
        assert {text for text, _ in reasons(axes)} == {"host OOM", "hang"}
        assert len(axes.get_yticks()) == 0


def test_configurations_of_one_engine_with_other_options_are_separate_series() -> None:
    twins = [run(), run(spec(optimizer={"eps": 1e-6})), run(spec(micro=4))]
    drawn = draw(throughput, results(*twins))
    assert legend(drawn) == ["zero1 (eps=1e-06)", "zero1 (eps=1e-08)"]
    (axes,) = drawn.axes
    assert len(points(axes)) == 3


def stages() -> Figure:
    return draw(
        memory_figure,
        results(
            *(run(spec("ddp", micro), memory=memory(2, peak=micro * 100 * MIB)) for micro in (2, 4)),
            run(spec("zero1", 2), memory=()),
            failed("oom", spec("zero1", 4)),
            run(spec("zero2", 2)),
        ),
    )


def test_memory_figure_draws_the_worst_rank_in_a_readable_unit() -> None:
    (axes,) = stages().axes
    assert [(round(x), y) for x, y in points(axes)] == [(0, 11), (0, 201), (1, 401)]  # MiB
    assert axes.get_ylabel() == "peak allocated memory, MiB"
    assert all(line.get_markerfacecolor() != "none" for line in axes.lines), "memory has no interval to miss"


@pytest.mark.parametrize("module", [memory_figure, memory_by_stage])
def test_memory_of_each_model_has_a_unit_of_its_own(module: ModuleType) -> None:
    sizes = {"large": 3000 * MIB, "small": 30 * MIB}
    records = [run(spec(model={"name": name}), memory=memory(2, peak=peak)) for name, peak in sizes.items()]
    drawn = draw(module, results(*records))
    assert [axes.get_ylabel().split(", ")[1] for axes in drawn.axes] == ["GiB", "MiB"]


def test_memory_figure_shows_the_reason_for_a_missing_number() -> None:
    (axes,) = stages().axes
    assert reasons(axes) == {("unknown", "2"), ("OOM", "4")}


def test_legend_names_every_engine_and_note_names_the_kind_of_interval() -> None:
    drawn = sweep()
    assert legend(drawn) == ["ddp", "zero1"]
    assert (
        note(drawn)
        == "Thin bar: interval from the steps of single runs, indicative. Hollow mark: no interval. Arrow: the "
        "interval ends beyond the axis."
    )


def test_note_names_the_level_of_the_intervals_for_each_number_of_repeats() -> None:
    numbers = {"ddp": 2, "zero1": 3, "zero2": 6}
    records = [
        run(spec(engine), repeat=repeat, steps=steps(WINDOW))
        for engine, repeats in numbers.items()
        for repeat in range(repeats)
    ]
    shown = note(draw(step_time, results(*records)))
    # The range of two or three repeats contains the median unless all of them lie on the same side of it.
    assert shown.startswith("Bar: interval (50 % for 2 repeats, 75 % for 3 repeats, 95 % for 6 repeats). Arrow")


def over_nodes() -> Figure:
    """Return the figure of step times over node counts.

    zero1 ran on 1 and 4 nodes, and was out of memory on 2. zero2 ran on 1 and 2 nodes. zero1 also has a run at
    micro-batch 8 on one node.
    """
    return draw(
        step_time,
        results(
            *(run(spec("zero1", nodes=nodes), steps=steps(WINDOW)) for nodes in (1, 4)),
            failed("oom", spec("zero1", nodes=2)),
            *(run(spec("zero2", nodes=nodes), steps=steps(scattered(0.1, 0.2, 0.3))) for nodes in (1, 2)),
            run(spec("zero1", 8), steps=steps(WINDOW)),
        ),
    )


def test_step_time_has_a_panel_per_micro_batch_with_nodes_on_its_axis() -> None:
    drawn = over_nodes()
    assert titles(drawn) == ["tiny · micro 2", "tiny · micro 8"]
    assert [places(axes) for axes in drawn.axes] == [["1", "2", "4"], ["zero1"]], (
        "an axis with a single tick shows the names of the series"
    )
    assert drawn.axes[0].get_xlabel() == "nodes"
    assert drawn.axes[0].get_ylabel() == "median step time, s"


def test_step_time_draws_medians_with_their_intervals() -> None:
    axes = over_nodes().axes[0]
    assert [(round(x), y) for x, y in points(axes)] == [(0, 0.1), (0, 0.2), (1, 0.2), (2, 0.1)]
    assert intervals(axes) == [(0.09, 0.11), (0.1, 0.3), (0.1, 0.3), (0.09, 0.11)]


def test_points_of_a_curve_are_drawn_exactly_at_their_node_count() -> None:
    assert {x for x, _ in points(over_nodes().axes[0])} == {0, 1, 2}


def test_axis_ends_before_the_end_of_a_wide_interval() -> None:
    wide = run(spec("zero1", nodes=2), steps=steps(scattered(0.01, 0.1, 9.0)))
    (axes,) = draw(step_time, results(run(spec("zero1"), steps=steps(WINDOW)), wide)).axes
    assert intervals(axes)[-1][1] > axes.get_ylim()[1] == pytest.approx(1.08 * 1.5 * 0.1)


def test_step_time_joins_measured_neighbours_and_shows_reasons_for_gaps() -> None:
    axes = over_nodes().axes[0]
    (line,) = joins(axes)  # zero2 is joined from 1 to 2 nodes; zero1 has no point on 2
    assert to_hex(line.get_color()) == COLOURS[2].lower()
    assert reasons(axes) == {("OOM", "2")}


def test_titles_contain_devices_per_node_if_they_differ() -> None:
    drawn = draw(step_time, results(run(spec(ranks=1)), run(spec(ranks=2)), run(spec(model={"name": "other"}))))
    assert titles(drawn) == ["other · micro 2", "tiny · 1 per node · micro 2", "tiny · 2 per node · micro 2"]


def batch_of_8(engine: str, nodes: int, **more) -> RunSpec:
    return spec(engine, nodes=nodes, batch={"micro": 2, "global": 8}, **more)


def test_step_time_of_one_global_batch_is_one_curve() -> None:
    """Strong scaling: the global batch is the same on all node counts, so a step has fewer micro-batches per device on
    more nodes."""
    drawn = draw(step_time, results(*(run(batch_of_8("zero1", nodes)) for nodes in (1, 2))))
    assert titles(drawn) == ["tiny · micro 2 · global batch 8"]
    assert legend(drawn) == ["zero1"]
    assert len(joins(drawn.axes[0])) == 1


def test_step_time_of_equal_work_per_device_is_one_curve() -> None:
    """Weak scaling: a step has 2 micro-batches per device on all node counts, so the global batch grows with the
    nodes."""
    of = [spec(nodes=nodes, batch={"micro": 2, "accumulation": 2}) for nodes in (1, 2)]
    drawn = draw(step_time, results(*map(run, of)))
    assert titles(drawn) == ["tiny · micro 2 · × 2 accumulated"]
    assert len(joins(drawn.axes[0])) == 1


def test_accumulation_is_in_the_title_if_equal_and_in_the_legend_if_different() -> None:
    equal = draw(throughput, results(run(batch_of_8("zero1", 1)), run(batch_of_8("zero2", 1))))
    assert (titles(equal), legend(equal)) == (["tiny · 2 ranks · × 2 accumulated"], ["zero1", "zero2"])
    choice = draw(throughput, results(run(batch_of_8("zero1", 1)), run(spec("zero1"))))
    assert (titles(choice), legend(choice)) == (["tiny · 2 ranks"], ["zero1", "zero1 × 2 accumulated"])


def test_long_titles_stay_within_their_panel() -> None:
    names = [{"name": f"a_model_of_{size}_parameters"} for size in range(3)]
    drawn = draw(throughput, results(*(run(spec(model=name, nodes=nodes)) for name in names for nodes in (16, 32))))
    drawn.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in drawn.axes]
    assert all(left.x1 <= right.x0 for left, right in zip(boxes[::2], boxes[1::2], strict=True)), (
        "a line for each model"
    )
    assert max(box.x1 for box in boxes) <= drawn.bbox.x1


def test_very_long_names_are_truncated() -> None:
    named = [run(spec(model={"name": "m" * 70})), run(spec(model={"name": "m" * 71}))]
    for title in titles(draw(throughput, results(*named))):
        assert title.startswith("mmm")
        assert "… · 2 ranks" in title


def test_many_reasons_make_the_panel_higher_and_do_not_overlap() -> None:
    many = [failed("oom", spec(f"zero{stage}", micro)) for stage in range(9) for micro in (2, 4)]
    drawn = draw(throughput, results(run(spec("ddp", 2)), failed("node_failure", spec("ddp", 4)), *many))
    assert drawn.get_figheight() > draw(throughput, results(run())).get_figheight()
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    boxes = sorted((text.get_window_extent() for text in axes.texts if text.get_position()[0] == 1), key=lambda b: b.y0)
    assert len(boxes) == 10
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))


def test_panels_with_the_fewest_numbers_are_omitted_with_a_note() -> None:
    records = [run(spec(ranks=ranks)) for ranks in range(1, WHOLE + 2)]
    more = [run(spec("zero2", ranks=ranks)) for ranks in range(4, 4 + MOST)]
    drawn = draw(throughput, results(*records, *more))
    assert titles(drawn) == [f"tiny · {ranks} ranks" for ranks in range(4, 4 + MOST)]
    assert note(drawn).endswith("9 of 21 panels are omitted: those with the fewest points of each model.")


def test_set_that_fits_on_a_page_is_drawn_completely() -> None:
    drawn = draw(throughput, results(*(run(spec(ranks=ranks)) for ranks in range(1, WHOLE + 1))))
    assert len(titles(drawn)) == WHOLE
    assert "left out" not in note(drawn)


def test_model_with_few_numbers_keeps_its_panels_next_to_one_with_many() -> None:
    many = [run(spec(engine, ranks=ranks)) for engine in ("ddp", "zero1") for ranks in range(1, WHOLE)]
    large = [run(spec(ranks=ranks, model={"name": "xxl"})) for ranks in (1, 2)]
    shown = titles(draw(throughput, results(*many, *large)))
    assert len(shown) == MOST
    assert {"xxl · 1 rank", "xxl · 2 ranks"} <= set(shown)


def test_curves_with_the_fewest_numbers_are_omitted_with_a_note() -> None:
    records = [run(spec(optimizer={"eps": eps * 1e-8})) for eps in range(2, curves.MAX_CURVES + 4)]
    drawn = draw(throughput, results(*records))
    assert len(legend(drawn)) == len(points(drawn.axes[0])) == curves.MAX_CURVES
    assert note(drawn).endswith("2 of 16 curves are omitted: those with the fewest points.")


def test_panels_without_a_remaining_curve_are_not_drawn() -> None:
    """A figure has a maximum number of curves. The panel of 2 ranks has exactly this number of curves, with two points
    each. The panel of 1 rank has one curve with a single point. This curve is omitted, so its panel must not be drawn.
    """
    many = [
        run(spec(micro=micro, optimizer={"eps": eps * 1e-8}))
        for eps in range(2, curves.MAX_CURVES + 2)
        for micro in (2, 4)
    ]
    drawn = draw(throughput, results(*many, run(spec("ddp", 2, ranks=1))))
    assert titles(drawn) == ["tiny · 2 ranks"]
    assert note(drawn).endswith("1 of 15 curves are omitted: those with the fewest points.")


def test_panel_without_numbers_is_listed_in_the_note_and_not_drawn() -> None:
    drawn = draw(throughput, results(run(), failed("oom", spec(ranks=1)), failed("hang", spec("ddp", ranks=1))))
    assert titles(drawn) == ["tiny · 2 ranks"]
    assert note(drawn).endswith("Panels without any number are omitted: tiny · 1 rank (OOM, hang).")


def test_panels_of_different_models_are_in_different_rows() -> None:
    of = [run(spec(ranks=ranks, model={"name": name})) for name in ("one", "two") for ranks in (1, 2, 3)]
    axes = draw(throughput, results(*of)).axes
    tops = [round(one.get_position().y1, 3) for one in axes]
    assert tops[0] == tops[1] == tops[2] > tops[3] == tops[4] == tops[5]


def test_panels_are_ordered_by_model_size() -> None:
    sizes = {"b_small": 10, "a_large": 1000, "c_middle": 100}
    records = [run(spec(model={"name": name}), parameters=size) for name, size in sizes.items()]
    order = ["b_small · 2 ranks", "c_middle · 2 ranks", "a_large · 2 ranks"]
    assert titles(draw(throughput, results(*records))) == order


def test_single_micro_batch_is_stated_in_the_label_of_the_axis() -> None:
    drawn = draw(throughput, results(run(spec("ddp", 2), steps=steps(WINDOW))))
    assert (places(drawn.axes[0]), drawn.axes[0].get_xlabel()) == (["ddp"], "micro-batch 2")


def test_busy_run_has_a_grey_reason_and_no_number() -> None:
    busy = run(spec("ddp"), load=({"node": 0, "others_share": 0.3},))
    (axes,) = draw(throughput, results(busy, run())).axes
    assert reasons(axes) == {("busy", "2")}
    assert [text.get_alpha() for text in axes.texts] == [0.6]


def test_rehearsal_without_step_times_is_listed_in_the_note() -> None:
    drawn = draw(throughput, results(run(), run(spec(ranks=1), evidence="rehearsed", steps=None)))
    assert note(drawn).endswith("Panels without any number are omitted: tiny · 1 rank · rehearsed (rehearsed).")


def test_figure_of_times_is_omitted_if_all_runs_were_busy() -> None:
    busy = [run(spec("ddp", micro), load=({"node": 0, "others_share": 0.3},)) for micro in (2, 4)]
    assert not shows(throughput, results(*busy))
    assert shows(memory_figure, results(*busy)), "busy runs have valid memory"
    assert reasons(draw(throughput, results(*busy, failed("oom", spec("ddp", 8)))).axes[0]) >= {("OOM", "8")}


def test_panel_with_only_failures_has_no_y_axis() -> None:
    (axes,) = draw(throughput, results(failed("oom", spec("ddp", 2)), failed("oom", spec("ddp", 4)))).axes
    assert (axes.get_ylabel(), list(axes.get_yticks()), axes.get_ylim()[1]) == ("", [], 0)


def test_reasons_are_above_the_names_of_their_curves_if_there_is_one_micro_batch() -> None:
    records = [failed("oom", spec("ddp", 2)), run(spec("zero1", 2)), failed("hang", spec("zero2", 2))]
    (axes,) = draw(throughput, results(*records)).axes
    named = {place: label.get_text() for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert {named[text.get_position()[0]]: text.get_text() for text in axes.texts} == {"ddp": "OOM", "zero2": "hang"}
    assert not strip(axes), "names below the axis replace the markers"


def test_long_rotated_tick_labels_stay_within_their_panel() -> None:
    records = [run(spec(optimizer={"eps": 1e-8, "weight_decay": decay})) for decay in (0.0001, 0.0002, 0.0003, 0.0004)]
    drawn = draw(throughput, results(*records))
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == 4 and min(box.x0 for box in boxes) >= 0
    assert places(axes) == [f"zero1 ({decay})" for decay in ("0.0001", "0.0002", "0.0003", "0.0004")]


def test_note_counts_points_with_rare_flags() -> None:
    unsteady = run(spec("zero1"), steps=steps(WINDOW, steady=False))
    assert "Points with flags: 1 unsteady." in note(draw(throughput, results(run(spec("ddp")), unsteady)))
    assert "Flagged" not in note(draw(throughput, results(run(spec("ddp")))))
