"""The map of nodes and links: the fastest of everything that was weighed, by nodes and the rate of the links."""

import functools
from collections.abc import Callable

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from analysis.answer_pages.advice_page import render_advice_page
from analysis.answer_pages.link_map import FACTORS, LinkMap, build_link_map, describe_link_map, draw_link_map
from analysis.charts.looks import choose_colour, number_looks
from bench import api
from bench.advising.search import Answer
from bench.cli.advice_text import build_text
from bench.predict.step_time import predict_step_time

LARGE = ["model=gpt_22b", "machine=a100_80", "devices_per_node=8", "engine=zero1,zero3,fsdp_hybrid,interleaved"]
SEARCH = [*LARGE, "nodes=1,4", "max_global_batch=128", "activation_checkpointing=true"]

Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Ask for advice where no runs are kept; the same question is answered once."""
    nothing = tmp_path_factory.mktemp("runs")
    return functools.cache(lambda *words: api.advise(words, results=nothing))


def find_map(answer: Answer) -> LinkMap:
    found = build_link_map(answer)
    assert found
    return found


def test_no_choice_is_faster_than_the_one_of_a_cell(ask: Ask) -> None:
    answer = ask(*SEARCH)
    own = answer.request.machine.inter_node_bytes_per_s
    assert own
    cells = {(cell.nodes, cell.link_bytes_per_s): cell for cell in find_map(answer).cells}
    assert cells.keys() == {(nodes, factor * own) for nodes in (1, 4) for factor in FACTORS}
    for (nodes, rate), cell in cells.items():
        machine = answer.request.machine.model_copy(update={"inter_node_bytes_per_s": rate})
        sure = [one for one in answer.choices if one.spec.nodes == nodes and one.candidate.fits]
        times = [(one.spec, predict_step_time(one.spec, machine)) for one in sure]
        most = max(time.tokens_per_s / spec.world_size for spec, time in times)
        assert cell.tokens_per_s == pytest.approx(most)


def test_faster_links_slow_nothing_and_a_node_alone_has_none(ask: Ask) -> None:
    shown = find_map(ask(*SEARCH))
    alone, several = ([cell.tokens_per_s for cell in shown.cells if cell.nodes == nodes] for nodes in (1, 4))
    assert several == sorted(several) and several[0] < several[-1]
    assert set(alone) == {alone[0]}


def test_where_nothing_fits_there_is_no_cell(ask: Ask) -> None:
    answer = ask(*LARGE, "nodes=1,4", "engine=zero3", "activation_checkpointing=false", "batch.micro=4")
    few = answer._replace(choices=[one for one in answer.choices if one.spec.nodes == 4])
    shown = find_map(few)
    assert {cell.nodes for cell in shown.cells} == {4}
    (axes,) = draw_link_map(shown).axes
    assert "nothing fits" in {text.get_text() for text in axes.texts}
    assert "1: nothing fits" in describe_link_map(shown)


def test_one_number_of_nodes_or_unknown_links_make_no_map(ask: Ask) -> None:
    answer = ask(*SEARCH)
    axes = answer.query.axes._replace(nodes=(4,))
    assert build_link_map(answer._replace(query=answer.query._replace(axes=axes))) is None
    machine = answer.request.machine.model_copy(update={"inter_node_bytes_per_s": None})
    assert build_link_map(answer._replace(request=answer.request._replace(machine=machine))) is None


def test_a_cell_has_the_colour_and_sign_of_its_engine_and_its_number(ask: Ask) -> None:
    shown = find_map(ask(*SEARCH))
    axes: Axes = draw_link_map(shown).axes[0]
    looks = number_looks(shown.engines)
    drawn = {patch.get_gid(): to_hex(patch.get_facecolor()).upper() for patch in axes.patches}
    for cell in shown.cells:
        gid = f"cell-{shown.nodes.index(cell.nodes)}-{shown.rates.index(cell.link_bytes_per_s)}"
        assert drawn[gid] == choose_colour(looks[cell.choice.spec.engine.name]).upper()
    assert len(drawn) == len(shown.cells)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["12.5", "25", "50", "100", "200", "400", "800"]
    bold = [label.get_text() for label in axes.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == ["200"], "the machine's own"


def test_what_only_may_fit_is_hollow(ask: Ask) -> None:
    answer = ask(*SEARCH)
    unsure = [one._replace(candidate=one.candidate._replace(fits=None)) for one in answer.choices]
    (axes,) = draw_link_map(find_map(answer._replace(choices=unsure))).axes
    assert {line.get_markerfacecolor() for line in axes.lines} == {"none"}
    (axes,) = draw_link_map(find_map(answer)).axes
    assert "none" not in {line.get_markerfacecolor() for line in axes.lines}


def test_the_page_shows_the_map_in_words_too(ask: Ask) -> None:
    answer = ask(*SEARCH)
    page = render_advice_page(answer, build_text(answer), "zeroscale advise")
    assert 'href="#links"' in page and 'id="links-cell-1-6"' in page
    assert describe_link_map(find_map(answer)) in page
