"""A figure's panels: which rows of a summary share one, in which order, and what is left out of too many."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import plotting
from analysis.questions import QUESTION, Question, add_lengths, describe_choice, describe_differences, name_question
from analysis.questions import group_by_question as group_rows
from analysis.results import Results
from analysis.summary import Row
from analysis.table import list_rows
from analysis.variants import split_protocol

WHOLE, MOST = 20, 12
"""Panels of a figure: up to so many fit a page and are drawn all; of more, the second number, to be drawn soon."""

_WIDTH_IN = 7.2  # the text width of two columns in print
_HEIGHTS_IN = {1: 2.5, 2: 2.5, 3: 2.5, 4: 1.9}  # of a panel, by the columns
_ABOVE_IN = 0.6  # legend and note
_BESIDE_IN, _LETTER_IN = 0.45, 0.075  # what the labels of the y axis take, and a letter of a title


class QuestionGroup(NamedTuple):
    """Rows of a summary that belong into one panel; `question` is what they share.

    Where they are on several nodes its `nodes` are None. `held` says in words what else is equal, not its own column.
    """

    question: Question
    rows: Sequence[Row]


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


def group_by_question(summary: pd.DataFrame) -> list[QuestionGroup]:
    """Return the rows that compete with each other, a group per question."""
    return [_build_fixed_group(question, rows, "accumulation") for question, rows in _group_by_name(summary)]


def group_by_micro(summary: pd.DataFrame) -> list[QuestionGroup]:
    """Return the rows of one micro-batch on any nodes, a group per work that is equal: that of a step (strong scaling)
    or that of a device (weak), whichever needs fewer groups."""
    groups = []
    for question, rows in _regroup(
        (({**question, "nodes": None}, rows) for question, rows in _group_by_name(summary)), ["micro"]
    ):
        by_device, by_step = (_regroup([(question, rows)], [part]) for part in ("accumulation", "global_batch"))
        same, part = (by_step, "global_batch") if len(by_step) < len(by_device) else (by_device, "accumulation")
        groups += [_build_fixed_group(*one, part, f"micro {question['micro']}") for one in same]
    return groups


def rename_row(row: Row) -> Row:
    """Return a row whose variant is what is chosen in it; how it was measured stands apart, as its `protocol`."""
    name, protocol = split_protocol(row["variant"])
    return row | {"variant": name, "protocol": protocol}


def describe_protocols(rows: Iterable[Row]) -> str:
    """Say by which settings rows that bear one name were measured otherwise; empty where all are alike."""
    protocols = sorted({", ".join(row["protocol"]) for row in rows if row.get("protocol")})
    return f"Measured in several ways, which no name says: {'; '.join(protocols)}." if protocols else ""


def build_question(row: Row) -> Question:
    """Return the question that a row of a table or a summary answers."""
    known = add_lengths(row)
    return {part: known[part] for part in QUESTION}


def describe_runs(results: Results, places: Sequence[int]) -> list[tuple[str, str]]:
    """Return of runs, rows of the run table, what they answer and what is chosen in them."""
    rows: list[Row] = list_rows(results.table.iloc[list(places)])
    all_questions = [build_question(row) for row in rows]
    variants = dict(zip(results.summary["config_id"], results.summary["variant"], strict=True))
    chosen = [describe_choice(row | {"variant": variants[row["config_id"]]}) for row in rows]
    return list(zip((name_question(one, all_questions) for one in all_questions), chosen, strict=True))


def build_grid(groups: Sequence[QuestionGroup]) -> Grid:
    """Return a panel per group; of more than WHOLE the MOST with the most numbers, of every model."""
    shown = sort_groups(groups) if len(groups) <= WHOLE else _select_groups(sort_groups(groups))
    figure, axes = build_empty_panels(len(shown))
    all_questions = [group.question for group in shown]
    for one, question in zip(axes, all_questions, strict=True):
        draw_title(one, describe_question(question, all_questions))
    drawn = [Panel(one, *group) for one, group in zip(axes, shown, strict=True)]
    return Grid(figure, drawn, describe_omitted(len(groups), "panels", "fewest numbers of each model", len(shown)))


def build_empty_panels(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of print width with so many axes, row by row."""
    columns = {0: 1, 1: 1, 2: 2, 4: 2}.get(panels, 3 if panels <= 12 else 4)
    lines = math.ceil(panels / columns) or 1
    width = _WIDTH_IN if columns > 1 else _WIDTH_IN * 0.6
    figure = Figure(figsize=(width, _ABOVE_IN + _HEIGHTS_IN[columns] * lines), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, index + 1) for index in range(panels)]


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


def describe_omitted(number: int, what: str, why: str, most: int) -> str:
    """Say how many of `number` are not drawn, and which."""
    return f"{number - most} of {number} {what} left out, those with the {why}." if number > most else ""


def _group_by_name(summary: pd.DataFrame) -> list[tuple[Question, list[Row]]]:
    return [(question, [rename_row(row) for row in rows]) for question, rows in group_rows(summary)]


def _regroup(
    groups: Iterable[tuple[Question, Sequence[Row]]], parts: Sequence[str]
) -> list[tuple[Question, list[Row]]]:
    """Return rows by question and `parts`, which become part of it."""
    found: dict[tuple[Any, ...], tuple[Question, list[Row]]] = {}
    for question, rows in groups:
        for row in rows:
            shared = {**question, **{part: row[part] for part in parts}}
            found.setdefault(tuple(shared.values()), (shared, []))[1].append(row)
    return list(found.values())


def _build_fixed_group(question: Question, rows: Sequence[Row], part: str, *named: str) -> QuestionGroup:
    """Say in the title what is equal in all rows, so that a curve's name need not."""
    (first, *others) = {row[part] for row in rows}
    if others:
        return QuestionGroup({**question, "held": " · ".join(named)}, rows)
    title_parts = (
        [f"global batch {first}"] if part == "global_batch" else [f"× {first} accumulated"] if first > 1 else []
    )
    return QuestionGroup(
        {**question, "held": " · ".join([*named, *title_parts])}, [row | {"accumulation": 1} for row in rows]
    )


def describe_question(question: Question, all_questions: Sequence[Question]) -> list[str]:
    """Name a group: what it asks, and what is held equal in it."""
    if question["nodes"] is not None:
        asks = name_question(question, all_questions)
    else:
        rivals = {other["devices_per_node"] for other in all_questions if other["model"] == question["model"]}
        devices = [f"{question['devices_per_node']} per node"] if len(rivals) > 1 else []
        asks = " · ".join([question["model"], *devices, *describe_differences(question, all_questions)])
    return [word for word in f"{asks} · {question['held']}".split(" · ") if word]


def sort_groups(groups: Sequence[QuestionGroup]) -> list[QuestionGroup]:
    """Return groups in the order of a figure's panels."""
    return sorted(groups, key=_build_sort_key(groups))


def _select_groups(groups: Sequence[QuestionGroup]) -> list[QuestionGroup]:
    """Return the groups with the most numbers, as many of each model as there is room for, in their order."""
    numbers = [sum(row["n"] > 0 for row in group.rows) for group in groups]
    turns: Counter[str] = Counter()
    ranked = []
    for place in sorted(range(len(groups)), key=lambda place: -numbers[place]):
        model = groups[place].question["model"]
        ranked.append((turns[model], place))
        turns[model] += 1
    return [groups[place] for place in sorted(place for _, place in sorted(ranked)[:MOST])]


def _build_sort_key(groups: Sequence[QuestionGroup]) -> Callable[[QuestionGroup], tuple[Any, ...]]:
    """Models apart, small ones first, then precisions and the rest, with ranks and micro-batches counting upwards."""
    sizes: dict[str, int] = {}
    for group in groups:
        for row in group.rows:
            sizes[row["model"]] = max(sizes.get(row["model"], 0), row["parameters"] or 0)

    def place(group: QuestionGroup) -> tuple[Any, ...]:
        question = group.question
        nodes, devices = question["nodes"] or 1, question["devices_per_node"]
        others = [str(question[part]) for part in QUESTION if part not in ("model", "environment_id", "nodes")]
        model, micro, held = question["model"], question.get("micro", 0), question["held"]
        return sizes[model], model, question["precision"], nodes * devices, nodes, micro, others, held

    return place
