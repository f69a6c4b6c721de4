"""Texts of the report: settings of the runs, numbers with their intervals, and tooltips of points in figures."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from analysis.columns import list_all_columns
from analysis.drawing import format_reason
from analysis.formats import (
    MISSING,
    format_cell,
    format_interval_kind,
    format_outcomes,
    format_significant,
    format_size,
    format_within,
)
from analysis.questions import describe_choice, format_ranks, list_varied
from analysis.summary import Row
from bench.core.formatting import format_count, format_value
from bench.core.point_fields import flatten
from bench.core.spec import RunSpec

_REASON_LETTERS = 120
_PARTS = {
    "model": "model", "engine": "engine", "nodes": "nodes", "devices_per_node": "devices per node",
    "micro": "micro-batch", "accumulation": "accumulation", "precision": "precision",
    "activation_checkpointing": "activation checkpointing", "adapter": "adapter", "data": "data", "machine": "machine",
    "seed": "seed", "evidence": "evidence",
}  # fmt: skip
_EQUAL_PARTS = {
    "global_batch": "samples per step",
    "encoder_length": "encoder length",
    "decoder_length": "decoder length",
    "lengths": "sequence length",
}
"""Labels of columns that are listed only if their value is constant, because they follow from other settings."""
_FIELDS = {"optimizer.lr": "learning rate"}
"""Labels of fields that have no column in every run table."""
_TRAINING = ("model.checkpoint", "data.options.", "optimizer.lr", "learning.tokens")
"""Beginnings of the names of fields that are listed only for trainings, if their value is constant."""
_MOST_VALUES = 12
"""Most values of a setting that are listed."""


class RunSetup(NamedTuple):
    """Settings of the runs as (label, values) pairs, divided into settings that vary and settings that are constant.
    `ran` is a text with the number of runs for each outcome, such as ok or out of memory."""

    varied: tuple[tuple[str, str], ...]
    constant: tuple[tuple[str, str], ...]
    ran: str


def describe_setup(rows: Sequence[Row], specs: Mapping[str, RunSpec], configurations: int) -> RunSetup:
    """Return the settings that vary over the rows of a run table, and the settings that are constant.

    `specs` are those of `Results.configurations`, and `configurations` is the number of rows of the summary.
    """
    varied: list[tuple[str, str]] = []
    constant: list[tuple[str, str]] = []
    for name, label in (_PARTS | _EQUAL_PARTS).items():
        # A run table has the column `adapter` only if a run trains a part of its model.
        found = {row.get(name) for row in rows}
        values = sorted(value for value in found if value is not None)
        text = _join_values([format_cell(list_all_columns()[name], value) for value in values])
        if len(values) == len(found) == 1:  # a setting that some runs lack is not constant
            constant.append((label, text))
        elif values and name in _PARTS:
            varied.append((label, text))
    varied += [(_FIELDS.get(name, name), _join_values(values)) for name, values in list_varied(specs).items()]
    if all(spec.learning.tokens for spec in specs.values()):
        constant += _list_constant_fields(specs.values())
    ran = f"{format_count(len(rows), 'recorded run')} of {format_count(configurations, 'configuration')}"
    if (ids := len(specs)) < configurations:
        ran += f" ({ids:,} config_ids, each counted once per machine, environment class and kind of evidence)"
    outcomes = format_outcomes(Counter(row["outcome"] for row in rows))
    return RunSetup(tuple(varied), tuple(constant), f"{ran}: {outcomes}")


def _list_constant_fields(specs: Iterable[RunSpec]) -> Iterator[tuple[str, str]]:
    """Yield label and value of each field in `_TRAINING` that has the same value in all specs."""
    texts = [
        {name: format_value(value) for name, value in flatten(spec) if name.startswith(_TRAINING)} for spec in specs
    ]
    for name, text in texts[0].items() if texts else ():
        if all(other.get(name) == text for other in texts):
            yield _FIELDS.get(name, name.replace(".options.", ".")), text


def _join_values(values: Sequence[str]) -> str:
    """Return the values of a setting as text. Of many values, only the first and the last are named."""
    if len(values) <= _MOST_VALUES:
        return ", ".join(values)
    return f"{len(values):,} values from {values[0]} to {values[-1]}"


def format_hover(row: Row) -> str:
    """Return the tooltip of a point in a figure, line by line, from its row of the summary."""
    # A reason may contain a whole traceback, but a tooltip must fit a phone's screen.
    reason = f"{row['reason'][:_REASON_LETTERS]}{'…' * (len(row['reason']) > _REASON_LETTERS)}"
    lines = [
        f"{row['model']}: {describe_choice(row)}",
        f"{format_ranks(row)}, {row['precision']}, {row['machine']}",
        *(_list_numbers(row) if row["n"] else [f"{format_reason(row)}{': ' if reason else ''}{reason}"]),
        *(f"{name}: {row[name]}" for name in ("flags", "notes") if row.get(name)),
        f"configuration {row['config_id']}",
    ]
    return "\n".join(lines)


def _list_numbers(row: Row) -> Iterator[str]:
    rate, step, peak = row["tokens_per_s"], row["step_s"], row["peak_allocated_bytes"]
    if row.get("efficiency") is not None:
        value, ends = _format_estimate(row, "efficiency")
        yield f"efficiency {value}, {ends}"
    if row.get("idle_share") is not None:
        expected = row["predicted_idle_share"]
        schedule = "" if expected is None else f"; predicted: {100 * expected:.0f} %"
        yield f"idle {100 * row['idle_share']:.0f} % of a step{schedule}"
    n = f"n\u00a0=\u00a0{row['n']}"
    if rate is not None:
        value, ends = _format_estimate(row, "tokens_per_s")
        known = row["tokens_per_s_low"] is not None
        yield f"{value} tokens/s, " + (f"{ends} ({format_interval_kind(row)}, {n})" if known else f"{ends}, {n}")
    if step is not None:
        value, ends = _format_estimate(row, "step_s")
        yield f"{value} s per step, {ends}"
    yield f"peak {format_size(peak) if peak is not None else MISSING} per rank"


def _format_estimate(row: Row, column: str) -> tuple[str, str]:
    """Return a number of a row, rounded to the digits that its interval supports, and the interval, as two texts."""
    value, low, high = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
    if low is None:
        return format_significant(value), "no interval"
    text, *ends = format_within(value, low, high)
    return text, " to ".join(ends)
