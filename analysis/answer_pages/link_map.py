"""A map of nodes and links: which choice is the fastest on so many nodes if the links between them are slower or faster
than the machine's, and where nothing fits. The search is that of the advice; times are predicted anew."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.answer_pages.rendering import WIDTH_IN
from analysis.answer_pages.scatter import choose_engine_styles
from analysis.plotting import INK, styled
from bench.formatting import format_number
from bench.machine import Machine
from bench.predict.advice.choices import Choice
from bench.predict.step_time import predict_step_time

if TYPE_CHECKING:
    from bench.advising.search import Answer

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Rates of the links between nodes over the machine's own."""

_GB = 1e9
_ROW_IN, _AROUND_IN = 0.34, 0.6
_FILLED, _PALE = 0.35, 0.15  # of a cell: what surely fits, and what may


class LinkCell(NamedTuple):
    """The fastest choice on so many nodes with links of a rate."""

    nodes: int
    link_bytes_per_s: float
    choice: Choice
    tokens_per_s: float  # of a device

    @property
    def fits(self) -> bool:
        """Whether it surely fits."""
        return self.choice.candidate.fits is True


class LinkMap(NamedTuple):
    """Cells by nodes and rate; of a number of nodes without one nothing that was searched fits."""

    nodes: tuple[int, ...]
    rates: tuple[float, ...]  # in bytes per second, one of them the machine's
    own: float
    cells: tuple[LinkCell, ...]

    @property
    def engines(self) -> list[str]:
        """The engines that are the fastest somewhere."""
        return sorted({cell.choice.spec.engine.name for cell in self.cells})


def build_link_map(answer: "Answer") -> LinkMap | None:
    """Return the map of an answer; None where one number of nodes was asked for, or the machine's links are unknown."""
    machine, nodes = answer.request.machine, tuple(sorted(answer.query.axes.nodes))
    own = machine.inter_node_bytes_per_s
    if len(nodes) == 1 or own is None:
        return None
    cells = []
    for number in nodes:
        here = [choice for choice in answer.choices if choice.spec.nodes == number]
        here = [choice for choice in here if choice.candidate.fits] or here
        for factor in FACTORS if here else ():
            other = machine.model_copy(update={"inter_node_bytes_per_s": factor * own})
            cells.append(LinkCell(number, factor * own, *_find_fastest(here, other, factor, answer)))
    return LinkMap(nodes, tuple(factor * own for factor in FACTORS), own, tuple(cells))


def _find_fastest(choices: Sequence[Choice], machine: Machine, factor: float, answer: "Answer") -> tuple[Choice, float]:
    """Return the choice with the most tokens per second and device on a machine whose links have `factor` times their
    rate. Those that cannot be faster than one that is known are not predicted anew."""
    best, fastest = choices[0], 0.0
    for choice in sorted(choices, key=lambda one: -_bound_rate(one, factor)):
        if _bound_rate(choice, factor) <= fastest:
            break
        step_s = choice.time.step_s
        if factor != 1 and choice.spec.nodes > 1:
            found = predict_step_time(choice.spec, machine, answer.device, software=answer.query.software)
            step_s = found.step_s
        rate = _compute_rate(choice, step_s)
        if rate > fastest:
            best, fastest = choice, rate
    return best, fastest


def _bound_rate(choice: Choice, factor: float) -> float:
    """Return what a choice's rate cannot exceed: slower links make no step shorter, and faster ones at best end its
    waiting for them and for other stages."""
    waits_s = choice.time.exposed_s + choice.time.parts.get("idle", 0.0) if factor > 1 else 0.0
    return _compute_rate(choice, choice.time.step_s - waits_s)


def _compute_rate(choice: Choice, step_s: float) -> float:
    """Return tokens per second and device where a step is predicted to take so long, believed as the choice is."""
    return choice.time.tokens / (choice.scale * step_s * choice.spec.world_size)


@styled
def draw_link_map(shown: LinkMap) -> Figure:
    """Return the figure: a cell with its engine's colour and sign, and tokens per second of a device; hollow and pale
    where the fastest may fit, empty where nothing does."""
    figure = Figure(figsize=(WIDTH_IN, _AROUND_IN + _ROW_IN * len(shown.rates)), layout="constrained")
    axes, styles = figure.subplots(), choose_engine_styles(shown.engines)
    for cell in shown.cells:
        _draw_cell(axes, shown.nodes.index(cell.nodes), shown.rates.index(cell.link_bytes_per_s), cell, styles)
    for column, number in enumerate(shown.nodes):
        if all(cell.nodes != number for cell in shown.cells):
            middle = (len(shown.rates) - 1) / 2
            axes.text(column, middle, "nothing fits", rotation=90, ha="center", va="center", fontsize=7)
    labels = [format_number(rate / _GB) for rate in shown.rates]
    axes.set_yticks(range(len(shown.rates)), labels)
    axes.get_yticklabels()[shown.rates.index(shown.own)].set_fontweight("bold")
    axes.set_xticks(range(len(shown.nodes)), list(map(str, shown.nodes)))
    axes.set(
        xlim=(-0.5, len(shown.nodes) - 0.5), ylim=(-0.5, len(shown.rates) - 0.5), xlabel="nodes",
        ylabel="links between nodes, GB/s per node",
    )  # fmt: skip
    axes.grid(visible=False)
    return figure


def _draw_cell(axes: Axes, column: int, row: int, cell: LinkCell, styles: Mapping[str, dict[str, Any]]) -> None:
    style = styles[cell.choice.spec.engine.name]
    alpha, fill = (_FILLED, style["color"]) if cell.fits else (_PALE, "none")
    axes.bar(column, 0.94, width=0.94, bottom=row - 0.47, color=style["color"], alpha=alpha, gid=f"cell-{column}-{row}")
    axes.plot(column, row + 0.2, **style, markersize=4, markerfacecolor=fill, gid=f"sign-{column}-{row}")
    axes.text(column, row - 0.22, format_number(cell.tokens_per_s), ha="center", va="center", fontsize=7, color=INK)


def describe_link_map(shown: LinkMap) -> str:
    """Return the map in words, for who does not see it."""
    words = []
    for number in shown.nodes:
        fastest: dict[str, list[str]] = {}
        for cell in shown.cells:
            if cell.nodes == number:
                fastest.setdefault(cell.choice.spec.engine.name, []).append(format_number(cell.link_bytes_per_s / _GB))
        named = (f"{name} at {', '.join(rates)} GB/s" for name, rates in fastest.items())
        words.append(f"{number}: {'; '.join(named) or 'nothing fits'}")
    return f"The fastest by nodes. {'. '.join(words)}"
