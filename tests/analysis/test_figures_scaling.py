import pytest
from drawn import draw, intervals, joins, legend, note, places, points, reasons, shows, titles
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from records import failed, results, run, scattered, spec, steps

from analysis.figures import best_configurations, strong_scaling, weak_scaling
from analysis.results import Results
from analysis.stats.intervals import describe_window, rate_interval


def weak(*, engine: str = "zero1", micro: int = 2, **step_s: float) -> list:
    """Return runs with equal work per device. There is one run for each argument `on<n>`: for example, `on2=0.125`
    gives a run on 2 nodes with a step time of 0.125 s."""
    return [
        run(spec(engine, micro, nodes=int(on[2:])), steps=steps(scattered(0.99 * s, s, 1.01 * s)))
        for on, s in step_s.items()
    ]


def ideal(axes: Axes) -> list[float]:
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    return [line.get_ydata()[0] for line in dashed]


def test_weak_efficiency_is_the_step_time_of_the_base_divided_by_each() -> None:
    drawn = draw(weak_scaling, results(*weak(on1=0.1, on2=0.125, on4=0.2)))
    (axes,) = drawn.axes
    assert titles(drawn) == ["tiny · micro 2"]
    assert places(axes) == ["1", "2", "4"]
    assert [y for _, y in points(axes)] == pytest.approx([1, 0.8, 0.5])
    assert ideal(axes) == [1]
    assert legend(drawn) == ["zero1", "ideal scaling"]


def test_strong_efficiency_is_the_speedup_divided_by_the_node_ratio() -> None:
    of = [spec(nodes=nodes, batch={"micro": 2, "global": 8}) for nodes in (1, 2)]
    halved = [run(one, steps=steps(scattered(0.99 * s, s, 1.01 * s))) for one, s in zip(of, (0.2, 0.125), strict=True)]
    drawn = draw(strong_scaling, results(*halved))
    (axes,) = drawn.axes
    assert titles(drawn) == ["tiny · micro 2 · global batch 8"]
    assert [y for _, y in points(axes)] == pytest.approx([1, 0.8])
    assert len(joins(axes)) == 1, "fewer passes per step on more nodes belong to the same curve"


def test_base_has_its_own_interval_and_other_points_have_theirs() -> None:
    (axes,) = draw(weak_scaling, results(*weak(on1=0.1, on2=0.125))).axes
    base, other = intervals(axes)
    window = tuple(scattered(0.099, 0.1, 0.101))
    rate = rate_interval(describe_window(window).mean, window, 1.0)
    assert rate is not None
    assert base == pytest.approx(rate[:2])
    assert other[0] < 0.8 < other[1]


def test_node_count_out_of_memory_is_labelled_and_interrupts_the_curve() -> None:
    gone = failed("oom", spec(nodes=2))
    (axes,) = draw(weak_scaling, results(*weak(on1=0.1, on4=0.2), gone)).axes
    assert joins(axes) == []
    assert reasons(axes) == {("OOM", "2")}


def test_equal_and_best_micro_batch_have_separate_panels() -> None:
    found = results(*weak(on1=0.1, on2=0.125), *weak(micro=4, on1=0.15, on2=0.3))
    drawn = draw(weak_scaling, found)
    assert titles(drawn) == ["tiny · best micro", "tiny · micro 2", "tiny · micro 4"]
    best = [y for _, y in points(drawn.axes[0])]
    # Samples per second and node are 4 × 2 / 0.15 on one node, and 4 / 0.125 on two nodes.
    assert best == pytest.approx([1, (4 / 0.125) / (8 / 0.15)])


def test_scaling_figures_need_two_measured_node_counts() -> None:
    one = results(*weak(on1=0.1), failed("oom", spec(nodes=2)))
    assert not shows(weak_scaling, one)
    assert not shows(strong_scaling, one)
    two = results(*weak(on1=0.1, on2=0.2))
    assert shows(weak_scaling, two)
    assert not shows(strong_scaling, two)


def best() -> Results:
    """Return three repeats of two engines. They tie on one node, and zero2 is faster on two nodes. On four nodes, zero1
    runs out of memory."""
    thrice = [*weak(on1=0.1, on2=0.2), *weak(engine="zero2", on1=0.1, on2=0.125)]
    return results(
        *(
            one.model_copy(update={"circumstance": one.circumstance.model_copy(update={"repeat": repeat})})
            for one in thrice
            for repeat in range(3)
        ),
        failed("oom", spec(nodes=4)),
        run(spec(model={"name": "other"}), steps=steps(scattered(0.099, 0.1, 0.101)), parameters=9000),
    )


def cell(axes: Axes, column: int, line: int) -> list[str]:
    inside = [text for text in axes.texts if text.get_transform() == axes.transData]
    return [text.get_text() for text in inside if [round(place) for place in text.get_position()] == [column, line]]


def line_names(axes: Axes) -> list[str]:
    """Return the row names of the figure of best configurations."""
    return [text.get_text() for text in axes.texts if text.get_transform() != axes.transData]


def test_cell_has_the_fastest_configuration_its_ties_rate_and_efficiency() -> None:
    axes = draw(best_configurations, best()).axes[0]
    assert line_names(axes) == ["tiny", "other"]
    assert places(axes) == ["1", "2", "4"]
    engine, micro, rate, efficiency = cell(axes, 0, 0)
    assert engine in ("zero1", "zero2")
    assert (micro, rate, efficiency) == ("micro 2 (+1 tied)", "400 tokens/s", "1.00")
    engine, micro, rate, efficiency = cell(axes, 1, 0)
    assert (engine, micro, rate) == ("zero2", "micro 2", "640 tokens/s")
    (cells,) = [draw(best_configurations, results(*weak(on1=0.1, on2=0.2), *weak(engine="zero2", on1=0.1)))]
    assert cell(cells.axes[0], 0, 0)[1] == "micro 2 (+1 open)", "too few repeats to tell whether they tie"
    value, interval = efficiency.split(" ", 1)
    low, high = map(float, interval.strip("()").split("–"))
    assert low <= float(value) == 0.8 <= high


def test_cells_without_a_number_are_hatched_and_show_the_reason() -> None:
    axes = draw(best_configurations, best()).axes[0]
    assert cell(axes, 2, 0) == ["OOM"]
    assert cell(axes, 1, 1) == cell(axes, 2, 1) == ["not run"]
    hatched = [patch.get_center() for patch in axes.patches if patch.get_hatch()]
    assert sorted((int(x), int(y)) for x, y in hatched) == [(1, 1), (2, 0), (2, 1)]


def test_cells_are_coloured_by_efficiency_with_readable_text() -> None:
    axes = draw(best_configurations, best()).axes[0]
    full, less = (next(p for p in axes.patches if tuple(p.get_center()) == (column, 0)) for column in (0, 1))
    assert sum(full.get_facecolor()) > sum(less.get_facecolor()), "brighter is better, in grey as well"
    colours = {to_hex(text.get_color()) for text in axes.texts if text.get_text() == "640 tokens/s"}
    assert colours == {"#000001"}


def test_heat_map_needs_runs_on_two_node_counts() -> None:
    assert shows(best_configurations, best())
    assert not shows(best_configurations, results(run()))


def test_lines_with_the_fewest_node_counts_are_omitted_with_a_note() -> None:
    records = [one for ranks in range(1, 17) for one in (run(spec(ranks=ranks)), run(spec(ranks=ranks, nodes=2)))]
    drawn = draw(best_configurations, results(*records))
    assert line_names(drawn.axes[0]) == ["tiny"] * 14
    assert note(drawn).endswith("2 of 16 rows are omitted: those with the fewest node counts.")


def test_note_names_the_levels_of_the_bars_at_the_base_and_at_more_nodes() -> None:
    """At the smallest number of nodes (the base), an error bar is the range of three repeats. At more nodes, an error
    bar is the confidence interval of a ratio. The note below the figure must state the confidence level of both."""
    repeated = [
        run(spec(nodes=nodes), repeat=repeat, steps=steps(scattered(0.99 * s, s, 1.01 * s)))
        for nodes in (1, 2)
        for repeat, s in enumerate((0.1 * nodes, 0.101 * nodes, 0.102 * nodes))
    ]
    assert note(draw(weak_scaling, results(*repeated))).startswith(
        "Bar: interval (75 % for 3 repeats, 95 % for the repeats at two node counts). Arrow"
    )
    single = [one for one in repeated if one.circumstance.repeat == 0]
    assert note(draw(weak_scaling, results(*single))).startswith("Thin bar: interval from the steps of single runs")
