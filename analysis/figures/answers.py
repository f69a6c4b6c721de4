"""The answers at a glance: of each question the fastest configuration, and how much longer the other engines take."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.drawing import (
    INK,
    Look,
    Panel,
    Picture,
    Space,
    choose_looks,
    draw_beyond,
    get_room_in,
    mark,
    shorten_text,
)
from analysis.formats import format_effect, format_ratio_change, format_significant
from analysis.questions import describe_choice, name_question
from analysis.results import Results
from analysis.scaling.best import Best, Rival, best
from analysis.stats.compare import LEAST_RUNS, TOO_FEW
from analysis.summary import Row

TITLE = "The answers at a glance"
ALT = (
    "By question a row per engine: how much longer its fastest configuration takes per sample than the fastest of all, "
    "with the interval of the difference. The tables hold the numbers."
)
PLACE = 0

MOST_PANELS, MOST_MARKS = 6, 6
"""What is seen at a glance: questions, and engines of each."""

_LEAST, _FURTHEST, _LEFT = 0.05, 1.0, -0.25  # how far the axis reaches: at least, at most, and to the left at most
_ROW_IN, _STACKED_IN = 0.2, 0.42  # of a row with its words beside it, and of one with its words above
_WIDE, _NARROW = Space(0, 2.2, 2.7, 0.4), Space(0, 0.15, 0.15, 0.4)
_LETTERS_PER_IN, _STACKED_PER_IN = 16, 20.5


class AnswerMark(NamedTuple):
    """A configuration: `extra` is the part by which it takes longer per sample than the fastest, with the `ends` of its
    interval where one is known; `words` say the same with what is known of it. A mark is `indicative` if either side
    has too few repeats for a verdict: it has no interval, since that of the steps says nothing about other runs."""

    label: str
    engine: str
    extra: float
    ends: tuple[float, float] | None
    words: str
    row: Row
    indicative: bool = False


class AnswerPanel(NamedTuple):
    """A question with its fastest configuration, and of each other engine the fastest one."""

    title: str
    marks: tuple[AnswerMark, ...]


def picture(results: Results) -> Picture:
    """Return a panel per question with rivals, over one axis."""
    panels, omitted = build_panels(best(results))
    if not panels:
        return Picture()
    marks = [mark for panel in panels for mark in panel.marks]
    low, high = find_limits(marks)
    looks = choose_looks(results.table["engine"])
    drawn = [
        Panel(
            title=panel.title.split(" · "),
            draw=partial(_draw_panel, marks=panel.marks, limits=(low, high), looks=looks),
            space=_WIDE._replace(height=_ROW_IN * len(panel.marks) + 0.1),
            narrow=_NARROW._replace(height=_STACKED_IN * len(panel.marks) + 0.1),
            wide=True,
        )
        for panel in panels
    ]
    some = f" The {len(panels)} of {len(panels) + omitted} questions with the most rivals." if omitted else ""
    note = (
        "Time per sample compared with that of the fastest, of each engine the fastest configuration. Bars: intervals "
        f"of the difference. Hollow: indicative, fewer than {LEAST_RUNS} runs a side. Arrow: beyond the axis.{some}"
    )
    return Picture(drawn, (), note)


def build_panels(found: Sequence[Best]) -> tuple[list[AnswerPanel], int]:
    """Return the questions in which there are rivals, at most MOST_PANELS, and how many others there are."""
    decided = [best for best in found if best.fastest and best.rivals]
    chosen = sorted(range(len(decided)), key=lambda place: -len(decided[place].rivals))[:MOST_PANELS]
    questions = [best.question for best in decided]
    shown = [decided[place] for place in sorted(chosen)]
    panels = [_build_panel(best, name_question(best.question, questions)) for best in shown]
    return panels, len(decided) - len(panels)


def find_limits(marks: Sequence[AnswerMark]) -> tuple[float, float]:
    """Return the ends of the axis: beyond every mark and interval as far as these do not squeeze the others."""
    furthest = max(mark.extra for mark in marks)
    ends = [end for mark in marks if mark.ends for end in mark.ends]
    high = min(_FURTHEST, max(_LEAST, 1.08 * furthest, min(max(ends, default=0.0), 1.5 * furthest)))
    return max(_LEFT, -high, min([-0.02 * high, *ends])), high


def _build_panel(best: Best, title: str) -> AnswerPanel:
    assert best.fastest is not None
    rows = [(best.fastest, None), *((rival.row, rival) for rival in best.rivals)]
    accumulations = {row["accumulation"] for row, _ in rows}
    held = accumulations.pop() if len(accumulations) == 1 else 1
    engines = {row["engine"] for row, _ in rows}
    firsts: dict[str, AnswerMark] = {}
    for row, rival in rows:
        named = row | {"accumulation": row["accumulation"] // held, "protocol": ""}
        firsts.setdefault(row["engine"] if len(engines) > 1 else describe_choice(named), _build_mark(named, row, rival))
    marks = tuple(firsts.values())[:MOST_MARKS]
    return AnswerPanel(f"{title} · × {held} accumulated" if held > 1 else title, marks)


def _build_mark(named: Row, row: Row, rival: Rival | None) -> AnswerMark:
    label, engine = describe_choice(named), row["engine"]
    if rival is None:
        words = f"the fastest: {format_significant(row['sample_s'], 3)} s per sample"
        return AnswerMark(label, engine, 0.0, None, words, row)
    extra, known = rival.comparison.ratio - 1, rival.comparison.interval
    if rival.verdict == TOO_FEW:
        words = f"indicative, fewer than {LEAST_RUNS} runs a side: {format_ratio_change(rival.comparison.ratio)}"
        return AnswerMark(label, engine, extra, None, words, row, indicative=True)
    ends = (known.low - 1, known.high - 1) if known else None
    return AnswerMark(label, engine, extra, ends, f"{rival.verdict}: {format_effect(rival.comparison)}", row)


def _draw_panel(axes: Axes, marks: Sequence[AnswerMark], limits: tuple[float, float], looks: dict[str, Look]) -> None:
    """Draw a row per mark, its label and words beside it, or above it where there is no room beside it."""
    room = get_room_in(axes)
    stacked = room * axes.get_position().x0 / axes.get_position().width < 1  # its left margin has no room for labels
    low, high = limits
    axes.set_xlim(low, high)
    axes.set_ylim(len(marks) - 0.5, -0.5)
    across = axes.get_yaxis_transform()
    below, half = (0.22, 0.2) if stacked else (0.0, 0.5)
    for y, one in enumerate(marks):
        axes.vlines(0, y + below - half, y + below + half, color=INK, linewidth=0.6, zorder=1)
        _draw_mark(axes, one, y + below, limits, looks[one.engine])
        words = one.words.replace("\u00a0", " ")
        if stacked:
            label = f"{shorten_text(one.label, max(12, _STACKED_PER_IN * room - len(words)))}: {words}"
            axes.text(0, y - 0.2, label, transform=across, ha="left", va="center", fontsize=6.5)
        else:
            style: Any = {"transform": across, "va": "center", "fontsize": 7}
            label = shorten_text(one.label, _WIDE.left * _LETTERS_PER_IN)
            axes.text(-0.12 / room, y, label, ha="right", **style)
            axes.text(1 + 0.15 / room, y, words, ha="left", **style)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(axis="x", length=2.5)
    axes.set_xlabel("more time per sample than the fastest")


def _draw_mark(axes: Axes, one: AnswerMark, y: float, limits: tuple[float, float], look: Look) -> None:
    low, high = limits
    if one.ends:
        axes.hlines(y, max(one.ends[0], low), min(one.ends[1], high), color=look.colour, linewidth=2.4, alpha=0.55)
        if one.ends[1] > high >= one.extra:
            draw_beyond(axes, ">", [(high, y)], look.colour)
    if one.extra > high:
        mark(draw_beyond(axes, ">", [(high, y)], look.colour), one.engine, [one.row])
        return
    style = look.style_marks(hollow=bool(one.extra) and one.ends is None)
    (sign,) = axes.plot(one.extra, y, **style, clip_on=False, zorder=3)
    mark(sign, one.engine, [one.row])
