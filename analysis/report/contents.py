"""Selections for the page: the rows of its tables, the facets of its filters, and the details of single runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from analysis.columns import list_all_columns, list_columns
from analysis.formats import format_cell
from analysis.questions import describe_choice, format_ranks
from analysis.report.evidence import Evidence, format_record
from analysis.report.tables import ColumnHeading, TableCell, TextTable
from analysis.summary import KEY, Row, is_disturbed

MOST_ROWS, MOST_FAILURES = 1000, 200
"""Rows of each table, and failures, on the page. The files next to the page hold everything."""
TEXT_BYTES = 300_000
"""Bytes of records and logs on the page, which keeps it below a megabyte."""

_LONG = 20
"""Rows from which a table scrolls in a box of its own."""
_LABELS = {
    "study": "Study", "model": "Model", "engine": "Engine", "nodes": "Nodes", "devices_per_node": "Devices per node",
    "micro": "Micro-batch", "activation_checkpointing": "Activation checkpointing",
    "precision": "Precision", "machine": "Machine", "outcome": "Outcome",
}  # fmt: skip


class Facet(NamedTuple):
    """A column to filter by, with all its values and their texts."""

    column: str
    label: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]


class TableRow(NamedTuple):
    """A row of a table of the page, with the indices of its values among the facets.

    `opens`: the details that it opens, or empty. `disturbed`: its times decide nothing, so it is grey.
    """

    facets: str
    cells: tuple[TableCell, ...]
    opens: str = ""
    disturbed: bool = False


class RowGroup(NamedTuple):
    """Rows under a heading, which is empty if there is only one group."""

    heading: str
    rows: tuple[TableRow, ...]


class PageTable(NamedTuple):
    """A table of the page. `omitted`: a sentence on rows that only the files hold; `notes`: on intervals and units."""

    content: TextTable
    head: tuple[ColumnHeading, ...]
    groups: tuple[RowGroup, ...]
    omitted: str
    notes: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        return sum(len(group.rows) for group in self.groups) > _LONG


def build_row_key(row: Row) -> tuple[Any, ...]:
    """Return the key that identifies a row of the summary."""
    return tuple(row[name] for name in KEY)


def select_runs(rows: Sequence[Row]) -> list[int]:
    """Return the places of the runs on the page: of too many, the first runs of each configuration, as many of each as
    there is room for."""
    turns: Counter[Any] = Counter()
    ordered = []
    for place, row in enumerate(rows):
        ordered.append((turns[build_row_key(row)], place))
        turns[build_row_key(row)] += 1
    return sorted(place for _, place in sorted(ordered)[:MOST_ROWS])


def select_failures(rows: Sequence[Row]) -> list[int]:
    """Return the places of the failures on the page."""
    return [place for place, row in enumerate(rows) if row["outcome"] != "ok"][:MOST_FAILURES]


def find_facets(rows: Iterable[Row]) -> tuple[Facet, ...]:
    """Return the columns that have several values in these rows of the run table."""
    known, facets = list(rows), []
    for name, label in _LABELS.items():
        values = tuple(sorted({row[name] for row in known if row[name] is not None}))
        facets.append(Facet(name, label, values, tuple(format_cell(list_all_columns()[name], one) for one in values)))
    return tuple(facet for facet in facets if len(facet.values) > 1)


def find_place(row: Row, page_facets: Sequence[Facet]) -> str:
    """Return the index of a row's value in each facet, with commas; empty for no value, which no filter hides."""
    values_by_facet = [(facet, row.get(facet.column)) for facet in page_facets]
    return ",".join("" if value is None else str(facet.values.index(value)) for facet, value in values_by_facet)


def build_page_table(
    content: TextTable, rows: Sequence[Row], facets: Sequence[Facet], all_rows: int, *, opens: bool = False
) -> PageTable:
    """Return a table as the page shows it.

    `rows`: the rows of a run table or summary that `content` was made of. `all_rows`: their number without a limit.
    `opens`: whether a row opens details.
    """
    shown = [place for place, heading in enumerate(content.head) if heading.place == "table"]
    headings = [place for place, heading in enumerate(content.head) if heading.place == "groups"]
    groups: dict[str, list[TableRow]] = {}
    for index, (row, cells) in enumerate(zip(rows[:MOST_ROWS], content.rows[:MOST_ROWS], strict=True)):
        details = f"{content.name} {index}" if opens else ""
        made = TableRow(find_place(row, facets), tuple(cells[place] for place in shown), details, is_disturbed(row))
        groups.setdefault(", ".join(cells[place].text for place in headings), []).append(made)
    head = tuple(content.head[place] for place in shown)
    notes = [f"{heading.label} in {heading.unit}, {heading.note}" for heading in head if heading.note]
    notes += ["grey: made on a busy machine, so its times decide nothing"] * any(map(is_disturbed, rows))
    return PageTable(
        content,
        head,
        tuple(RowGroup(heading, tuple(members)) for heading, members in groups.items()),
        f"{MOST_ROWS:,} of {all_rows:,} rows; the CSV has all." if all_rows > MOST_ROWS else "",
        tuple(filter(None, (content.note, *notes))),
    )


def build_details(configurations: Sequence[Row], runs: Sequence[Row], left: Sequence[Evidence]) -> dict[str, list[Any]]:
    """Return the details that the page's script shows of rows of the summary and of the run table.

    `left`: the evidence of the runs. If it is too much for one page, that of failures is kept first.
    """
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
            [_format_title(row), behind.get(build_row_key(row), []), row["runs"]] for row in configurations
        ],
    }


def _build_run_details(row: Row, left: Evidence, texts: tuple[str, str] | None) -> list[Any]:
    """Return title, folder, cells, record and log; the last two are None if the page has no room for them."""
    title = f"{_format_title(row | {'variant': ''})}, repeat {row['repeat']}, attempt {row['attempt']}"
    cells = ["" if row[name] is None else format_cell(column, row[name]) for name, column in list_columns().items()]
    return [title, str(left.folder), cells, *(texts or (None, None))]


def _format_title(row: Row) -> str:
    return f"{row['model']}: {describe_choice(row)}, {format_ranks(row)}, {row['precision']}"
