"""The page of `zeroscale advise`: the answer, cost against time with the Pareto front, rivals, what was left out."""

from typing import TYPE_CHECKING

from analysis.answer_pages.front import (
    BEST,
    CostPoint,
    CostUnits,
    choose_units,
    compute_limits,
    find_front,
    list_points,
    select_drawn,
)
from analysis.answer_pages.link_map import build_link_map, describe_link_map, draw_link_map
from analysis.answer_pages.rendering import render_figure
from analysis.answer_pages.scatter import CostFigure, build_sign_looks, choose_engine_styles, draw_costs, list_looks
from analysis.formats import load_template
from bench.formatting import describe_choice, format_count, format_interval
from bench.predict.memory import format_gigabytes

if TYPE_CHECKING:
    from bench.advising.search import Answer
    from bench.cli.advice_text import AdviceText


def render_advice_page(answer: "Answer", text: "AdviceText", command: str) -> str:
    """Return the page as HTML; `text` is the answer in words, `command` what gave it."""
    units = choose_units(answer)
    shown, links = build_figure(answer, units), build_link_map(answer)
    return load_template("analysis.answer_pages", "advice.html.j2").render(
        text=text,
        command=command,
        figure=render_figure("cost", draw_costs(shown), _describe_figure(shown)),
        looks=list_looks(shown.points),
        links=links and render_figure("links", draw_link_map(links), describe_link_map(links)),
        link_looks=build_sign_looks(choose_engine_styles(links.engines)) if links else [],
        unsure_links=links is not None and not all(cell.fits for cell in links.cells),
        front=[_build_row(number, point, shown) for number, point in enumerate(shown.front, start=1)],
        on_front=any(point.choice is shown.winner.choice for point in shown.front),
        hollow=any(point.doubt > shown.winner.doubt for point in shown.points),
        limited=shown.limits.time is not None or shown.limits.cost is not None,
        units=units,
        drawn=len(shown.points),
        weighed=len(answer.choices),
        best=BEST,
    )


def build_figure(answer: "Answer", units: CostUnits) -> CostFigure:
    """Return what is drawn: the front is of those that are as sure to fit and to keep the limits as the answer."""
    points = list_points(answer, units)
    winner = next(point for point in points if point.choice is answer.advice.winner)
    front = find_front(point for point in points if point.doubt <= winner.doubt)
    return CostFigure(select_drawn(points, [*front, winner]), front, winner, units, compute_limits(answer, units))


def _describe_figure(shown: CostFigure) -> str:
    """Return the figure in words, for who does not see it."""
    engines = ", ".join(dict.fromkeys(point.choice.spec.engine.name for point in shown.front))
    return (
        f"{shown.units.cost} against time of {format_count(len(shown.points), 'choice')}; the Pareto front has "
        f"{len(shown.front)}, of {engines}; the answer is {shown.winner.choice.spec.engine.name}"
    )


def _build_row(number: int, point: CostPoint, shown: CostFigure) -> list[str]:
    """Return a choice on the front as cells."""
    (time, cost), (low_time, low_cost), (high_time, high_cost) = point.at, point.low, point.high
    return [
        str(number),
        point.choice.spec.engine.name,
        describe_choice(point.choice.spec),
        format_interval(time, low_time, high_time),
        format_interval(cost, low_cost, high_cost),
        "–".join(dict.fromkeys(map(format_gigabytes, point.choice.candidate.memory.device))),
        "the answer" if point.choice is shown.winner.choice else "",
    ]
