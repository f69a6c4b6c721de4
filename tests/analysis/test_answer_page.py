"""Tests of the HTML pages that `zeroscale predict` and `zeroscale advise` write: stacked bars, cost against time, and
the Pareto front."""

import functools
import json
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Canvas

from analysis.answer_page import (
    BEST,
    StackedBar,
    build_memory_bars,
    build_time_bars,
    choose_keys,
    draw_bars,
    draw_costs,
    list_points,
    render_advice_page,
    select_drawn,
)
from bench import api
from bench.cli import main
from bench.cli.advice_text import build_text
from bench.predict.advice import find_front
from bench.sweep.advise.search import Answer

ONE = "model=mt5_xl engine=zero2 nodes=2 devices_per_node=8 machine=a100_80"
SEVERAL = "model=mt5_xl engine=ddp,zero3 devices_per_node=8 machine=a100_40"
TRAINING = [
    "model=mt5_xl", "machine=a100_80", "devices_per_node=8", "nodes=1,2,4,8", "max_global_batch=512",
    "engine=ddp,zero1,zero3,lga", "tokens=1e11", "deadline=20d",
]  # fmt: skip

Advise = Callable[..., Answer]


@pytest.fixture(scope="module")
def advise(tmp_path_factory: pytest.TempPathFactory) -> Advise:
    """Function that returns advice without recorded runs. Its arguments are those of `zeroscale advise`. A repeated
    call with the same arguments returns the stored advice of the first call."""
    nothing = tmp_path_factory.mktemp("runs")
    return functools.cache(lambda *words: api.advise(words, results=nothing))


def parts(axes: Axes) -> list[tuple[float, float, str]]:
    """Return begin, end and colour of each segment of the drawn stacked bars."""
    return [(one.get_x(), one.get_x() + one.get_width(), to_hex(one.get_facecolor())) for one in axes.patches]


def test_stacked_bar_draws_its_parts_in_order_with_range_and_limit() -> None:
    bar, keys = StackedBar("a", {"x": 2.0, "y": 3.0}, 5.0, 7.0, 6.0, "may fit"), choose_keys(["y", "x", "z"])
    axes = Canvas().subplots()
    draw_bars(axes, [bar], keys, "GB")
    colours = [to_hex(key.style["facecolor"]) for key in keys]
    assert parts(axes) == [(0, 3, colours[0]), (3, 5, colours[1])], "in the order of the keys"
    assert [list(line.get_xdata()) for line in axes.lines] == [[5, 7], [6, 6]]
    assert axes.get_xlim()[1] > 7
    assert {text.get_text() for text in axes.texts} == {"a", "5–7 GB, may fit"}


def test_parts_have_distinct_colours_and_hatches_beyond_the_number_of_colours() -> None:
    keys = choose_keys(map(str, range(14)))
    assert len({(str(key.style["facecolor"]), str(key.style["hatch"])) for key in keys}) == 14


def test_memory_of_one_point_has_a_bar_per_phase_and_one_for_the_device() -> None:
    (one,) = found = api.predict(overrides=ONE)
    assert one.memory
    *phases, device = build_memory_bars(found, [""])
    totals = [(phase.name, pytest.approx(phase.total / 1e9)) for phase in one.memory.phases]
    assert [(bar.label, sum(bar.parts.values())) for bar in phases] == totals
    assert sum(device.parts.values()) == pytest.approx(device.low) == pytest.approx(one.memory.device[0] / 1e9)
    assert (device.high, device.words) == (one.memory.device[1] / 1e9, "fits")
    assert device.limit == (one.point.composed.machine.memory_bytes or 0) / 1e9


def test_step_time_has_a_bar_of_its_parts_and_a_bar_of_hidden_time() -> None:
    (one,) = found = api.predict(overrides=ONE)
    step, hidden = build_time_bars(found, [""])
    assert one.time
    assert sum(step.parts.values()) == pytest.approx(one.time.step_s)
    assert step.low < sum(step.parts.values()) < step.high
    assert hidden.parts == {"overlapped": one.time.hidden_s}


def test_each_of_several_points_has_a_bar_and_a_row(tmp_path: Path) -> None:
    found = api.predict(overrides=SEVERAL)
    bars = build_memory_bars(found, ["ddp", "zero3"])
    assert [(bar.label, bar.words) for bar in bars] == [("ddp", "does not fit"), ("zero3", "fits")]
    page = write(tmp_path, SEVERAL)
    assert "Does not fit: 1 point; fits: 1 point." in page
    assert re.findall(r">([0-9a-f]{10})</td>", page) == [one.point.config_id for one in found]


def test_page_contains_answer_and_exact_values_and_loads_nothing_external(tmp_path: Path) -> None:
    page = write(tmp_path, ONE)
    (one,) = api.predict(overrides=ONE)
    assert one.memory and one.time
    for phase in one.memory.phases:
        assert f"{phase.total:,}" in page
    for seconds in one.time.parts.values():
        assert f"{seconds:.6g}" in page
    assert "Largest micro-batch: " in page and "tensors of 13 runs took 0.1 to 1.7 % more" in page
    assert one.point.composed.machine.source.split(",")[0] in page
    assert page.count("<figure") == 2
    assert page.count("Thin line") == 2 and page.count("Thick line") == 1, "only memory has a limit"
    assert not re.search(r"<script src|(src|href)=\"(?!#)", page)
    assert "zeroscale predict model=mt5_xl" in page


def test_unavailable_step_time_is_stated_in_place_of_its_figure(tmp_path: Path) -> None:
    page = write(tmp_path, f"{ONE} machine.memory_bytes_per_s=null machine.memory_bytes=null")
    assert page.count("<figure") == 1
    assert "No step time is predicted" in page


def test_page_overwrites_only_html_pages_and_creates_no_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(tmp_path, ONE) == write(tmp_path, ONE)
    other = tmp_path / "config.yaml"
    other.write_text("kept")
    assert refuse(capsys, other) == f"zeroscale: --page {other}: must end in .html; rename the page\n"
    assert other.read_text() == "kept"
    assert refuse(capsys, tmp_path / "config.yaml" / "p.html").endswith("choose another file\n")
    assert refuse(capsys, away := tmp_path / "a" / "b" / "p.html").endswith(
        f"the folder {away.parent} does not exist; create the folder, or choose another file\n"
    )
    assert not (tmp_path / "a").exists(), "a path with a typing error creates no folders"
    (tmp_path / "folder.html").mkdir()
    assert refuse(capsys, tmp_path / "folder.html").endswith("is a folder; name a file in this folder\n")


def refuse(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """Return the error message for a page path that cannot be written."""
    capsys.readouterr()
    assert main(["predict", *ONE.split(), "--page", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def write(folder: Path, words: str) -> str:
    """Run `zeroscale predict` with the arguments `words` and `--page` in `folder`, and return the HTML of the page."""
    path = folder / "prediction.html"
    assert main(["predict", *words.split(), "--page", str(path)]) == 0
    return path.read_text()


@pytest.mark.parametrize(
    ("words", "cost"),
    [
        (["tokens=1e11"], "node-hours"),
        (["tokens=1e11", "price=3"], "cost"),
        ([], "device-seconds per million tokens"),
        (["price=3"], "cost of a million tokens"),
    ],
)
def test_cost_and_time_have_the_units_of_the_question(advise: Advise, words: list[str], cost: str) -> None:
    answer = advise("model=mt5_base", "machine=h100", "devices_per_node=8", "nodes=1,2", "batch.micro=8", *words)
    (point, *_), units = list_points(answer)
    assert units[1] == cost
    spec, tokens = point.choice.spec, answer.query.question.tokens or 1e6
    hours = tokens / point.choice.time.tokens * point.choice.estimate.step_s / 3600
    each = {"node-hours": 1 / 8, "device-seconds per million tokens": 3600}.get(cost, 3)
    assert point.at[1] == pytest.approx(each * hours * spec.world_size)
    assert point.at[0] == pytest.approx(hours * {"hours": 1, "days": 1 / 24, "s per million tokens": 3600}[units[0]])


def test_front_contains_exactly_the_points_not_dominated_by_another(advise: Advise) -> None:
    points, _ = list_points(advise(*TRAINING))
    front = [point.at for point in find_front(points, attrgetter("at"))]
    for point in points:
        better = [o for o in points if o.at != point.at and o.at[0] <= point.at[0] and o.at[1] <= point.at[1]]
        assert bool(better) == (point.at not in front), point.choice.spec
    assert front == sorted(front) and len(front) > 1


def test_drawn_points_are_the_fastest_per_engine_and_node_count_with_front_and_winner(advise: Advise) -> None:
    answer = advise(*TRAINING)
    points, units = list_points(answer)
    winner = next(point for point in points if point.choice is answer.advice.winner)
    shown = select_drawn(points, [winner])
    for group in {(point.choice.spec.engine.name, point.choice.spec.nodes) for point in points}:
        times, own = (
            sorted(p.at[0] for p in some if (p.choice.spec.engine.name, p.choice.spec.nodes) == group)
            for some in (points, shown)
        )
        assert own[:BEST] == times[:BEST]
    front = find_front(shown, attrgetter("at"))
    axes = Canvas().subplots()
    draw_costs(shown, front, winner, units).picture.panels[0].draw(axes)
    lines = {line.get_gid(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines}
    assert lines["front"] == [point.at for point in front]
    assert (lines["winner"], lines["range"]) == ([winner.at], [winner.low, winner.high])
    marked = [at for line in axes.lines if line.get_gid() is None for at in zip(*line.get_data(), strict=True)]
    assert sorted(marked) == sorted(point.at for point in shown)


def test_advice_page_contains_answer_front_rivals_and_rejected_choices(advise: Advise) -> None:
    answer = advise(*TRAINING)
    page = render_advice_page(answer, build_text(answer), "zeroscale advise")
    assert page.count("<figure") == 1
    engines = page[page.index("Each engine at its best") : page.index("Each number of nodes")]
    assert all(f">{choice.spec.engine.name}" in engines for choice in answer.advice.engines)
    rejected = page[page.index('id="rejected"') :]
    assert all(item.what in rejected for item in answer.rejected)
    assert page.count('class="decides"') >= 2


def test_page_option_changes_neither_the_printed_text_nor_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    words = ["advise", "model=mt5_base", "machine=h100", "devices_per_node=8", "nodes=1", "batch.micro=8"]
    assert main(words) == 0
    alone = capsys.readouterr().out
    assert main([*words, "--page", "a/advice.html"]) == 0
    assert capsys.readouterr().out == f"{alone}\npage: a/advice.html\n"
    assert main([*words, "--page", "b.html", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert Path("b.html").read_text() == Path("a/advice.html").read_text()
