"""What a page has room for; the files beside it hold everything."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from analysis.report.charts import build_row_key
from analysis.summary import Row

MOST_ROWS = 1000
"""Of each table, and so of points and details."""
MOST_FAILURES = 200


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
