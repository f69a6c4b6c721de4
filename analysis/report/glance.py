"""Draws the answers at a glance on the page, as elements that need no script and fit any width."""

from typing import NamedTuple

from analysis.charts.answers import AnswerChart, AnswerMark
from analysis.charts.looks import choose_colour
from analysis.report.charts import SYMBOLS, choose_symbol


class GlanceMark(NamedTuple):
    """A row: its sign and words, and where mark and interval lie in per cent of the width."""

    label: str
    words: str
    colour: str
    sign: str
    at: float
    begins: float
    width: float
    indicative: bool


class GlancePanel(NamedTuple):
    """A question, and where its fastest lies in per cent of the width."""

    title: str
    zero: float
    marks: tuple[GlanceMark, ...]


def render_glance(chart: AnswerChart) -> list[GlancePanel]:
    """Return the panels of a chart as the template shows them."""
    zero = _compute_percent(chart, 0.0)
    return [
        GlancePanel(panel.title, zero, tuple(_render_mark(chart, mark) for mark in panel.marks))
        for panel in chart.panels
    ]


def _render_mark(chart: AnswerChart, mark: AnswerMark) -> GlanceMark:
    begins, ends = (_compute_percent(chart, end) for end in mark.ends or (mark.extra, mark.extra))
    sign = SYMBOLS[choose_symbol(mark.look)]
    at = _compute_percent(chart, mark.extra)
    width = round(ends - begins, 2)
    return GlanceMark(mark.label, mark.words, choose_colour(mark.look), sign, at, begins, width, mark.indicative)


def _compute_percent(chart: AnswerChart, extra: float) -> float:
    return round(100 * chart.compute_place(extra), 2)
