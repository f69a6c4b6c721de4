"""The answers at a glance: of each question the fastest configuration, and how far behind it the others are."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis import plotting
from analysis.charts.answers import AnswerChart, AnswerMark, build_answer_chart
from analysis.charts.looks import choose_colour
from analysis.results import Results
from analysis.scaling.best import best

TITLE = "The answers at a glance"
ALT = (
    "By question a row per engine: how much longer its fastest configuration takes per sample than the fastest of all, "
    "with the interval of the difference. The tables hold the numbers."
)
PLACE = 0

_WIDTH_IN, _ROW_IN, _AROUND_IN = 7.2, 0.2, 0.9
_LETTERS = 44  # of a label
_TITLE: Any = {"fontweight": "bold", "ha": "left", "va": "center"}


def applies(results: Results) -> bool:
    """Whether configurations compete anywhere."""
    return build_answer_chart(best(results)) is not None


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw a mark per engine with its interval, a group of rows per question."""
    chart = build_answer_chart(best(results))
    rows = sum(len(panel.marks) + 1 for panel in chart.panels) if chart else 0
    drawn = Figure(figsize=(_WIDTH_IN, _AROUND_IN + _ROW_IN * rows), layout="constrained")
    if chart:
        _draw_answers(drawn.add_subplot(), chart)
        plotting.draw_legend(drawn, [], chart.note)
    return drawn


def _draw_answers(axes: Axes, chart: AnswerChart) -> None:
    labels: dict[float, AnswerMark] = {}
    y = 0
    for panel in chart.panels:
        axes.text(
            0, y, plotting.shorten_text(panel.title, 2 * _LETTERS), transform=axes.get_yaxis_transform(), **_TITLE
        )
        axes.vlines(0, y + 0.6, y + len(panel.marks) + 0.4, color=plotting.INK, linewidth=0.6, zorder=1)
        for mark in panel.marks:
            y += 1
            labels[y] = mark
            _draw_mark(axes, chart, mark, y)
        y += 1
    axes.set_xlim(chart.low, chart.high)
    axes.set_ylim(y - 0.4, -0.6)
    axes.set_yticks(list(labels), [plotting.shorten_text(mark.label, _LETTERS) for mark in labels.values()])
    words = axes.secondary_yaxis("right")
    words.set_yticks(list(labels), [mark.words.replace("\u00a0", " ") for mark in labels.values()])
    words.tick_params(length=0, pad=8)
    words.spines["right"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("time per sample beyond the fastest's")


def _draw_mark(axes: Axes, chart: AnswerChart, mark: AnswerMark, y: int) -> None:
    colour = choose_colour(mark.look)
    if mark.ends:
        axes.hlines(y, *mark.ends, color=colour, linewidth=2.4, alpha=0.55)
    fill = "white" if mark.extra and mark.ends is None else colour  # hollow: no interval is known
    at = min(mark.extra, chart.high)
    axes.plot(at, y, **plotting.choose_marker_style(mark.look), markerfacecolor=fill, clip_on=False, zorder=3)
