"""The panels of a figure for print: how they are laid out, their titles, and which groups of rows get one."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import plotting
from analysis.charts.groups import (
    QuestionGroup,
    describe_omitted,
    describe_question,
    select_places,
    sort_groups,
)
from analysis.questions import Question
from analysis.summary import Row

_WIDTH_IN = 7.2  # the text width of two columns in print
_HEIGHTS_IN = {1: 2.5, 2: 2.5, 3: 2.5, 4: 1.9}  # of a panel, by the columns
_ABOVE_IN = 0.6  # legend and note
_BESIDE_IN, _LETTER_IN = 0.45, 0.075  # what the labels of the y axis take, and a letter of a title


class Panel(NamedTuple):
    """The axes of a group."""

    axes: Axes
    question: Question
    rows: Sequence[Row]


class Grid(NamedTuple):
    """A figure with a titled panel per group; `left_out` says in a sentence what is missing, empty for nothing."""

    figure: Figure
    panels: list[Panel]
    omitted: str


def build_grid(groups: Sequence[QuestionGroup]) -> Grid:
    """Return a panel per group, those of a model in lines of their own; of too many the ones with the most numbers."""
    ordered = sort_groups(groups)
    numbers = [sum(row["n"] > 0 for row in group.rows) for group in ordered]
    shown = [ordered[place] for place in select_places([group.question["model"] for group in ordered], numbers)]
    figure, axes = build_lines([group.question["model"] for group in shown])
    all_questions = [group.question for group in shown]
    for one, question in zip(axes, all_questions, strict=True):
        draw_title(one, describe_question(question, all_questions))
    drawn = [Panel(one, *group) for one, group in zip(axes, shown, strict=True)]
    return Grid(figure, drawn, describe_omitted(len(groups), "panels", "fewest numbers of each model", len(shown)))


def build_lines(scales: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Return a figure of print width with axes for panels in their order; those of one scale share lines, so that
    whatever stands side by side can be compared at a glance."""
    alike = [len(list(some)) for _, some in itertools.groupby(scales)]
    columns = min(_count_columns(len(scales)), max(alike, default=1))
    lines = sum(math.ceil(number / columns) for number in alike) or 1
    figure, places = _build_figure(columns, lines), []
    line = 0
    for number in alike:
        places += [line * columns + place for place in range(number)]
        line += math.ceil(number / columns)
    return figure, [figure.add_subplot(lines, columns, place + 1) for place in places]


def build_empty_panels(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of print width with so many axes, row by row."""
    return build_lines([""] * panels)


def _count_columns(panels: int) -> int:
    return {0: 1, 1: 1, 2: 2, 4: 2}.get(panels, 3 if panels <= 12 else 4)


def _build_figure(columns: int, lines: int) -> Figure:
    width = _WIDTH_IN if columns > 1 else _WIDTH_IN * 0.6
    return Figure(figsize=(width, _ABOVE_IN + _HEIGHTS_IN[columns] * lines), layout="constrained")


def draw_title(axes: Axes, words: Sequence[str]) -> None:
    """Write words above a panel, on as many lines as its width asks for."""
    room = compute_room_in(axes) / _LETTER_IN
    first, *others = (plotting.shorten_text(word, int(room)) for word in words)
    lines = [first]
    for word in others:
        if len(lines[-1]) + len(word) + 3 <= room:
            lines[-1] += f" · {word}"
        else:
            lines.append(word)
    axes.set_title("\n".join(lines))


def compute_room_in(axes: Axes) -> float:
    """Return about how wide a panel of `empty` is inside, in inches."""
    place, figure = axes.get_subplotspec(), axes.figure
    assert place is not None and isinstance(figure, Figure)
    return figure.get_figwidth() / place.get_gridspec().ncols - _BESIDE_IN
