"""The page of `zeroscale advise`: cost against time, the Pareto front by another rule, the answer and what was left
out."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.answer_pages.advice_page import build_figure, render_advice_page
from analysis.answer_pages.front import BEST, choose_units, compute_limits, find_front, list_points
from analysis.answer_pages.scatter import CostFigure, draw_costs, list_looks
from bench import api
from bench.advising.search import Answer
from bench.cli import main
from bench.cli.advice_text import build_text

TRAINING = [
    "model=mt5_xl", "machine=a100_80", "devices_per_node=8", "nodes=1,2,4,8", "max_global_batch=512",
    "engine=ddp,zero1,zero3,lga", "tokens=1e11", "deadline=20d",
]  # fmt: skip

Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Ask for advice where no runs are kept; the same question is answered once."""
    nothing = tmp_path_factory.mktemp("runs")
    return functools.cache(lambda *words: api.advise(words, results=nothing))


def drawn(figure: Figure, name: str) -> list[tuple[float, float]]:
    """Return the points of the lines of a name, or of those that begin with it."""
    lines: list[Line2D] = [line for line in figure.axes[0].lines if str(line.get_gid()).startswith(name)]
    return [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def show(answer: Answer) -> CostFigure:
    return build_figure(answer, choose_units(answer))


def test_a_choice_stands_at_its_time_and_its_cost(ask: Ask) -> None:
    answer = ask(*TRAINING, "price=2")
    winner = show(answer).winner
    spec, estimate = winner.choice.spec, winner.choice.estimate
    hours = 1e11 / (spec.global_batch * 640) * estimate.step_s / 3600
    units = choose_units(answer)
    size = {"hours": 1, "days": 24}[units.time]
    assert winner.at == pytest.approx((hours / size, 2 * 8 * spec.nodes * hours))
    assert units.cost == "cost"
    assert winner.high[0] / winner.at[0] == pytest.approx(estimate.high_s / estimate.step_s)


@pytest.mark.parametrize(
    ("words", "cost"),
    [
        (["tokens=1e11"], "node-hours"),
        (["tokens=1e11", "price=3"], "cost"),
        ([], "device-seconds per million tokens"),
        (["price=3"], "cost of a million tokens"),
    ],
)
def test_cost_is_in_the_units_of_the_question(ask: Ask, words: list[str], cost: str) -> None:
    answer = ask("model=mt5_base", "machine=h100", "devices_per_node=8", "nodes=1,2", "batch.micro=8", *words)
    units, (point, *_) = choose_units(answer), list_points(answer, choose_units(answer))
    assert units.cost == cost
    spec, tokens = point.choice.spec, answer.query.question.tokens or 1e6
    device_hours = tokens / point.choice.time.tokens * point.choice.estimate.step_s * spec.world_size / 3600
    each = {"node-hours": 1 / 8, "device-seconds per million tokens": 3600}.get(cost, 3)
    assert point.at[1] == pytest.approx(each * device_hours)


def test_nothing_beats_what_is_on_the_front_and_something_beats_the_rest(ask: Ask) -> None:
    answer = ask(*TRAINING)
    points = list_points(answer, choose_units(answer))
    front = find_front(points)
    on_front = {id(point) for point in front}
    for point in points:
        better = [o for o in points if o.at != point.at and o.at[0] <= point.at[0] and o.at[1] <= point.at[1]]
        assert bool(better) == (point.at not in [one.at for one in front]), point.choice.spec
    assert [point.at[0] for point in front] == sorted(point.at[0] for point in front)
    assert len(on_front) == len(front) > 1


def test_the_front_holds_nothing_that_is_less_sure_than_the_answer(ask: Ask) -> None:
    shown = show(ask(*TRAINING))
    assert {point.doubt for point in shown.front} == {shown.winner.doubt}
    assert {point.doubt for point in shown.points} > {shown.winner.doubt}, "some choices may not fit or take too long"


def test_what_is_drawn_is_what_was_weighed(ask: Ask) -> None:
    answer = ask(*TRAINING)
    shown = show(answer)
    figure = draw_costs(shown)
    signs = drawn(figure, "sure-") + drawn(figure, "unsure-")
    assert sorted(signs) == sorted(point.at for point in shown.points)
    assert sorted(drawn(figure, "unsure-")) == sorted(p.at for p in shown.points if p.doubt > shown.winner.doubt)
    assert drawn(figure, "front") == [point.at for point in shown.front]
    assert drawn(figure, "winner-range") == [shown.winner.low, shown.winner.high]
    limit = compute_limits(answer, shown.units).time
    assert {x for x, _ in drawn(figure, "limit-time")} == {limit} == {20 if shown.units.time == "days" else 480}
    assert {"the answer", "Pareto front"} < {text.get_text() for text in figure.axes[0].texts}


@pytest.mark.parametrize(("nodes", "scale"), [("1", "linear"), ("1,16", "log")])
def test_an_axis_is_logarithmic_where_its_values_differ_widely(ask: Ask, nodes: str, scale: str) -> None:
    words = ["model=mt5_base", "machine=h100", "devices_per_node=8", "batch.micro=8", f"nodes={nodes}"]
    (axes,) = draw_costs(show(ask(*words))).axes
    assert (axes.get_xscale(), axes.get_yscale()) == (scale, "linear"), "more nodes save time and hardly cost"


def test_of_each_engine_and_number_of_nodes_the_fastest_are_drawn(ask: Ask) -> None:
    answer = ask(*TRAINING)
    shown = show(answer)
    groups: dict[tuple[str, int], list[float]] = {}
    for point in list_points(answer, shown.units):
        groups.setdefault((point.choice.spec.engine.name, point.choice.spec.nodes), []).append(point.at[0])
    for (engine, nodes), times in groups.items():
        own = [p.at[0] for p in shown.points if (p.choice.spec.engine.name, p.choice.spec.nodes) == (engine, nodes)]
        assert sorted(own)[:BEST] == pytest.approx(sorted(times)[:BEST])
    assert len(list_looks(shown.points)) == len({engine for engine, _ in groups})


def test_the_page_holds_answer_front_rivals_and_what_was_left_out(ask: Ask) -> None:
    answer = ask(*TRAINING)
    page = render_advice_page(answer, build_text(answer), "zeroscale advise")
    assert page.count("<svg") == 2
    assert not re.search(r"<script|(src|href)=\"(?!#)", page)
    front = page[page.index('id="front"') : page.index('id="rivals"')]
    assert front.count("<tr") == 1 + len(show(answer).front)
    engines = page[page.index('id="engines"') : page.index('id="nodes"')]
    assert all(f"<td>{choice.spec.engine.name}" in engines for choice in answer.advice.engines)
    rejected = page[page.index('id="rejected"') :]
    assert all(f'<th scope="row">{item.what}</th>' in rejected for item in answer.rejected)
    assert page.count('class="decides"') >= 2


def test_the_verb_writes_the_page_and_says_the_same_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["advise", "model=mt5_base", "machine=h100", "devices_per_node=8", "nodes=1", "batch.micro=8"]
    assert main(words) == 0
    alone = capsys.readouterr().out
    assert main([*words, "--page", "a/advice.html"]) == 0
    assert capsys.readouterr().out == f"{alone}\npage: a/advice.html\n"
    assert main([*words, "--page", "b.html", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert Path("b.html").read_text() == Path("a/advice.html").read_text()
    assert main([*words, "--page", "advice.txt"]) == 2
    assert capsys.readouterr().err == "zeroscale: --page advice.txt: not the name of a page; let it end in .html\n"
