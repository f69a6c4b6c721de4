"""What was asked: what the runs of a set vary, what they hold equal, and how many ended how."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from analysis.columns import columns
from analysis.formats.numbers import cell
from analysis.summary import Row

_PARTS = {
    "model": "model", "engine": "engine", "nodes": "nodes", "devices_per_node": "devices per node",
    "micro": "micro-batch", "accumulation": "accumulation", "precision": "precision",
    "activation_checkpointing": "activation checkpointing", "data": "data", "machine": "machine", "seed": "seed",
    "evidence": "evidence",
}  # fmt: skip


class Asked(NamedTuple):
    """The parts of the configurations by whether they vary, each with its values; and the runs by outcome."""

    varied: tuple[tuple[str, str], ...]
    held: tuple[tuple[str, str], ...]
    ran: str


def asked(rows: Sequence[Row]) -> Asked:
    """Return what the rows of a run table were made to find out."""
    known = columns()
    values = {label: (known[name], sorted({row[name] for row in rows})) for name, label in _PARTS.items()}
    told = {label: ", ".join(cell(column, value) for value in found) for label, (column, found) in values.items()}
    several = {label for label, (_, found) in values.items() if len(found) > 1}
    return Asked(
        tuple((label, text) for label, text in told.items() if label in several),
        tuple((label, text) for label, text in told.items() if label not in several),
        _ran(rows),
    )


def outcomes(ended: Counter[str]) -> str:
    """Write how often what ended how, the most frequent first."""
    return ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in ended.most_common())


def _ran(rows: Sequence[Row]) -> str:
    configurations = len({row["config_id"] for row in rows})
    runs, several = _count(len(rows), "run"), _count(configurations, "configuration")
    return f"{runs} of {several}: {outcomes(Counter(row['outcome'] for row in rows))}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
