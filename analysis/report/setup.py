"""What was asked: what the runs of a set vary, what they hold equal, and how many ended how."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from analysis.columns import list_columns
from analysis.formats import format_cell
from analysis.summary import Row

_PARTS = {
    "model": "model", "engine": "engine", "nodes": "nodes", "devices_per_node": "devices per node",
    "micro": "micro-batch", "accumulation": "accumulation", "precision": "precision",
    "activation_checkpointing": "activation checkpointing", "data": "data", "machine": "machine", "seed": "seed",
    "evidence": "evidence",
}  # fmt: skip


class RunSetup(NamedTuple):
    """The parts of the configurations by whether they vary, each with its values; and the runs by outcome."""

    varied: tuple[tuple[str, str], ...]
    constant: tuple[tuple[str, str], ...]
    ran: str


def describe_setup(rows: Sequence[Row]) -> RunSetup:
    """Return what the rows of a run table were made to find out."""
    known = list_columns()
    values = {label: (known[name], sorted({row[name] for row in rows})) for name, label in _PARTS.items()}
    texts = {
        label: ", ".join(format_cell(column, value) for value in found) for label, (column, found) in values.items()
    }
    several = {label for label, (_, found) in values.items() if len(found) > 1}
    return RunSetup(
        tuple((label, text) for label, text in texts.items() if label in several),
        tuple((label, text) for label, text in texts.items() if label not in several),
        _describe_runs(rows),
    )


def format_outcomes(ended: Counter[str]) -> str:
    """Write how often what ended how, the most frequent first."""
    return ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in ended.most_common())


def _describe_runs(rows: Sequence[Row]) -> str:
    configurations = len({row["config_id"] for row in rows})
    runs, several = _format_count(len(rows), "run"), _format_count(configurations, "configuration")
    return f"{runs} of {several}: {format_outcomes(Counter(row['outcome'] for row in rows))}"


def _format_count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
