"""The best configuration of every model and node count, coloured by how much of the throughput per device is left."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import plotting
from analysis.charts import groups
from analysis.formats import format_significant
from analysis.questions import Question, describe_differences, describe_series
from analysis.results import Results
from analysis.scaling.best import Best, best
from analysis.scaling.time_per_sample import IntervalEstimate, Paces, compare_paces, paces, scaled
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


class BestCell(NamedTuple):
    """The best configuration of a model on some nodes; `efficiency` None without a number."""

    found: Best
    efficiency: IntervalEstimate | None


Line = tuple[Question, Mapping[int, BestCell]]
"""A question without its nodes, and its cells by nodes."""


def applies(results: Results) -> bool:
    """Whether anything was asked on two node counts."""
    return any(len({row["nodes"] for row in group.rows}) > 1 for group in groups.group_by_micro(results.summary))


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw a line of cells per model (and precision, machine … where these differ), a column per node count."""
    lines = _list_lines(results)
    omitted = groups.describe_omitted(len(lines), "lines", "fewest node counts", _MOST)
    lines = sorted(lines, key=lambda line: -len(line[1]))[:_MOST] if omitted else lines
    columns = sorted({nodes for _, cells in lines for nodes in cells})
    drawn = Figure(figsize=(_WIDTH_IN, _AROUND_IN + _CELL_IN * len(lines)), layout="constrained")
    axes = drawn.add_subplot()
    all_questions = [question for question, _ in lines]
    labels = [
        "\n".join([question["model"], *describe_differences(question, all_questions)]) for question in all_questions
    ]
    for y, (_, cells) in enumerate(lines):
        for x, nodes in enumerate(columns):
            _draw_cell(axes, x, y, cells.get(nodes))
    _draw_frame(axes, [str(nodes) for nodes in columns], labels)
    mappable = ScalarMappable(Normalize(_LOWEST, 1), colormaps[_COLOURS])
    drawn.colorbar(mappable, ax=axes, label="efficiency", fraction=0.03, pad=0.01)
    plotting.draw_legend(drawn, [], _NOTE, omitted)
    return drawn


def _list_lines(results: Results) -> list[Line]:
    """Return the best configurations by all of their question but the nodes; efficiencies are of the fewest nodes."""
    groups: dict[tuple[Any, ...], tuple[Question, list[Best]]] = {}
    for found in best(results):
        shared = {**found.question, "nodes": None}
        groups.setdefault(tuple(shared.values()), (shared, []))[1].append(found)
    known = paces(results)
    return [(shared, _build_cells(found, known)) for shared, found in groups.values()]


def _build_cells(found: Sequence[Best], known: Paces) -> dict[int, BestCell]:
    ordered = sorted(found, key=lambda one: int(one.question["nodes"]))
    base = next((one for one in ordered if one.fastest), None)
    return {int(one.question["nodes"]): BestCell(one, _compute_efficiency(one, base, known)) for one in ordered}


def _compute_efficiency(one: Best, base: Best | None, known: Paces) -> IntervalEstimate | None:
    """Return the seconds per sample and device of the base over those of `one`."""
    if base is None or base.fastest is None or one.fastest is None:
        return None
    if one is base:
        return IntervalEstimate(1.0)
    own_pace, base_pace = known(one.fastest), known(base.fastest)
    if own_pace is None or base_pace is None:
        return None
    return scaled(compare_paces(base_pace, own_pace), base.question["nodes"] / one.question["nodes"])


def _draw_cell(axes: Axes, x: int, y: int, cell: BestCell | None) -> None:
    corner = (x - 0.5, y - 0.5)
    if cell is None or cell.efficiency is None or cell.found.fastest is None:
        axes.add_patch(Rectangle(corner, 1, 1, facecolor="none", edgecolor=plotting.INK, alpha=0.25, hatch="////"))
        failed = cell.found.failed if cell else ()
        plotting.write_reason(axes, x, y, failed[0] if failed else None, plotting.INK)
        return
    share = min(max(cell.efficiency.value, _LOWEST), 1.0)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colormaps[_COLOURS](share), edgecolor="none"))
    style: Any = {"ha": "center", "va": "center", "fontsize": 6.5, "color": _WHITE if share < 0.5 else _BLACK}
    for line, text in enumerate(_format_cell_lines(cell.found, cell.found.fastest, cell.efficiency)):
        axes.text(x, y + 0.2 * (line - 1.5), text, fontweight="normal" if line else "bold", **style)


def _format_cell_lines(found: Best, fastest: Row, efficiency: IntervalEstimate) -> list[str]:
    engine = describe_series(fastest).replace(" accumulated", "")
    ties = f" (+{len(found.ties)} tied)" if found.ties else " (n < 3)" if found.undecided else ""
    interval = efficiency.interval
    ends = f" ({interval.low:.2f}–{interval.high:.2f})" if interval else ""
    rate = f"{format_significant(fastest['tokens_per_s'], 3)} tokens/s"
    return [
        plotting.shorten_text(engine, _LETTERS),
        f"micro {fastest['micro']}{ties}",
        rate,
        f"{efficiency.value:.2f}{ends}",
    ]


def _draw_frame(axes: Axes, columns: Sequence[str], labels: Sequence[str]) -> None:
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    axes.set_xlabel("nodes")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
