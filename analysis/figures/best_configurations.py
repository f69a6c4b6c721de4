"""The best configuration of every model and node count, coloured by how much of the throughput per device is left."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import drawing
from analysis.drawing import panels
from analysis.formats.numbers import significant
from analysis.questions import Question, apart, series
from analysis.results import Results
from analysis.scaling.best import Best, best
from analysis.scaling.pace import Estimate, Paces, against, paces, scaled
from analysis.summary import Row

TITLE = "Best configurations and their efficiency"
ALT = (
    "A cell per model and node count: the fastest engine and micro-batch, how many tie with it, tokens per second, and "
    "the efficiency against the smallest node count. The tables hold the numbers."
)
PLACE = 7

_NOTE = (
    "Each cell: the fastest configuration as measured (× n: accumulated), how many tie with it (n < 3: too few repeats "
    "to tell), tokens/s, and its efficiency: "
    "throughput per device over that of the best configuration on the fewest nodes, with its interval. Hatched: no "
    "number."
)
_MOST = 14  # rows
_WIDTH_IN, _CELL_IN, _AROUND_IN = 7.2, 0.72, 1.0
_COLOURS = "cividis"  # one order for every eye, and in grey
_LOWEST = 0.0
_WHITE, _BLACK = "#fffffe", "#000001"  # not quite: a page that turns dark leaves the cells as they are
_LETTERS = 24  # of an engine's name


class Cell(NamedTuple):
    """The best configuration of a model on some nodes; `efficiency` None without a number."""

    found: Best
    efficiency: Estimate | None


Line = tuple[Question, Mapping[int, Cell]]
"""A question without its nodes, and its cells by nodes."""


def applies(results: Results) -> bool:
    """Whether anything was asked on two node counts."""
    return any(len({row["nodes"] for row in group.rows}) > 1 for group in panels.by_micro(results.summary))


@drawing.styled
def figure(results: Results) -> Figure:
    """Draw a line of cells per model (and precision, machine … where these differ), a column per node count."""
    lines = _lines(results)
    left_out = panels.left_out(len(lines), "lines", "fewest node counts", _MOST)
    lines = sorted(lines, key=lambda line: -len(line[1]))[:_MOST] if left_out else lines
    columns = sorted({nodes for _, cells in lines for nodes in cells})
    drawn = Figure(figsize=(_WIDTH_IN, _AROUND_IN + _CELL_IN * len(lines)), layout="constrained")
    axes = drawn.add_subplot()
    among = [question for question, _ in lines]
    labels = ["\n".join([question["model"], *apart(question, among)]) for question in among]
    for y, (_, cells) in enumerate(lines):
        for x, nodes in enumerate(columns):
            _cell(axes, x, y, cells.get(nodes))
    _frame(axes, [str(nodes) for nodes in columns], labels)
    mappable = ScalarMappable(Normalize(_LOWEST, 1), colormaps[_COLOURS])
    drawn.colorbar(mappable, ax=axes, label="efficiency", fraction=0.03, pad=0.01)
    drawing.legend(drawn, [], _NOTE, left_out)
    return drawn


def _lines(results: Results) -> list[Line]:
    """Return the best configurations by all of their question but the nodes; efficiencies are of the fewest nodes."""
    groups: dict[tuple[Any, ...], tuple[Question, list[Best]]] = {}
    for found in best(results):
        shared = {**found.question, "nodes": None}
        groups.setdefault(tuple(shared.values()), (shared, []))[1].append(found)
    known = paces(results)
    return [(shared, _cells(found, known)) for shared, found in groups.values()]


def _cells(found: Sequence[Best], known: Paces) -> dict[int, Cell]:
    ordered = sorted(found, key=lambda one: int(one.question["nodes"]))
    base = next((one for one in ordered if one.fastest), None)
    return {int(one.question["nodes"]): Cell(one, _efficiency(one, base, known)) for one in ordered}


def _efficiency(one: Best, base: Best | None, known: Paces) -> Estimate | None:
    """Return the seconds per sample and device of the base over those of `one`."""
    if base is None or base.fastest is None or one.fastest is None:
        return None
    if one is base:
        return Estimate(1.0)
    here, there = known(one.fastest), known(base.fastest)
    if here is None or there is None:
        return None
    return scaled(against(there, here), base.question["nodes"] / one.question["nodes"])


def _cell(axes: Axes, x: int, y: int, cell: Cell | None) -> None:
    corner = (x - 0.5, y - 0.5)
    if cell is None or cell.efficiency is None or cell.found.fastest is None:
        axes.add_patch(Rectangle(corner, 1, 1, facecolor="none", edgecolor=drawing.INK, alpha=0.25, hatch="////"))
        failed = cell.found.failed if cell else ()
        drawing.write_reason(axes, x, y, failed[0] if failed else None, drawing.INK)
        return
    share = min(max(cell.efficiency.value, _LOWEST), 1.0)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colormaps[_COLOURS](share), edgecolor="none"))
    style: Any = {"ha": "center", "va": "center", "fontsize": 6.5, "color": _WHITE if share < 0.5 else _BLACK}
    for line, text in enumerate(_lines_of(cell.found, cell.found.fastest, cell.efficiency)):
        axes.text(x, y + 0.2 * (line - 1.5), text, fontweight="normal" if line else "bold", **style)


def _lines_of(found: Best, fastest: Row, efficiency: Estimate) -> list[str]:
    engine = series(fastest).replace(" accumulated", "")
    ties = f" (+{len(found.ties)} tied)" if found.ties else " (n < 3)" if found.untold else ""
    interval = efficiency.interval
    ends = f" ({interval.low:.2f}–{interval.high:.2f})" if interval else ""
    rate = f"{significant(fastest['tokens_per_s'], 3)} tokens/s"
    return [drawing.cut(engine, _LETTERS), f"micro {fastest['micro']}{ties}", rate, f"{efficiency.value:.2f}{ends}"]


def _frame(axes: Axes, columns: Sequence[str], labels: Sequence[str]) -> None:
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    axes.set_xlabel("nodes")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
