"""Contents of the report's page: rows of its tables, its filters, and the records and logs of single runs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pydantic_core

from analysis.columns import list_all_columns, list_columns
from analysis.drawing import select_evenly
from analysis.formats import format_cell
from analysis.questions import describe_choice, format_ranks
from analysis.report.tables import ColumnHeading, TableCell, TextTable
from analysis.results import Results
from analysis.summary import KEY, Row, is_disturbed
from analysis.table import group_by
from bench.core.errors import make_printable
from bench.core.files import open_regular, read_regular
from bench.core.private import mask_tokens
from bench.core.record import RunRecord
from bench.core.store import LOG, Unreadable

MOST_ROWS, MOST_FAILURES = 1000, 200
"""Most rows per table on the page, and most failures. The files next to the page have all of them."""
_TEXT_BYTES, _LEAST_TEXT_BYTES, _ROW_BYTES = 1_500_000, 200_000, 3_200
"""Most bytes of records and logs on the page, before compression to about 8 %, and the bytes by which each run reduces
this limit. Its rows and points take as much room on the page. This keeps a page of 400 runs below a megabyte."""

_LONG = 20
"""Number of rows above which a table scrolls in a box of its own."""
_LABELS = {
    "study": "Study", "model": "Model", "engine": "Engine", "nodes": "Nodes", "devices_per_node": "Devices per node",
    "micro": "Micro-batch", "activation_checkpointing": "Activation checkpointing",
    "precision": "Precision", "adapter": "Adapter", "machine": "Machine", "outcome": "Outcome",
}  # fmt: skip
TAIL_LINES = 60
"""Last lines of a log that the page shows."""
_TAIL_BYTES = 32 * 1024
_SERIES = 40  # most values of a list in a record that are written; a longer list is cut
_SCALARS = re.compile(r"\[\n\s*[^\[\]{}]*?\n\s*\]")


class Evidence(NamedTuple):
    """Files that show how one run ended: its folder, its record and the last lines of its log."""

    folder: Path
    record: RunRecord | None  # None: its file is gone
    log: str  # its last lines; empty without a log


class Facet(NamedTuple):
    """A filter of the page: a column of the run table, its label, and its distinct values with their texts."""

    column: str
    label: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]


class TableRow(NamedTuple):
    """A row of a table on the page.

    `facets` lists, for each filter of the page, the values that the row has in the filter's column. Each value is
    written as its index in `Facet.values` (format: `find_place`). `opens` names the details that a click on the row
    opens; empty for none. `disturbed` is True if all runs of the row were made on a busy machine. The page shows a
    disturbed row in grey, and its times are not compared.
    """

    facets: str
    cells: tuple[TableCell, ...]
    opens: str = ""
    disturbed: bool = False


class RowGroup(NamedTuple):
    """Rows of a table under a heading. The heading is empty if the table has only one group."""

    heading: str
    rows: tuple[TableRow, ...]


class PageTable(NamedTuple):
    """A table of the page.

    If the page does not show all rows, `omitted` is a sentence on the rows that only the CSV file contains. `notes`
    explain intervals and units.
    """

    content: TextTable
    head: tuple[ColumnHeading, ...]
    groups: tuple[RowGroup, ...]
    omitted: str
    notes: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """Label and unit of each column."""
        return [f"{heading.label}, {heading.unit}" if heading.unit else heading.label for heading in self.head]

    @property
    def numbers(self) -> list[int]:
        """Positions of the columns that contain numbers, counted from 1."""
        return [place for place, heading in enumerate(self.head, 1) if heading.number]

    @property
    def is_long(self) -> bool:
        return sum(len(group.rows) for group in self.groups) > _LONG


def build_row_key(row: Row) -> tuple[Any, ...]:
    """Return the values of a summary row that distinguish it from all other rows."""
    return tuple(row[name] for name in KEY)


def select_runs(rows: Sequence[Row]) -> list[int]:
    """Return the row indices of the runs that the page shows, at most MOST_ROWS.

    If there are more runs, the first runs of each configuration are selected, the same number from each configuration
    as far as possible.
    """
    return select_evenly([(place, build_row_key(row)) for place, row in enumerate(rows)], MOST_ROWS)


def select_failures(rows: Sequence[Row]) -> list[int]:
    """Return the row indices of the failed runs that the page shows."""
    return [place for place, row in enumerate(rows) if row["outcome"] != "ok"][:MOST_FAILURES]


def find_facets(rows: Iterable[Row]) -> tuple[Facet, ...]:
    """Return a filter for each column that has several values in these rows of the run table."""
    known, facets = list(rows), []
    for name, label in _LABELS.items():
        values = tuple(sorted({row[name] for row in known if row.get(name) is not None}))
        facets.append(Facet(name, label, values, tuple(format_cell(list_all_columns()[name], one) for one in values)))
    return tuple(facet for facet in facets if len(facet.values) > 1)


def find_place(rows: Sequence[Row], page_facets: Sequence[Facet]) -> str:
    """Return a text that lists, for each filter of the page, the values that these rows have in the filter's column. A
    value is written as its index in `Facet.values`. Commas separate filters, and "|" separates values. For example,
    "0|2,1" means values 0 and 2 of the first filter, and value 1 of the second filter.

    If no row has a value for a filter, the text is empty at this filter, as in "0|2,". Such a filter never hides these
    rows.
    """
    values = ((facet, dict.fromkeys(row.get(facet.column) for row in rows)) for facet in page_facets)
    return ",".join(
        "|".join(str(facet.values.index(one)) for one in found if one is not None) for facet, found in values
    )


def build_page_table(
    content: TextTable, rows: Sequence[Sequence[Row]], facets: Sequence[Facet], all_rows: int, *, opens: bool = False
) -> PageTable:
    """Return a table as the page shows it.

    `rows` holds the sources of each row of `content`: the rows of the run table or summary from which it was built.
    `facets` are the filters of the page. If a filter excludes all sources of a row, the filter hides the row.
    `all_rows` is the number of rows that the table would have if the page were not limited to MOST_ROWS. If `opens` is
    set, a click on a row opens its details.
    """
    # The files have all columns. To fit a screen, the page uses some columns as headings of groups and omits others.
    shown = [place for place, heading in enumerate(content.head) if heading.place == "table"]
    headings = [place for place, heading in enumerate(content.head) if heading.place == "groups"]
    groups: dict[str, list[TableRow]] = {}
    for index, (members, cells) in enumerate(zip(rows[:MOST_ROWS], content.rows[:MOST_ROWS], strict=True)):
        details = f"{content.name} {index}" if opens else ""
        disturbed = all(map(is_disturbed, members))
        made = TableRow(find_place(members, facets), tuple(cells[place] for place in shown), details, disturbed)
        groups.setdefault(", ".join(cells[place].text for place in headings), []).append(made)
    head = tuple(content.head[place] for place in shown)
    notes = [f"{heading.label} in {heading.unit}, {heading.note}" for heading in head if heading.note]
    grey = any(row.disturbed for members in groups.values() for row in members)
    notes += ["grey rows: made on a busy machine, so their times are excluded"] * grey
    of_page = tuple(RowGroup(heading, tuple(members)) for heading, members in groups.items())
    omitted = f"Shown: {MOST_ROWS:,} of {all_rows:,} rows. The CSV file has all rows." if all_rows > MOST_ROWS else ""
    return PageTable(content, head, of_page, omitted, tuple(filter(None, (content.note, *notes))))


def find_text_limit(runs: int) -> int:
    """Return the maximum number of bytes of records and logs on a page with `runs` runs, before compression."""
    return max(_TEXT_BYTES - _ROW_BYTES * runs, _LEAST_TEXT_BYTES)


def build_details(
    configurations: Sequence[Row],
    runs: Sequence[Row],
    evidence: Sequence[Evidence],
    configuration_ids: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[Any]]:
    """Return the details that the page's script shows for a row of the summary or of the run table.

    `evidence` holds the records and logs of `runs`. If all records and logs together are too long for the page, those
    of failed runs are included first, then those of runs with background load or a pause. Trainings that differ only in
    their seed have one config_id in the summary. `configuration_ids` maps the config_id of each training to this
    config_id.
    """
    # Failures and disturbed runs come first, since readers want to know their causes.
    texts, spent, limit = {}, 0, find_text_limit(len(runs))
    order = [(row["outcome"] == "ok", not is_disturbed(row), place) for place, row in enumerate(runs)]
    for *_, place in sorted(order):
        record = evidence[place].record
        text = (format_record(record) if record else "", evidence[place].log)
        spent += sum(map(len, text))
        if spent <= limit:
            texts[place] = text
    pooled = [row | {"config_id": configuration_ids.get(row["config_id"], row["config_id"])} for row in runs]
    behind = group_by(range(len(runs)), lambda place: build_row_key(pooled[place]))
    return {
        "columns": [[column.name, column.meaning] for column in list_columns().values()],
        "runs": [_build_run_details(row, evidence[place], texts.get(place)) for place, row in enumerate(runs)],
        "configurations": [
            [_format_title(row), behind.get(build_row_key(row), []), row["runs"]] for row in configurations
        ],
    }


def _build_run_details(row: Row, evidence: Evidence, texts: tuple[str, str] | None) -> list[Any]:
    """Return title, folder, cells, record and log of a run. Record and log are None if the page has no room for
    them."""
    title = f"{_format_title(row | {'variant': ''})}, repeat {row['repeat']}, attempt {row['attempt']}"
    cells = ["" if row[name] is None else format_cell(column, row[name]) for name, column in list_columns().items()]
    return [title, str(evidence.folder), cells, *(texts or (None, None))]


def _format_title(row: Row) -> str:
    return f"{row['model']}: {describe_choice(row)}, {format_ranks(row)}, {row['precision']}"


def read_evidence(results: Results, row: int) -> Evidence:
    """Return folder, record and end of the log for a row index of the run table."""
    folder = results.get_file(row).parent
    try:
        record: RunRecord | None = results.record(row)
    except (OSError, Unreadable):
        record = None
    return Evidence(folder, record, read_tail(folder / LOG))


def read_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, without control characters. Empty if there is no log."""
    try:
        size, content = _read_end(log)
    except OSError:
        return ""
    text = mask_tokens(content).decode(errors="replace").splitlines()
    whole = text if size <= _TAIL_BYTES else text[1:]  # the first line is cut
    return "\n".join(map(make_printable, whole[-lines:]))


def _read_end(log: Path) -> tuple[int, bytes]:
    """Return the size of a log in bytes, and its last bytes."""
    try:
        with open(log, "rb", opener=open_regular) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return size, file.read()
    except NotADirectoryError:  # it is in an archive
        content = read_regular(log)
        return len(content), content[-_TAIL_BYTES:]


def format_record(record: RunRecord) -> str:
    """Return a record as indented JSON. Each list of numbers is on one line, and long lists are cut."""
    # Lists of scalars are joined to one line, since a series of a thousand steps would fill the page.
    plain = _shorten_series(record.model_dump(mode="json", by_alias=True))
    text = pydantic_core.to_json(plain, indent=1).decode()  # ten times as fast as json with an indent
    return _SCALARS.sub(lambda found: re.sub("\n *", " ", found[0]), text)


def list_reasons(record: RunRecord) -> list[tuple[str, str]]:
    """Return facts from a record that explain the outcome of a run, as pairs of label and text.

    Strings keep their line breaks; other values are written as JSON.
    """
    texts: list[tuple[str, str]] = []
    for label, value in record.outcome.evidence.items():
        if isinstance(value, str):
            texts.append((label, value))
        elif isinstance(value, dict) and value and all(isinstance(part, str) for part in value.values()):
            texts += [(f"{label} {part}", text) for part, text in value.items()]
        else:
            texts.append((label, json.dumps(value, indent=1, ensure_ascii=False)))
    return texts


def _shorten_series(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shorten_series(part) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > _SERIES and not any(isinstance(part, dict | list) for part in value):
        return [*value[:_SERIES], f"… {len(value) - _SERIES:,} more in record.json"]
    return [_shorten_series(part) for part in value]
