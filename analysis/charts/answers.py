"""The answers at a glance: how much longer each rival takes than the fastest of its question, and how sure that is."""

from collections.abc import Sequence
from typing import NamedTuple

from analysis.charts.looks import number_looks
from analysis.formats import format_effect, format_ratio_change, format_significant
from analysis.questions import describe_choice, name_question
from analysis.scaling.best import Best, Rival
from analysis.stats.compare import LEAST_RUNS, TOO_FEW
from analysis.summary import Row

MOST_PANELS, MOST_MARKS = 6, 6
"""What is seen at a glance: questions, and engines of each."""

_LEAST, _FURTHEST, _LEFT = 0.05, 1.0, -0.25  # how far the axis reaches: at least, at most, and to the left at most


class AnswerMark(NamedTuple):
    """A configuration: `extra` is the part by which it takes longer per sample than the fastest, with the `ends` of its
    interval where one is known; `words` say the same with what is known of it. A mark is `indicative` if either side
    has too few repeats for a verdict: it has no interval, since that of the steps says nothing about other runs."""

    label: str
    look: int
    extra: float
    ends: tuple[float, float] | None
    words: str
    indicative: bool = False


class AnswerPanel(NamedTuple):
    """A question with its fastest configuration, and of each other engine the fastest one."""

    title: str
    marks: tuple[AnswerMark, ...]


class AnswerChart(NamedTuple):
    """Questions one below the other, over one axis from `low` to `high`; `note` says how to read it."""

    panels: tuple[AnswerPanel, ...]
    low: float
    high: float
    note: str

    def compute_place(self, extra: float) -> float:
        """Return where a value lies along the axis, from 0 to 1; what is beyond an end lies at it."""
        return (min(max(extra, self.low), self.high) - self.low) / (self.high - self.low)


def build_answer_chart(found: Sequence[Best]) -> AnswerChart | None:
    """Return the chart of the questions in which there are rivals; None where there is no such question."""
    decided = [best for best in found if best.fastest and best.rivals]
    chosen = sorted(range(len(decided)), key=lambda place: -len(decided[place].rivals))[:MOST_PANELS]
    shown = [decided[place] for place in sorted(chosen)]
    if not shown:
        return None
    questions = [best.question for best in decided]
    panels = tuple(_build_panel(best, name_question(best.question, questions)) for best in shown)
    marks = [mark for panel in panels for mark in panel.marks]
    furthest = max(mark.extra for mark in marks)
    ends = [end for mark in marks if mark.ends for end in mark.ends]
    high = min(_FURTHEST, max(_LEAST, 1.08 * furthest, min(max(ends, default=0.0), 1.5 * furthest)))
    low = max(_LEFT, -high, min([-0.02 * high, *ends]))
    return AnswerChart(panels, low, high, _describe(len(shown), len(decided), high))


def _describe(shown: int, decided: int, high: float) -> str:
    some = f" The {shown} of {decided} questions with the most rivals." if decided > shown else ""
    return (
        "Time per sample beyond that of the fastest, of each engine the fastest configuration. Bars are intervals of "
        "the difference; without one, none is known. Hollow or pale: indicative, by too few runs for a verdict. The "
        f"axis ends at {100 * high:+.0f} %.{some}"
    )


def _build_panel(best: Best, title: str) -> AnswerPanel:
    assert best.fastest is not None
    accumulations = {row["accumulation"] for row in (best.fastest, *(rival.row for rival in best.rivals))}
    held = accumulations.pop() if len(accumulations) == 1 else 1
    fastest, *others = [
        (row | {"accumulation": row["accumulation"] // held, "protocol": ""}, rival)
        for row, rival in [(best.fastest, None), *((rival.row, rival) for rival in best.rivals)]
    ]
    engines = {row["engine"] for row, _ in (fastest, *others)}
    firsts: dict[str, tuple[Row, Rival | None]] = {}
    for row, rival in (fastest, *others):
        firsts.setdefault(row["engine"] if len(engines) > 1 else describe_choice(row), (row, rival))
    looks = number_looks(engines)
    marks = [_build_mark(row, rival, looks) for row, rival in list(firsts.values())[:MOST_MARKS]]
    return AnswerPanel(f"{title} · × {held} accumulated" if held > 1 else title, tuple(marks))


def _build_mark(row: Row, rival: Rival | None, looks: dict[str, int]) -> AnswerMark:
    label, look = describe_choice(row), looks[row["engine"]]
    if rival is None:
        return AnswerMark(label, look, 0.0, None, f"the fastest: {format_significant(row['sample_s'], 3)} s per sample")
    if rival.verdict == TOO_FEW:
        words = f"indicative, fewer than {LEAST_RUNS} runs a side: {format_ratio_change(rival.comparison.ratio)}"
        return AnswerMark(label, look, rival.comparison.ratio - 1, None, words, indicative=True)
    known = rival.comparison.interval
    ends = (known.low - 1, known.high - 1) if known else None
    return AnswerMark(
        label, look, rival.comparison.ratio - 1, ends, f"{rival.verdict}: {format_effect(rival.comparison)}"
    )
