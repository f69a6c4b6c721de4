"""What the page has room for: its tables, what a reader can narrow them by, and what it shows of single runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from analysis.columns import list_all_columns, list_columns
from analysis.formats import format_cell
from analysis.questions import describe_choice, format_ranks
from analysis.report.evidence import Evidence, format_record
from analysis.report.tables import ColumnHeading, TableCell, TextTable
from analysis.summary import KEY, Row

MOST_ROWS, MOST_FAILURES = 1000, 200
"""Of each table, and so of details; the files beside the page hold everything."""
TEXT_BYTES = 300_000
"""Of records and logs on one page, so that it stays below a megabyte."""

_LONG = 20
"""Rows of a table that scrolls in a box of its own."""
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


class TableRow(NamedTuple):
    """A row of a table of the page: where it stands among the facets, and which details it opens, if any."""

    facets: str
    cells: tuple[TableCell, ...]
    opens: str = ""


class RowGroup(NamedTuple):
    """Rows under a heading; it is empty where one group is all."""

    heading: str
    rows: tuple[TableRow, ...]


class PageTable(NamedTuple):
    """A table of the page; `omitted` says what only the files hold, `notes` what intervals and units are."""

    content: TextTable
    head: tuple[ColumnHeading, ...]
    groups: tuple[RowGroup, ...]
    omitted: str
    notes: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        return sum(len(group.rows) for group in self.groups) > _LONG


def build_row_key(row: Row) -> tuple[Any, ...]:
    """Return what tells rows of the summary apart."""
    return tuple(row[name] for name in KEY)


def select_runs(rows: Sequence[Row]) -> list[int]:
    """Return the places of the runs that the page shows: of too many, as many of each configuration as there is room
    for, the first ones."""
    turns: Counter[Any] = Counter()
    ordered = []
    for place, row in enumerate(rows):
        ordered.append((turns[build_row_key(row)], place))
        turns[build_row_key(row)] += 1
    return sorted(place for _, place in sorted(ordered)[:MOST_ROWS])


def select_failures(rows: Sequence[Row]) -> list[int]:
    """Return the places of the failures that the page shows with their evidence."""
    return [place for place, row in enumerate(rows) if row["outcome"] != "ok"][:MOST_FAILURES]


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


def build_page_table(content: TextTable, places: Sequence[str], all_rows: int, opens: str = "") -> PageTable:
    """Return a table as the page shows it; `places` are its rows' places among the facets, `all_rows` is how many there
    would be, and `opens` the kind of details behind a row."""
    shown = [place for place, heading in enumerate(content.head) if heading.place == "table"]
    headings = [place for place, heading in enumerate(content.head) if heading.place == "groups"]
    groups: dict[str, list[TableRow]] = {}
    for index, (facets, cells) in enumerate(zip(places[:MOST_ROWS], content.rows[:MOST_ROWS], strict=True)):
        row = TableRow(facets, tuple(cells[place] for place in shown), f"{opens} {index}" if opens else "")
        groups.setdefault(", ".join(cells[place].text for place in headings), []).append(row)
    head = tuple(content.head[place] for place in shown)
    notes = [f"{heading.label} in {heading.unit}, {heading.note}" for heading in head if heading.note]
    return PageTable(
        content,
        head,
        tuple(RowGroup(heading, tuple(rows)) for heading, rows in groups.items()),
        f"{MOST_ROWS:,} of {all_rows:,} rows; the CSV has all." if all_rows > MOST_ROWS else "",
        tuple(filter(None, (content.note, *notes))),
    )


def build_details(configurations: Sequence[Row], runs: Sequence[Row], left: Sequence[Evidence]) -> dict[str, list[Any]]:
    """Return what the page's script shows of these rows of the summary and of the run table, in their places; `left`
    is the evidence of the runs. Failures keep theirs longest where there is too much for one page."""
    texts, spent = {}, 0
    for place in sorted(range(len(runs)), key=lambda place: (runs[place]["outcome"] == "ok", place)):
        record = left[place].record
        text = (format_record(record) if record else "", left[place].log)
        spent += sum(map(len, text))
        if spent <= TEXT_BYTES:
            texts[place] = text
    behind: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(runs):
        behind.setdefault(build_row_key(row), []).append(place)
    return {
        "columns": [[column.name, column.meaning] for column in list_columns().values()],
        "runs": [_build_run_details(row, left[place], texts.get(place)) for place, row in enumerate(runs)],
        "configurations": [
            _build_configuration_details(row, behind.get(build_row_key(row), [])) for row in configurations
        ],
    }


def _build_run_details(row: Row, left: Evidence, texts: tuple[str, str] | None) -> list[Any]:
    """Return title, folder, cells, record and log; the last two None where they did not fit."""
    title = f"{_format_run_title(row | {'variant': ''})}, repeat {row['repeat']}, attempt {row['attempt']}"
    cells = ["" if row[name] is None else format_cell(column, row[name]) for name, column in list_columns().items()]
    return [title, str(left.folder), cells, *(texts or (None, None))]


def _build_configuration_details(row: Row, places: Sequence[int]) -> list[Any]:
    return [_format_run_title(row), list(places), row["runs"]]


def _format_run_title(row: Row) -> str:
    return f"{row['model']}: {describe_choice(row)}, {format_ranks(row)}, {row['precision']}"
