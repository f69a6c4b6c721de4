"""Attempts that failed before their environment was known: one rule of what they say, for all that compare rows.

Beside a row that knows its environment, of the same configuration on the same machine, such a failure says nothing: it
was tried again. Where there is none, it stands with those that asked the same, in the environment that they ran in; and
it may be set against a row of any environment, for it could have run there.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from analysis.summary import Row


class PlacedRow(NamedTuple):
    """A row, and the environment class that it stands in; None where nobody that asked the same knows one."""

    row: Row
    environment_id: str | None


def has_failed_early(row: Row) -> bool:
    """Whether a row has no number and knows no environment; so does a prediction, which never had one."""
    return row["environment_id"] is None and not row["n"]


def drop_retried(rows: Sequence[Row]) -> list[Row]:
    """Leave out the early failures of what was tried again; a rehearsal is no second try of a real run."""
    known = {_build_retry_key(row) for row in rows if row["environment_id"] is not None}
    return [row for row in rows if not has_failed_early(row) or _build_retry_key(row) not in known]


def assign_environments(rows: Iterable[Row], question_of: Callable[[Row], Hashable]) -> list[PlacedRow]:
    """Return each row with its environment, rows with a known environment first. An early failure gets the environment
    of the first row with the same question (`question_of`), preferably of a row with a number."""
    ordered = sorted(rows, key=lambda row: row["environment_id"] is None)
    first: dict[Hashable, str | None] = {}
    for row in sorted(ordered, key=lambda row: (row["environment_id"] is None, row["n"] == 0)):
        first.setdefault(question_of(row), row["environment_id"])
    return [
        PlacedRow(row, first[question_of(row)] if has_failed_early(row) else row["environment_id"]) for row in ordered
    ]


def may_be_same(one: str | None, other: str | None) -> bool:
    """Whether two environment classes may be one: where one is not known, it may be any."""
    return one is None or other is None or one == other


def _build_retry_key(row: Row) -> tuple[str, str, bool]:
    return row["config_id"], row["machine"], row["evidence"] == "rehearsed"
