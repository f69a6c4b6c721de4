"""What the page shows of single runs when asked: every column, the record, the end of the log."""

from collections.abc import Sequence
from typing import Any

from analysis.columns import list_columns
from analysis.formats import format_cell
from analysis.questions import describe_choice, format_ranks
from analysis.report.charts import build_row_key
from analysis.report.evidence import Evidence, format_record
from analysis.summary import Row

TEXT_BYTES = 8 * 2**20
"""Of records and logs on one page; a browser opens that in a second."""


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
