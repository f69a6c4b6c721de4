import re
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from records import MIB, failed, memory, results, run, scattered, spec, steps

from analysis import drawing, figures
from analysis.figures import memory as memory_figure
from analysis.figures import throughput
from analysis.stats.series import rate_interval

BLUE = drawing.COLOURS[0]
WINDOW = scattered(0.09, 0.1, 0.11)


def points(axes: Axes) -> list[tuple[float, float]]:
    """Where numbers are drawn."""
    marked = [line for line in axes.lines if line.get_marker() != "None" and line.get_gid() != "strip"]
    return sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in marked)


def joins(axes: Axes) -> list[Line2D]:
    """The lines between points."""
    return [line for line in axes.lines if line.get_marker() == "None" and line.get_color() != drawing.INK]


def reasons(axes: Axes) -> set[tuple[str, float, str]]:
    """What the strip below zero says: text, micro-batch, colour."""
    micros = [label.get_text() for label in axes.get_xticklabels()]
    for text in axes.texts:
        assert axes.get_ylim()[0] < text.get_position()[1] < 0
    return {(t.get_text(), micros[round(t.get_position()[0])], to_hex(t.get_color()).upper()) for t in axes.texts}


def sweep() -> Figure:
    """ddp until memory ends it, zero1 with a hole; on 1 rank ddp only."""
    return throughput.figure(
        results(
            *(run(spec("ddp", micro), steps=steps(WINDOW)) for micro in (2, 4)),
            failed("oom", spec("ddp", 8)),
            *(run(spec("zero1", micro), steps=steps(WINDOW)) for micro in (2, 8)),
            run(spec("ddp", 2, ranks=1), steps=steps((0.1,) * 3)),
        )
    )


def test_throughput_has_a_panel_per_question_in_order_of_ranks() -> None:
    assert [axes.get_title(loc="left") for axes in sweep().axes] == ["tiny · 1 rank", "tiny · 2 ranks"]


def test_throughput_draws_what_was_measured_where_it_was() -> None:
    axes = sweep().axes[1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]
    rates = [micro * 2 * 10 * 10 for micro in (2, 2, 4, 8)]
    assert [y for _, y in points(axes)] == pytest.approx(rates)
    assert [round(x) for x, _ in points(axes)] == [0, 0, 1, 2]


def test_throughput_joins_neighbours_only() -> None:
    (line,) = joins(sweep().axes[1])  # ddp from 2 to 4; zero1 has nothing at 4
    assert to_hex(line.get_color()) == drawing.COLOURS[0].lower()
    assert [round(x) for x in line.get_xdata()] == [0, 1]


def test_throughput_shows_out_of_memory_and_holes() -> None:
    axes = sweep().axes[1]
    assert reasons(axes) == {("OOM", "8", BLUE), ("not run", "4", drawing.INK.upper())}
    strip = [line for line in axes.lines if line.get_gid() == "strip"]
    assert [line.get_marker() for line in strip] == ["o", "s"], "its lines carry the markers of ddp and zero1"
    assert min(axes.get_yticks()) == 0


def test_throughput_draws_intervals_and_hollow_points_without() -> None:
    one, two = sweep().axes
    assert (len(one.collections), len(two.collections)) == (0, 4)
    (hollow,) = [line for line in one.lines if line.get_marker() == "o"]
    assert hollow.get_markerfacecolor() == "none"
    (segment,) = two.collections[0].get_segments()
    interval = rate_interval(WINDOW, 400)
    assert interval is not None
    assert sorted(segment[:, 1]) == pytest.approx(interval[:2])


def test_what_compares_has_one_scale() -> None:
    """Memory is per rank; throughput grows with the ranks, and compares among equal ones."""
    records = [
        run(),
        run(spec(precision="bf16"), steps=steps((0.01,) * 30)),
        run(spec(ranks=1), memory=memory(1, peak=99)),
    ]
    assert len({axes.get_ylim() for axes in memory_figure.figure(results(*records)).axes}) == 1
    limits = {axes.get_title(loc="left"): axes.get_ylim() for axes in throughput.figure(results(*records)).axes}
    assert limits["tiny · 2 ranks · bf16"] == limits["tiny · 2 ranks · fp32"] != limits["tiny · 1 rank · fp32"]


def test_a_set_without_any_number_is_still_drawn() -> None:
    for module in (throughput, memory_figure):
        (axes,) = module.figure(results(failed("host_oom"), failed("hang", spec("zero2")))).axes
        assert {text for text, _, _ in reasons(axes)} == {"host OOM", "hang"}
        assert len(axes.get_yticks()) == 0


def test_configurations_of_one_engine_that_differ_elsewhere_are_series_of_their_own() -> None:
    twins = [run(), run(spec(optimizer={"eps": 1e-6})), run(spec(micro=4))]
    drawn = throughput.figure(results(*twins))
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
        "zero1 (optimizer.eps=1e-06)", "zero1 (optimizer.eps=1e-08)"
    ]  # fmt: skip
    (axes,) = drawn.axes
    assert len(points(axes)) == 3


def stages() -> Figure:
    return memory_figure.figure(
        results(
            *(run(spec("ddp", micro), memory=memory(2, peak=micro * 100 * MIB)) for micro in (2, 4)),
            run(spec("zero1", 2), memory=()),
            failed("oom", spec("zero1", 4)),
            run(spec("zero2", 2)),
        )
    )


def test_memory_draws_the_worst_rank_in_a_readable_unit() -> None:
    (axes,) = stages().axes
    assert [(round(x), y) for x, y in points(axes)] == [(0, 201), (0, 11), (1, 401)]  # MiB
    assert axes.get_ylabel() == "peak allocated, MiB"
    assert all(line.get_markerfacecolor() != "none" for line in axes.lines), "memory has no interval to miss"


def test_memory_shows_why_a_number_is_not_there() -> None:
    (axes,) = stages().axes
    orange = drawing.COLOURS[1]
    assert reasons(axes) == {("unknown", "2", orange), ("OOM", "4", orange), ("not run", "4", drawing.INK.upper())}


def test_the_legend_names_every_engine_and_the_note_says_which_interval() -> None:
    drawn = sweep()
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["ddp", "zero1"]
    assert drawn.get_supxlabel() == "Bars: interval (95 %, within the run). Hollow: none is known."


def test_series_differ_for_every_eye() -> None:
    keys = [drawing.key(str(i), i) for i in range(7)]
    assert len({key.get_color() for key in keys}) == len({key.get_marker() for key in keys}) == 7
    okabe_ito = {"#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(drawing.COLOURS) - okabe_ito == {"#7F7F7F"}


def test_figures_keep_no_state_and_are_the_same_each_time() -> None:
    picture = figures.pictures()[0]
    before = matplotlib_state()
    first, second = (figures.render(picture, results(run())) for _ in range(2))
    assert first == second
    assert matplotlib_state() == before
    assert first["pdf"].startswith(b"%PDF")
    assert first["png"].startswith(b"\x89PNG")


def matplotlib_state() -> tuple[list[int], float]:
    return plt.get_fignums(), plt.rcParams["font.size"]


def test_an_inline_figure_is_one_labelled_element_with_ids_of_its_own() -> None:
    for picture in figures.pictures():
        svg = figures.inline(picture.name, figures.render(picture, results(run()))["svg"], picture.alt)
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == picture.alt
        ids = set(re.findall(r'\bid="([^"]+)"', svg))
        assert all(known.startswith(f"{picture.name}-") for known in ids)
        assert {used for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg) for used in pair if used} <= ids
        assert drawing.INK not in svg
