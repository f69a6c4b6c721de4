"""The changes and the values of a history as rows, exact, for programs."""

import csv
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.csv_cells import CsvLines, escape_cell
from analysis.history.series import History, HistoryChange, HistorySeries

CHANGES = (
    "config_id", "machine", "configuration", "by", "before", "after", "earliest_before", "latest_after", "change",
    "change_low", "change_high", "level", "places", "also",
)  # fmt: skip
VALUES = (
    "config_id", "machine", "configuration", "by", "place", "number", "first_started_at", "n", "sample_s",
    "sample_s_lowest", "sample_s_highest", "level_s",
)  # fmt: skip


def list_changes(history: History) -> list[tuple[HistorySeries, HistoryChange]]:
    """Return every change with its series, the latest first."""
    found = [(one, change) for one in history.series for change in one.changes]
    return sorted(found, key=lambda pair: -pair[1].change.after)


def render_tables(history: History) -> dict[str, bytes]:
    """Return the tables as CSV by name."""
    places = [place.key for place in history.axis.places]
    changes = [
        {
            **_name(history, one), "before": places[found.before], "after": places[found.after],
            "earliest_before": places[found.within[0]], "latest_after": places[found.within[1]],
            "change": found.size, "change_low": found.interval.low, "change_high": found.interval.high,
            "level": found.interval.level, "places": found.interval.n, "also": also,
        }
        for one, (found, also) in list_changes(history)
    ]  # fmt: skip
    values = [
        {
            **_name(history, one), "place": places[value.place], "number": value.place,
            "first_started_at": value.origin.started_at, "n": len(value.sample_s), "sample_s": value.typical,
            "sample_s_lowest": min(value.sample_s), "sample_s_highest": max(value.sample_s),
            "level_s": one.level(value.place),
        }
        for one in history.series
        for value in one.values
    ]  # fmt: skip
    return {"changes.csv": _to_csv(CHANGES, changes), "values.csv": _to_csv(VALUES, values)}


def _name(history: History, one: HistorySeries) -> dict[str, Any]:
    return {"config_id": one.config_id, "machine": one.machine, "configuration": one.name, "by": history.axis.by}


def _to_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    lines = CsvLines()
    writer = csv.DictWriter(lines, names, lineterminator=lines.END)
    writer.writeheader()
    writer.writerows({n: escape_cell(v) if isinstance(v, str) else v for n, v in row.items()} for row in rows)
    return str(lines).encode()
