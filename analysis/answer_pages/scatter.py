"""The figure of cost against time: a sign for each choice by engine, the Pareto front, and the answer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.answer_pages.front import CostLimits, CostPoint, CostUnits
from analysis.answer_pages.rendering import WIDTH_IN
from analysis.charts.looks import number_looks
from analysis.plotting import INK, choose_marker_style, styled
from bench.formatting import format_number

SIGNS = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖"}
_HEIGHT_IN = 3.6
_WIDE = 8
"""Largest over smallest from which an axis is logarithmic."""
_SOLID = 0.55
"""Of a sign, so that others are seen through it."""


class SignLook(NamedTuple):
    """The key of an engine."""

    name: str
    colour: str
    sign: str


class CostFigure(NamedTuple):
    """What is drawn."""

    points: Sequence[CostPoint]
    front: Sequence[CostPoint]
    winner: CostPoint
    units: CostUnits
    limits: CostLimits


def list_looks(points: Sequence[CostPoint]) -> list[SignLook]:
    """Return the key of the engines of points."""
    return build_sign_looks(choose_engine_styles(point.choice.spec.engine.name for point in points))


def build_sign_looks(styles: Mapping[str, dict[str, Any]]) -> list[SignLook]:
    """Return the key of engines by how their signs look."""
    return [SignLook(name, style["color"], SIGNS[style["marker"]]) for name, style in styles.items()]


def choose_engine_styles(engines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return how the sign of each engine looks."""
    return {name: choose_marker_style(number) for name, number in number_looks(set(engines)).items()}


@styled
def draw_costs(shown: CostFigure) -> Figure:
    """Return the figure; signs are filled for what is as sure to fit and to keep the limits as the answer is, and
    hollow for the rest."""
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    _scale_axes(axes, shown)
    for name, style in choose_engine_styles(point.choice.spec.engine.name for point in shown.points).items():
        own = [point for point in shown.points if point.choice.spec.engine.name == name]
        sure = [point for point in own if point.doubt <= shown.winner.doubt]
        rest = [point for point in own if point.doubt > shown.winner.doubt]
        _draw_signs(axes, sure, style | {"gid": f"sure-{name}"})
        _draw_signs(axes, rest, style | {"gid": f"unsure-{name}", "markerfacecolor": "none"})
    _draw_limits(axes, shown.limits)
    _draw_front(axes, shown.front)
    _draw_winner(axes, shown.winner)
    axes.set(xlabel=f"time, {shown.units.time}", ylabel=shown.units.cost)
    axes.grid(axis="both")
    return figure


def _scale_axes(axes: Axes, shown: CostFigure) -> None:
    """Make an axis logarithmic where its values differ widely, with plain numbers beside it."""
    written = FuncFormatter(lambda value, _: format_number(value))
    for place, (axis, choose_scale) in enumerate(((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale))):
        values = [point.at[place] for point in shown.points]
        if max(values) > _WIDE * min(values):
            choose_scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(written)


def _draw_signs(axes: Axes, points: Sequence[CostPoint], style: Mapping[str, Any]) -> None:
    if points:
        xs, ys = zip(*(point.at for point in points), strict=True)
        axes.plot(xs, ys, alpha=_SOLID, markersize=4, markeredgewidth=0.8, **style)


def _draw_limits(axes: Axes, limits: CostLimits) -> None:
    """Draw the limits that lie within the axes' reach or widen it."""
    if limits.time is not None:
        axes.axvline(limits.time, color=INK, linestyle="--", linewidth=1, gid="limit-time")
    if limits.cost is not None:
        axes.axhline(limits.cost, color=INK, linestyle="--", linewidth=1, gid="limit-cost")


def _draw_front(axes: Axes, front: Sequence[CostPoint]) -> None:
    """Draw the front as the least cost of each time, and number its choices, the fastest first."""
    xs, ys = zip(*(point.at for point in front), strict=True)
    axes.plot(xs, ys, color=INK, drawstyle="steps-post", linewidth=1, gid="front")
    for number, point in enumerate(front, start=1):
        axes.annotate(
            str(number), point.at, (-2, -3), textcoords="offset points", ha="right", va="top", fontsize=7,
            fontweight="bold",
        )  # fmt: skip
    axes.annotate("Pareto front", front[0].at, (6, -4), textcoords="offset points", va="top", fontsize=7.5)


def _draw_winner(axes: Axes, winner: CostPoint) -> None:
    """Ring the answer; a line leads from its best case to its worst."""
    ends = list(zip(winner.low, winner.high, strict=True))
    axes.plot(*ends, color=INK, linewidth=1, marker="|", markersize=5, gid="winner-range")
    at = [[value] for value in winner.at]
    axes.plot(*at, marker="o", markersize=10, markerfacecolor="none", color=INK, linestyle="none", gid="winner")
    axes.annotate(
        "the answer", winner.at, (8, 5), textcoords="offset points", va="bottom", fontsize=7.5, fontweight="bold"
    )
