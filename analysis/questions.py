"""Questions: which rows of a summary compete with each other, and what to call them and their choices."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.columns import LATER
from analysis.early_failures import assign_environments, drop_retried
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.formatting import format_count
from bench.core.spec import LENGTHS

Question = dict[str, Any]

_PLACE = ("model", "nodes", "devices_per_node")
_LENGTHS = {f"{kind}_length": f"{kind}_tokens" for kind in LENGTHS}
_MORE = ("machine", "environment_id", "evidence", "precision", "data", *_LENGTHS, "objective", "lengths")
QUESTION = (*_PLACE, *_MORE)
"""Rows that share these answer one question; engine, layout, batch and activation checkpointing are the choice."""


def group_by_question(summary: pd.DataFrame) -> list[tuple[Question, list[Row]]]:
    """Return the rows of a summary by question, in the order in which they appear.

    Early failures stand with those that asked the same (`analysis.early_failures`). So does a point that a prediction
    called infeasible with those that were measured, unless it was measured after all.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    rows = drop_retried([add_lengths(row) for row in list_rows(summary)])
    ran = {(row["config_id"], row["machine"]) for row in rows if row["evidence"] != "predicted"}
    rows = [row for row in rows if row["evidence"] != "predicted" or (row["config_id"], row["machine"]) not in ran]
    for row, environment_id in assign_environments(rows, _build_question_key):
        key = tuple((row | {"environment_id": environment_id})[name] for name in QUESTION)
        measured = tuple("measured" if part == "predicted" else part for part in key)
        groups.setdefault(measured if measured in groups else key, []).append(row)
    return [(dict(zip(QUESTION, key, strict=True)), rows) for key, rows in groups.items()]


def name_question(question: Question, all_questions: Sequence[Question]) -> str:
    """Name a question: model and ranks, and whatever else sets it apart from others of the model."""
    return " · ".join([question["model"], format_ranks(question), *describe_differences(question, all_questions)])


def format_ranks(question: Question | Row) -> str:
    """Write on how many ranks something ran, by nodes where there are several."""
    nodes, devices = question["nodes"], question["devices_per_node"]
    return f"{nodes} × {devices} ranks" if nodes > 1 else format_count(devices, "rank")


def describe_differences(question: Question, all_questions: Sequence[Question]) -> list[str]:
    """Name what besides its place sets a question apart from others of the model."""
    return [
        _format_part(part, question[part])
        for part in _MORE
        if question[part] is not None and _is_distinguishing(part, question, all_questions)
    ]


def describe_choice(row: Row) -> str:
    """Name what is chosen in a row: the series and its micro-batch."""
    return f"{describe_series(row)}, micro {row['micro']}"


def describe_series(row: Row) -> str:
    """Name what is chosen in a row besides the micro-batch; a `protocol` is what sets it apart in a table."""
    parts = [row["engine"]]
    if row["accumulation"] > 1:
        parts.append(f"× {row['accumulation']} accumulated")
    if row["activation_checkpointing"]:
        parts.append("checkpointed")
    if apart := ", ".join(filter(None, (row["variant"], row.get("protocol")))):
        parts.append(f"({apart})")
    return " ".join(parts)


def _is_distinguishing(part: str, question: Question, all_questions: Sequence[Question]) -> bool:
    """Whether others of the model answer `part` otherwise; an environment class holds the devices per node, so it is
    compared among equal ranks."""
    same_parts = _PLACE if part == "environment_id" else ("model",)
    rivals = [other for other in all_questions if all(other[same] == question[same] for same in same_parts)]
    return len({other[part] for other in rivals}) > 1


def _format_part(part: str, value: Any) -> str:
    if part.endswith("_length"):
        return f"{part.removesuffix('_length')} {value:g}"
    return str(value)


def _build_question_key(row: Row) -> tuple[Any, ...]:
    """Return the question of a row, without the environment. A prediction has the question of its measurement."""
    asked = row | {"environment_id": None, "evidence": "rehearsed" if row["evidence"] == "rehearsed" else "measured"}
    return tuple(asked[name] for name in QUESTION)


def add_lengths(row: Row) -> Row:
    """Add the tokens per sample, which the summary holds per step, and what it holds only where some run needs it."""
    counted = {name: row[tokens] for name, tokens in _LENGTHS.items()}
    lengths = {name: None if count is None else count / row["global_batch"] for name, count in counted.items()}
    return LATER | row | lengths
