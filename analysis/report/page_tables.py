"""Tables as the page shows them: the columns it has room for, and rows under a heading for each model of several."""

from collections.abc import Sequence
from typing import NamedTuple

from analysis.report.limits import MOST_ROWS
from analysis.report.summary_tables import ColumnHeading, TableCell, TextTable

_LONG = 20
"""Rows of a table that scrolls in a box of its own."""


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
