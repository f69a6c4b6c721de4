import pytest
from drawn import draw, note, shows, titles
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from records import MIB, failed, memory, results, run, scattered, spec, steps

from analysis.figures import rank_spread, step_series

WINDOW = scattered(0.09, 0.1, 0.11)


def ticks(axes: Axes, y: int, marker: str = "|") -> list[float]:
    """Return the x positions of the ranks that are drawn on line `y`, which shows one run."""
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return sorted(x for line in lines for x, at in zip(line.get_xdata(), line.get_ydata(), strict=True) if at == y)


def names(axes: Axes) -> list[str]:
    """Return the names next to the horizontal lines of the figure. Each line shows one run."""
    return [text.get_text() for text in axes.texts if not isinstance(text, Annotation)]


def numbers(axes: Axes) -> list[str]:
    """Return the numbers of the ranks that are marked as slow."""
    return [text.get_text() for text in axes.texts if isinstance(text, Annotation)]


def test_rank_spread_has_a_line_per_run_with_ranks_relative_to_the_median() -> None:
    own, peaks = draw(rank_spread, results(run(spec(ranks=3), outside_collectives_s=(0.01, 0.02, 0.04)))).axes
    assert names(own) == ["tiny · 3 ranks · zero1, micro 2"]
    assert ticks(own, 0) == pytest.approx([0.5, 1, 2])
    assert ticks(peaks, 0) == pytest.approx([-1, 0, 1])
    assert peaks.get_xlabel() == "difference from the median rank, MiB"


def test_note_mentions_a_missing_memory_panel() -> None:
    alike = tuple(one.model_copy(update={"peak_allocated_bytes": MIB}) for one in memory(2))
    drawn = [draw(rank_spread, results(run(memory=known))) for known in (memory(2), alike)]
    assert [(len(one.axes), "Memory has no panel" in note(one)) for one in drawn] == [(2, False), (1, True)]


def test_straggling_rank_is_marked_with_its_number() -> None:
    own, _ = draw(rank_spread, results(run(spec(ranks=3), outside_collectives_s=(0.1, 0.25, 0.1)))).axes
    assert ticks(own, 0, "D") == pytest.approx([2.5])
    assert ticks(own, 0) == pytest.approx([1, 1])
    assert numbers(own) == ["1"]


def test_ranks_of_a_pipeline_are_compared_with_the_median_of_their_stage() -> None:
    """The ranks of the second pipeline stage take about five times as long as those of the first, and need more memory.
    This alone does not mark them as slow, because each rank is compared with the median of its own stage."""
    of = spec(ranks=4, parallel={"pipeline": 2})
    own, peaks = draw(rank_spread, results(run(of, outside_collectives_s=(0.1, 0.1, 0.4, 0.6)))).axes
    assert ticks(own, 0) == pytest.approx([0.8, 1, 1])
    assert ticks(own, 0, "D") == pytest.approx([1.2])
    assert numbers(own) == ["3"]
    assert ticks(peaks, 0) == [-512, -512, 512, 512]


def test_each_configuration_shows_its_run_with_the_largest_spread_worst_first() -> None:
    alike, apart = {"outside_collectives_s": (0.01, 0.01)}, {"outside_collectives_s": (0.01, 0.03)}
    own, _ = draw(rank_spread, results(run(**alike), run(repeat=1, **apart), run(spec("zero2"), **alike))).axes
    assert [name.split(" · ")[-1] for name in names(own)] == ["zero1, micro 2", "zero2, micro 2"]
    assert ticks(own, 0) == pytest.approx([0.5, 1.5])


def test_equal_configurations_on_two_machines_have_a_line_each() -> None:
    records = [
        run(outside_collectives_s=(0.01, own), machine={"name": name}) for name, own in (("a", 0.03), ("b", 0.01))
    ]
    own, _ = draw(rank_spread, results(*records)).axes
    assert [ticks(own, y) for y in range(2)] == [pytest.approx([0.5, 1.5]), pytest.approx([1, 1])]


def test_name_of_a_line_is_cut_only_at_the_edge_of_the_panel() -> None:
    of = spec(engine="zero2", nodes=4, batch={"micro": 4, "accumulation": 2})
    (own, _) = draw(rank_spread, results(run(of), run())).axes
    assert "tiny · 4 × 2 ranks · zero2 × 2 accumulated, micro 4 [straggler]" in names(own)


def test_times_missing_for_one_rank_are_unknown_for_the_run() -> None:
    partly = run(outside_collectives_s=(0.01,), memory=memory(2, peak=10 * MIB))
    own, peaks = draw(rank_spread, results(run(spec(ranks=3), outside_collectives_s=(0.01,) * 3), partly)).axes
    assert names(own)[1] == "tiny · 2 ranks · zero1, micro 2: unknown"
    assert len(ticks(peaks, 1)) == 2


def test_single_ranks_failures_and_drills_have_no_line() -> None:
    drill = run(spec("zero3"), drill="rank=1 step=3 action=slow")
    assert not shows(rank_spread, results(run(spec(ranks=1)), failed("oom"), drill))
    assert shows(rank_spread, results(run()))


def test_configurations_with_the_smallest_spread_are_omitted_with_a_note() -> None:
    records = [run(spec(micro=micro), outside_collectives_s=(0.01, micro / 100)) for micro in range(1, 24)]
    drawn = draw(rank_spread, results(*records))
    assert names(drawn.axes[0])[0].endswith("micro 23 [straggler]"), "a rare flag stands beside the name"
    assert len(names(drawn.axes[0])) == 20
    assert note(drawn).endswith("3 of 23 configurations are omitted: those with the smallest spread.")


def lines(axes: Axes, colour: str) -> list[tuple[list[float], list[float]]]:
    found = [line for line in axes.lines if line.get_color() == colour and line.get_marker() != "^"]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in found]


def test_warm_up_and_timed_steps_are_drawn_in_order_around_the_cut() -> None:
    (axes,) = draw(step_series, results(run(steps=steps(WINDOW, step_s=(0.12, 0.1, *WINDOW), cut=2)))).axes
    warm, timed = step_series.WARM["color"], step_series.STEP["color"]
    assert lines(axes, warm) == [([0, 1], [0.12, 0.1])]
    assert lines(axes, timed) == [(list(range(2, 32)), list(WINDOW))]
    cut = [line for line in axes.lines if list(line.get_xdata()) == [1.5, 1.5]]
    assert len(cut) == 1


def test_median_and_its_interval_span_the_window() -> None:
    (axes,) = draw(step_series, results(run(steps=steps(WINDOW)))).axes
    band, median = axes.collections
    ends = band.get_paths()[0].get_extents()
    assert (ends.x0, ends.x1, ends.y0, ends.y1) == pytest.approx((5, 34, 0.09, 0.11))
    ((start, end),) = median.get_segments()
    assert (list(start), list(end)) == ([5, 0.1], [34, 0.1])


def test_slow_warm_up_steps_do_not_flatten_the_window() -> None:
    (axes,) = draw(step_series, results(run(steps=steps(WINDOW)))).axes  # 9.9 s each before the cut
    assert axes.get_ylim() == pytest.approx((0, 1.3 * 0.11))
    (beyond,) = [line for line in axes.lines if line.get_marker() == "^"]
    assert list(beyond.get_xdata()) == [0, 1, 2, 3, 4]
    assert [text.get_text().strip() for text in axes.texts] == ["9.90 s"]


def test_step_series_shows_the_fastest_run_per_question_and_unsteady_runs() -> None:
    slow, unsteady = steps((0.2,) * 30), steps((0.3,) * 30, steady=False)
    records = [run(), run(spec("zero2"), steps=slow), run(spec("zero3"), steps=unsteady), run(spec(ranks=1))]
    drawn = draw(step_series, results(*records))
    assert titles(drawn) == [
        "tiny · 2 ranks · zero1, micro 2", "tiny · 2 ranks · zero3, micro 2 [unsteady]",
        "tiny · 1 rank · zero1, micro 2",
    ]  # fmt: skip
    assert note(drawn).endswith("Shown: 3 of 4 timed runs.")


def test_fastest_runs_are_shown_among_many_unsteady_runs() -> None:
    unsteady = [run(spec(micro=micro), steps=steps((0.9,) * 30, steady=False)) for micro in range(1, 20)]
    fastest = [run(spec(ranks=ranks), steps=steps((0.01,) * 30)) for ranks in range(3, 6)]
    drawn = draw(step_series, results(*unsteady, *fastest))
    assert len(drawn.axes) == 12
    assert {f"tiny · {ranks} ranks · zero1, micro 2" for ranks in range(3, 6)} <= set(titles(drawn))


def test_failures_and_drills_have_no_step_series() -> None:
    assert not shows(step_series, results(failed("oom")))
    drill = run(spec("zero3"), drill="rank=1 step=3 action=slow", steps=steps((0.001,) * 30))
    assert titles(draw(step_series, results(run(), drill))) == ["tiny · 2 ranks · zero1, micro 2"]


def test_titles_of_step_series_distinguish_repeats_and_long_options() -> None:
    unsteady = steps((0.3,) * 30, steady=False)
    records = [
        run(spec(optimizer={"lr": lr}), steps=unsteady, repeat=repeat) for lr in (0.001, 0.002) for repeat in range(2)
    ]
    titles = [panel.title for panel in step_series.picture(results(*records)).panels]
    assert len(titles) == 4
    assert len({tuple(title) for title in titles}) == len(titles)
    assert {"repeat 0", "repeat 1"} <= {word for title in titles for word in title}
    assert any(word == "lr=0.001" for title in titles for word in title)
