"""What a reader can narrow the page by: the columns in which its runs differ, and where a row stands among them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from analysis.columns import list_all_columns
from analysis.formats import format_cell
from analysis.summary import Row

_LABELS = {
    "study": "Study", "model": "Model", "engine": "Engine", "nodes": "Nodes", "devices_per_node": "Devices per node",
    "micro": "Micro-batch", "activation_checkpointing": "Activation checkpointing",
    "precision": "Precision", "machine": "Machine", "outcome": "Outcome",
}  # fmt: skip


class Facet(NamedTuple):
    """A column to narrow by, with all its values and how they are written."""

    column: str
    label: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]


def find_facets(rows: Iterable[Row]) -> tuple[Facet, ...]:
    """Return the columns that have several values in these rows of the run table."""
    known = list(rows)
    found = [_build_facet(column, label, known) for column, label in _LABELS.items()]
    return tuple(facet for facet in found if len(facet.values) > 1)


def find_place(row: Row, page_facets: Sequence[Facet]) -> str:
    """Return where a row stands: the index of its value per facet; empty where it has none, and is never left out."""
    values_by_facet = [(facet, row.get(facet.column)) for facet in page_facets]
    return ",".join("" if value is None else str(facet.values.index(value)) for facet, value in values_by_facet)


def _build_facet(column: str, label: str, rows: Sequence[Row]) -> Facet:
    values = tuple(sorted({row[column] for row in rows if row[column] is not None}))
    return Facet(column, label, values, tuple(format_cell(list_all_columns()[column], value) for value in values))
