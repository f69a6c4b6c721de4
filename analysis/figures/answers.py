"""Figure of the answers. Each panel shows configurations that do the same work on equal hardware (a question): the
fastest of them, and how much more time per sample the fastest configuration of every other engine takes. If all have
the same engine, the panel shows the configurations of this engine."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.drawing import (
    INK,
    WIDTH_IN,
    Look,
    Panel,
    Picture,
    Space,
    choose_looks,
    count_letters,
    draw_beyond,
    get_room_in,
    mark,
    measure_text,
    shorten_names,
)
from analysis.formats import format_effect, format_significant, name_briefly
from analysis.questions import name_question
from analysis.results import Results
from analysis.scaling.best import Best, Rival, best
from analysis.stats.compare import LEAST_RUNS, TOO_FEW
from analysis.summary import Row, is_disturbed

TITLE = "Extra time per sample compared with the fastest configuration"
ALT = "A panel per question and a mark per engine or configuration: its extra time per sample, with interval."
NEEDS = "times of two configurations that do the same work on equal hardware"
PLACE = 0

MOST_PANELS, MOST_MARKS = 6, 6
"""Most questions in the figure, and most marks per question. More would not be readable at a glance."""

_LEAST, _LEFT = 0.05, -0.25  # smallest right end of the axis, and its furthest left end
_FAR = 6  # a value above this multiple of the smaller values' upper quartile is not shown to scale
_ROW_IN, _STACKED_IN = 0.2, 0.54  # height of a row with its texts next to it, and above it
_NARROW = Space(0, 0.15, 0.15, 0.4)
_LEAST_AXIS_IN, _GAP_IN = 1.3, 0.15
_SIZE, _LEAST_SIZE, _STACKED_SIZE = 7.0, 5.5, 6.5  # font sizes of texts next to a row, of a long label, and above a row


class AnswerMark(NamedTuple):
    """A configuration in a panel.

    `extra` is its time per sample divided by that of the fastest configuration, minus 1. `extra` is None if all runs of
    the configuration were made on a busy machine. `ends` is the interval of `extra`. If this or the fastest
    configuration has fewer than three runs, `ends` is None, and the difference is only indicative. `words` state
    `extra` and its interval as text.
    """

    label: str
    engine: str
    extra: float | None
    ends: tuple[float, float] | None
    words: str
    row: Row


class AnswerPanel(NamedTuple):
    """One panel of the figure. Its title names a question (model, nodes and precision, for example). It shows the
    fastest configuration that answers the question, and the fastest configuration of every other engine. If all
    configurations have the same engine, it shows the fastest configurations of this engine."""

    title: str
    marks: tuple[AnswerMark, ...]


def picture(results: Results) -> Picture:
    """Return a figure with one panel per question that has at least two configurations. A question is a group of
    configurations that do the same work on equal hardware. All panels have the same x axis."""
    panels, omitted = build_panels(best(results))
    if not panels:
        return Picture()
    marks = [one for panel in panels for one in panel.marks]
    limits = find_limits(marks)
    looks = choose_looks(results.table["engine"])
    shared = set.intersection(*(set(one.row["flags"].split()) for one in marks))
    space = _measure_margins(marks, shared)
    drawn = []
    for panel in panels:
        title, rows = panel.title.split(" · "), len(panel.marks)
        draw = partial(_draw_panel, marks=panel.marks, limits=limits, looks=looks, shared=shared)
        usual, narrow = space._replace(height=_ROW_IN * rows + 0.1), _NARROW._replace(height=_STACKED_IN * rows + 0.1)
        drawn.append(Panel(title=title, draw=draw, space=usual, narrow=narrow, wide=True))
    notes = [
        _describe_marks(panels),
        "The x axis shows its extra time per sample compared with the fastest configuration in the panel. Bar: "
        f"interval of the difference. Hollow mark: indicative, because a configuration has fewer than {LEAST_RUNS} "
        "runs. Arrow: value beyond the axis. Square brackets: flags.",
        f"Flags of all configurations shown: {', '.join(sorted(shared))}." if shared else "",
        f"Shown: the {len(panels)} questions with the most configurations, of {len(panels) + omitted} with several."
        if omitted
        else "",
    ]
    return Picture(drawn, (), " ".join(filter(None, notes)))


def build_panels(found: Sequence[Best]) -> tuple[list[AnswerPanel], int]:
    """Return one panel per question that has at least two configurations, and the number of questions omitted because
    there are more than MOST_PANELS. A question is a group of configurations that do the same work on equal hardware."""
    decided = [one for one in found if one.fastest and one.rivals]
    # The sort is stable: questions with equally many rivals keep their order.
    chosen = sorted(range(len(decided)), key=lambda place: -len(decided[place].rivals))[:MOST_PANELS]
    questions = [one.question for one in decided]
    panels = [_build_panel(decided[place], name_question(questions[place], questions)) for place in sorted(chosen)]
    return panels, len(decided) - len(panels)


def find_limits(marks: Sequence[AnswerMark]) -> tuple[float, float]:
    """Return the ends of the x axis.

    The axis contains all configurations and intervals, except values that are so large that the other values could not
    be distinguished.
    """
    extras = sorted(one.extra for one in marks if one.extra)
    while len(extras) > 1 and extras[-1] > _FAR * np.quantile(extras[:-1], 0.75):
        extras.pop()
    furthest = max(extras, default=0.0)
    ends = [end for one in marks if one.ends and (one.extra or 0.0) <= furthest for end in one.ends]
    high = max(_LEAST, 1.08 * furthest, min(max(ends, default=0.0), 1.5 * furthest))
    return max(_LEFT, -high, min([-0.02 * high, *ends])), high


def _measure_margins(marks: Sequence[AnswerMark], shared: set[str]) -> Space:
    """Return margins that hold the texts of all rows on a printed page: labels in the left margin, numbers in the right
    margin. If both are too long for the page, only labels are cut, because a cut number would be wrong."""
    right = 2 * _GAP_IN + max(measure_text(_write_words(one), _SIZE) for one in marks)
    left = 2 * _GAP_IN + max(measure_text(_write_label(one, shared), _SIZE) for one in marks)
    return Space(0, min(left, WIDTH_IN - right - _LEAST_AXIS_IN), right, 0.4)


def _write_words(one: AnswerMark) -> str:
    return one.words.replace("\u00a0", " ")


def _write_label(one: AnswerMark, shared: set[str]) -> str:
    """Return the label of a row with its flags, except the flags that all configurations of the figure have."""
    flags = " ".join(flag for flag in one.row["flags"].split() if flag not in shared)
    return one.label + (f" [{flags}]" if flags else "")


def _describe_marks(panels: Sequence[AnswerPanel]) -> str:
    """Return a sentence on what a mark is. It depends on whether the configurations of a panel differ in engine."""
    several = {len({one.engine for one in panel.marks}) > 1 for panel in panels}
    if several == {False}:
        return "All configurations of a panel have the same engine, and each mark is one of them."
    alone = "; in a panel with a single engine, each mark is a configuration" if False in several else ""
    return f"Each mark is the fastest configuration of an engine{alone}."


def _build_panel(found: Best, title: str) -> AnswerPanel:
    assert found.fastest is not None
    pairs: list[tuple[Row, Rival | None]] = [(found.fastest, None), *((rival.row, rival) for rival in found.rivals)]
    pairs += [(row, None) for row in found.busy]
    values = {name: {row[name] for row, _ in pairs} for name in ("accumulation", "micro", "engine")}
    # Settings that are equal in all rows stand in the title, so that labels have room for the differences.
    held = {name: min(known) for name, known in values.items() if len(known) == 1}
    firsts: dict[str, AnswerMark] = {}
    for row, rival in pairs:
        named = row | {"accumulation": row["accumulation"] // held.get("accumulation", 1), "protocol": ""}
        label = name_briefly(named)
        label += "" if "micro" in held else f", micro {row['micro']}"
        firsts.setdefault(label if "engine" in held else row["engine"], _build_mark(label, row, rival))
    title += f" · micro {held['micro']}" if "micro" in held else ""
    title += f" · × {held['accumulation']} accumulated" if held.get("accumulation", 1) > 1 else ""
    what = "configurations" if "engine" in held else "engines"
    title += f" · {MOST_MARKS} of {len(firsts)} {what} shown" if len(firsts) > MOST_MARKS else ""
    return AnswerPanel(title, tuple(firsts.values())[:MOST_MARKS])


def _build_mark(label: str, row: Row, rival: Rival | None) -> AnswerMark:
    if is_disturbed(row):
        return AnswerMark(label, row["engine"], None, None, "busy machine: times excluded", row)
    if rival is None:
        words = f"fastest: {format_significant(row['sample_s'], 3)} s per sample"
        return AnswerMark(label, row["engine"], 0.0, None, words, row)
    compared, known = rival.comparison, rival.comparison.interval
    if rival.verdict == TOO_FEW:
        return AnswerMark(label, row["engine"], compared.ratio - 1, None, f"{format_effect(compared)}, indicative", row)
    ends, words = (known.low - 1, known.high - 1) if known else None, f"{rival.verdict}: {format_effect(compared)}"
    return AnswerMark(label, row["engine"], compared.ratio - 1, ends, words, row)


def _draw_panel(
    axes: Axes, marks: Sequence[AnswerMark], limits: tuple[float, float], looks: Mapping[str, Look], shared: set[str]
) -> None:
    """Draw one row per configuration, with two texts: its label (name and flags), and its extra time per sample in
    words. Both stand next to the row, or above the row if the left margin is too narrow. `shared` holds the flags that
    all configurations of the figure have; labels omit these flags."""
    room = get_room_in(axes)
    margin = room * axes.get_position().x0 / axes.get_position().width
    stacked = margin < 2 * _GAP_IN
    axes.set_xlim(*limits)
    axes.set_ylim(len(marks) - 0.5, -0.5)
    below, half = (0.26, 0.16) if stacked else (0.0, 0.5)
    labels, sizes = [_write_label(one, shared) for one in marks], [_STACKED_SIZE] * len(marks)
    label_in = room if stacked else margin - 1.5 * _GAP_IN
    if not stacked:
        fits = [count_letters(label, label_in, _SIZE) / len(label) for label in labels]
        sizes = [max(_LEAST_SIZE, _SIZE * min(1, fit)) for fit in fits]
    rooms = [count_letters(label, label_in, size) for label, size in zip(labels, sizes, strict=True)]
    for y, (one, label, size) in enumerate(zip(marks, shorten_names(labels, rooms), sizes, strict=True)):
        axes.vlines(0, y + below - half, y + below + half, color=INK, linewidth=0.6, zorder=1)
        _draw_mark(axes, one, y + below, limits, looks[one.engine])
        style: Any = {
            "transform": axes.get_yaxis_transform(), "va": "center", "alpha": 0.6 if one.extra is None else 1.0,
        }  # fmt: skip
        if stacked:
            axes.text(0, y - 0.34, label, ha="left", fontsize=size, **style)
            axes.text(0, y - 0.08, _write_words(one), ha="left", fontsize=size, **style)
        else:
            axes.text(-_GAP_IN / room, y, label, ha="right", fontsize=size, **style)
            axes.text(1 + _GAP_IN / room, y, _write_words(one), ha="left", fontsize=_SIZE, **style)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.tick_params(axis="x", length=2.5)
    axes.set_xlabel("extra time per sample compared with the fastest")


def _draw_mark(axes: Axes, one: AnswerMark, y: float, limits: tuple[float, float], look: Look) -> None:
    low, high = limits
    if one.extra is None:
        return
    if one.ends:
        axes.hlines(y, max(one.ends[0], low), min(one.ends[1], high), color=look.colour, linewidth=2.4, alpha=0.55)
        if one.ends[1] > high >= one.extra:
            draw_beyond(axes, ">", [(high, y)], look.colour)
    # A configuration beyond the axis gets an arrow, so that it does not look like a value at the end of the axis.
    if one.extra > high:
        mark(draw_beyond(axes, ">", [(high, y)], look.colour), one.engine, [one.row])
        return
    style = look.style_marks(hollow=bool(one.extra) and one.ends is None)
    (sign,) = axes.plot(one.extra, y, **style, clip_on=False, zorder=3)
    mark(sign, one.engine, [one.row])
