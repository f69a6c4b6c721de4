"""Figure of the best configuration of every model and node count, coloured by its scaling efficiency."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.drawing import INK, Panel, Picture, Space, get_room_in, groups, mark, shorten_text, write_reason
from analysis.formats import format_significant, name_briefly
from analysis.questions import Question, describe_differences
from analysis.results import Results
from analysis.scaling import IntervalEstimate, Paces, compare_paces, paces, scaled
from analysis.scaling.best import Best, best
from analysis.summary import Row

TITLE = "Fastest configuration by model and node count"
ALT = "A cell per model and node count: fastest configuration, number of ties, tokens per second and efficiency."
NEEDS = "runs at two or more numbers of nodes with equal work and equal micro-batch"
PLACE = 7

_NOTE = (
    "Each cell shows the configuration with the shortest measured time per sample, its tokens/s and its efficiency "
    "with interval. × n after the engine: accumulation of n micro-batches. (+n tied): n other configurations are not "
    "detectably slower. (+n open): too few repeats for a verdict on n others. Efficiency: throughput per device, "
    "divided by that of the fastest configuration on the smallest node count. Brighter: more efficient. "
    "Hatched: no measurement."
)
_MOST = 14  # rows
_CELL_IN, _LEFT_IN = 0.62, 1.5
_COLOURS = "cividis"  # its lightness increases throughout, also for colour-blind readers and in grey
_WHITE, _BLACK = "#fffffe", "#000001"  # not exact, so that the page's dark mode does not replace them
_LETTERS_PER_IN = 19


class BestCell(NamedTuple):
    """The best configuration of a model on some number of nodes. `efficiency` is None if no efficiency can be computed,
    because a time was not measured."""

    found: Best
    efficiency: IntervalEstimate | None


Line = tuple[Question, Mapping[int, BestCell]]
"""A row of the figure: a question without its node count, and its cells by node count."""


def picture(results: Results) -> Picture:
    """Return a figure with one row per model and one column per node count. A model has several rows if its
    configurations differ in precision, machine or another setting that must be equal in a comparison.

    The figure is empty if no configurations with equal work and equal micro-batch ran on two or more node counts.
    """
    if all(len({row["nodes"] for row in group.rows}) < 2 for group in groups.group_by_micro(results.summary)):
        return Picture()
    lines = _list_lines(results)
    if not lines:
        return Picture()
    omitted = groups.describe_omitted(len(lines), "rows", "fewest node counts", _MOST)
    lines = sorted(lines, key=lambda line: -len(line[1]))[:_MOST] if omitted else lines
    space = Space(_CELL_IN * len(lines), _LEFT_IN)
    panel = Panel(title=[], draw=partial(_draw_lines, lines=lines), space=space, wide=True)
    return Picture([panel], (), " ".join(filter(None, [_NOTE, omitted])))


def _list_lines(results: Results) -> list[Line]:
    """Return the rows of the figure. In each row, efficiencies are relative to the smallest node count that has a
    measured time."""
    # A rehearsal (one rank run alone) is never ranked, so a row of rehearsals would have only empty cells.
    found = (one for one in best(results) if one.question["evidence"] == "measured")
    known = paces(results)
    lines: list[Line] = []
    for shared, answers in groups.join_equal(({**one.question, "nodes": None}, one) for one in found):
        # Efficiencies of a row refer to its smallest node count with a number, which need not be one node.
        ordered = sorted(answers, key=lambda one: int(one.question["nodes"]))
        base = next((one for one in ordered if one.fastest), None)
        cells = {int(one.question["nodes"]): BestCell(one, _compute_efficiency(one, base, known)) for one in ordered}
        lines.append((shared, cells))
    return lines


def _compute_efficiency(one: Best, base: Best | None, known: Paces) -> IntervalEstimate | None:
    """Return the efficiency of `one`: device-seconds per sample of `base`, divided by device-seconds per sample of
    `one`. `base` is the best configuration on the smallest node count. None if `one` or `base` has no measured time."""
    if base is None or base.fastest is None or one.fastest is None:
        return None
    if one is base:
        return IntervalEstimate(1.0)
    own_pace, base_pace = known(one.fastest), known(base.fastest)
    if own_pace is None or base_pace is None:
        return None
    return scaled(compare_paces(base_pace, own_pace), base.question["nodes"] / one.question["nodes"])


def _draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    columns = sorted({nodes for _, cells in lines for nodes in cells})
    all_questions = [question for question, _ in lines]
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    for y, (question, cells) in enumerate(lines):
        words = [question["model"], *describe_differences(question, all_questions)]
        for place, word in enumerate(words):
            text, middle = shorten_text(word, _LEFT_IN * _LETTERS_PER_IN * 0.8), (len(words) - 1) / 2
            at = (-0.08 / get_room_in(axes), y + 0.2 * (place - middle))
            axes.text(*at, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
        for x, nodes in enumerate(columns):
            _draw_cell(axes, x, y, cells.get(nodes), get_room_in(axes) / len(columns))
    axes.set_xticks(range(len(columns)), list(map(str, columns)))
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.set_xlabel("nodes")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_cell(axes: Axes, x: int, y: int, cell: BestCell | None, room_in: float) -> None:
    corner = (x - 0.49, y - 0.47)
    if cell is None or cell.efficiency is None or cell.found.fastest is None:
        axes.add_patch(Rectangle(corner, 0.98, 0.94, facecolor="none", edgecolor=INK, alpha=0.25, hatch="////"))
        without = (*cell.found.failed, *cell.found.busy) if cell else ()
        write_reason(axes, x, y, without[0] if without else None)
        return
    # An efficiency above 1 (possible by caches) has the colour of 1.
    share = min(max(cell.efficiency.value, 0.0), 1.0)
    axes.add_patch(Rectangle(corner, 0.98, 0.94, facecolor=colormaps[_COLOURS](share), edgecolor="none"))
    style: Any = {"ha": "center", "va": "center", "color": _WHITE if share < 0.5 else _BLACK}
    lines = _format_cell_lines(cell.found, cell.found.fastest, cell.efficiency)
    for line, text in enumerate(lines):
        size = min(6.5, 6.5 * _LETTERS_PER_IN * room_in / len(text)) if line else 6.5
        fitting = text if line else shorten_text(text, _LETTERS_PER_IN * room_in)
        weight = "normal" if line else "bold"
        drawn = axes.text(x, y + 0.2 * (line - 1.5), fitting, fontweight=weight, fontsize=size, **style)
        if not line:
            mark(drawn, "", [cell.found.fastest])


def _format_cell_lines(found: Best, fastest: Row, efficiency: IntervalEstimate) -> list[str]:
    engine = name_briefly(fastest)
    counts = {"tied": len(found.ties), "open": len(found.undecided)}
    others = ", ".join(f"+{count} {word}" for word, count in counts.items() if count)
    ties = f" ({others})" if others else ""
    interval = efficiency.interval
    ends = f" ({interval.low:.2f}–{interval.high:.2f})" if interval else ""
    rate = f"{format_significant(fastest['tokens_per_s'], 3)} tokens/s"
    flags = "".join(f" [{flag}]" for flag in groups.list_rare_flags(fastest))
    return [engine, f"micro {fastest['micro']}{ties}{flags}", rate, f"{efficiency.value:.2f}{ends}"]
