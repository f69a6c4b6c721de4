"""Groups of summary rows for figures: one group per panel, in the order of the panels."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from analysis.formats import shorten_keys
from analysis.questions import (
    QUESTION,
    Question,
    add_lengths,
    describe_choice,
    describe_differences,
    describe_series,
    name_question,
)
from analysis.questions import group_by_question as group_rows
from analysis.results import Results
from analysis.summary import Row
from analysis.table import Item, group_by, list_rows

_COMMON_FLAGS = ("short", "unverified")
"""Flags that most runs of a quick study carry. Figures omit them, so that rarer flags stand out; tables list them."""


class QuestionGroup(NamedTuple):
    """Rows of the summary that are drawn in one panel.

    Rows are compared only if certain settings have equal values. `question` has these values. `question.nodes` is None
    if the rows have different node counts. `question.held` describes other settings that are also equal in all rows.
    """

    question: Question
    rows: Sequence[Row]


def group_by_question(summary: pd.DataFrame) -> list[QuestionGroup]:
    """Return one group per question. A question is a set of rows that are compared with each other, because they do the
    same work on equal hardware."""
    return [_build_fixed_group(question, rows, "accumulation") for question, rows in group_rows(summary)]


def group_by_micro(summary: pd.DataFrame) -> list[QuestionGroup]:
    """Return groups of rows with equal micro-batch and equal work, on any number of nodes.

    Equal work means either an equal global batch per step (strong scaling) or equal work per device (weak scaling).
    Records do not state which of the two a study investigates. The kind of scaling that gives fewer groups is assumed.
    """
    groups, any_nodes = [], (({**question, "nodes": None}, rows) for question, rows in group_rows(summary))
    for question, rows in _regroup(any_nodes, "micro"):
        # A study scales either strongly or weakly: the law that gives fewer groups is taken to be the study's.
        by_device, by_step = (_regroup([(question, rows)], part) for part in ("accumulation", "global_batch"))
        same, part = (by_step, "global_batch") if len(by_step) < len(by_device) else (by_device, "accumulation")
        groups += [_build_fixed_group(*one, part, f"micro {question['micro']}") for one in same]
    return groups


def build_question(row: Row) -> Question:
    """Return the question to which a row of the run table or summary belongs: the row's values of the settings that
    must be equal for two configurations to be compared."""
    known = add_lengths(row)
    return {part: known[part] for part in QUESTION}


def describe_runs(results: Results, places: Sequence[int]) -> list[tuple[str, str]]:
    """Return for each run in `places` (row indices of the run table) two texts. The first names its question, which is
    the work and hardware that compared runs share. The second names its configuration."""
    rows: list[Row] = list_rows(results.table.iloc[list(places)])
    all_questions = [build_question(row) for row in rows]
    variants = dict(zip(results.summary["config_id"], results.summary["variant"], strict=True))
    variants |= {one: variants[first] for one, first in results.configuration_ids.items()}
    named = []
    for row, question in zip(rows, all_questions, strict=True):
        choice, flags = describe_choice(row | {"variant": variants[row["config_id"]]}), " ".join(list_rare_flags(row))
        named.append((name_question(question, all_questions), shorten_keys(choice) + (f" [{flags}]" if flags else "")))
    return named


def list_rare_flags(row: Row) -> list[str]:
    """Return the flags of a row, except the flags that most runs of a quick study carry and that figures therefore
    omit."""
    return [flag for flag in row["flags"].split() if flag not in _COMMON_FLAGS]


def describe_omitted(number: int, what: str, why: str, most: int) -> str:
    """Return a sentence on how many of `number` things are not drawn, because a figure shows at most `most` of them;
    empty if all are drawn. `what` names the things, such as "curves". `why` describes the omitted things, such as
    "fewest points"."""
    return f"{number - most} of {number} {what} are omitted: those with the {why}." if number > most else ""


def join_equal(pairs: Iterable[tuple[Question, Item]]) -> list[tuple[Question, list[Item]]]:
    """Return each distinct question of the pairs, with the list of its items. Questions and items keep their order."""
    groups = group_by(pairs, lambda pair: tuple(pair[0].values()))
    return [(members[0][0], [item for _, item in members]) for members in groups.values()]


def _regroup(groups: Iterable[tuple[Question, Sequence[Row]]], part: str) -> list[tuple[Question, list[Row]]]:
    """Return the groups divided further, so that the rows of a group also have equal values in the column `part`. This
    value is added to the question, which names the settings that are equal in a group."""
    return join_equal(({**question, part: row[part]}, row) for question, rows in groups for row in rows)


def _build_fixed_group(question: Question, rows: Sequence[Row], part: str, *named: str) -> QuestionGroup:
    """Return a group of rows. If the column `part` has the same value in all rows, the value is added to the panel's
    title, and the names of curves omit it. `named` are further parts of the title."""
    (first, *others) = {row[part] for row in rows}
    if others:
        return QuestionGroup({**question, "held": " · ".join(named)}, rows)
    fixed = [f"global batch {first}"] if part == "global_batch" else [f"× {first} accumulated"] * (first > 1)
    shared = {**question, "held": " · ".join([*named, *fixed])}
    return QuestionGroup(shared, [row | {"accumulation": 1} for row in rows])


def describe_question(question: Question, all_questions: Sequence[Question]) -> list[str]:
    """Return the words of a panel's title: the question (the work and hardware that the rows of the panel share), and
    further settings that are equal in all these rows. `all_questions` are the questions of all panels. A setting of the
    question, such as the precision, is named only if it differs among them."""
    if question["nodes"] is not None:
        asks = name_question(question, all_questions)
    else:
        rivals = {other["devices_per_node"] for other in all_questions if other["model"] == question["model"]}
        devices = [f"{question['devices_per_node']} per node"] if len(rivals) > 1 else []
        asks = " · ".join([question["model"], *devices, *describe_differences(question, all_questions)])
    return [word for word in f"{asks} · {question['held']}".split(" · ") if word]


def name_series(rows: Sequence[Row]) -> list[str]:
    """Return for each row the name of its curve. In this name, config keys are shortened to their last component. The
    name contains the number of accumulated micro-steps only if two rows would have the same name without this
    number."""
    short = [shorten_keys(describe_series(row | {"accumulation": 1})) for row in rows]
    long = [shorten_keys(describe_series(row)) for row in rows]
    several = {name for name in short if len({long[place] for place, one in enumerate(short) if one == name}) > 1}
    return [whole if name in several else name for name, whole in zip(short, long, strict=True)]


def sort_groups(groups: Sequence[QuestionGroup]) -> list[QuestionGroup]:
    """Return groups in the order of a figure's panels: by parameters of the model, precision, number of ranks, and
    micro-batch."""
    sizes: dict[str, int] = {}
    for row in (row for group in groups for row in group.rows):
        sizes[row["model"]] = max(sizes.get(row["model"], 0), row["parameters"] or 0)

    # The environment class is a hash, so it does not influence the order.
    def place(group: QuestionGroup) -> tuple[Any, ...]:
        question = group.question
        nodes, devices = question["nodes"] or 1, question["devices_per_node"]
        others = [str(question[part]) for part in QUESTION if part not in ("model", "environment_id", "nodes")]
        model, micro, held = question["model"], question.get("micro", 0), question["held"]
        return sizes[model], model, question["precision"], nodes * devices, nodes, micro, others, held

    return sorted(groups, key=place)
