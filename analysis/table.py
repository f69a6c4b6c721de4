"""The run table: one row per run, also for those that failed. `analysis.columns` documents the columns."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import Column, Kind, columns
from analysis.flags import FLAGS, flags
from analysis.verify import Verdict, verify
from bench.record import RunRecord

_DTYPES: Mapping[Kind, str] = {"text": "string", "integer": "Int64", "number": "float64", "truth": "boolean"}
_PARSE: Mapping[Kind, Callable[[str], Any]] = {
    "text": str, "integer": int, "number": float, "truth": "True".__eq__,
}  # fmt: skip
_NEVER_MISSING = ("reason", "flags")  # empty says that there is none


def run_table(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return the run table of `records`, in their order. They are judged beside each other: a run whose loss is not
    the reference engine's is `invalid` here, whatever its own record says."""
    return table_of(verify(records))


def table_of(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Return the run table of records that have been verified."""
    cells = {column.name: [column.value(v.record) for v in verdicts] for column in columns().values()}
    cells["flags"] = [" ".join(raised(verdict)) for verdict in verdicts]
    return typed(cells)


def read_csv(path: Path) -> pd.DataFrame:
    """Read the run table that `zeroscale table --format csv` wrote, exactly as it was."""
    text = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""])
    known = columns()
    cells = {name: _parsed(known[name], text[name]) for name in text.columns}
    return typed(cells)


def typed(cells: Mapping[str, Sequence[Any]], kinds: Mapping[str, Kind] | None = None) -> pd.DataFrame:
    """Return columns of plain values as a DataFrame whose types know what is missing; `kinds` is of columns that the
    run table has not."""
    known = {name: column.kind for name, column in columns().items()} | dict(kinds or {})
    return pd.DataFrame({name: pd.Series(values, dtype=_DTYPES[known[name]]) for name, values in cells.items()})


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as plain Python values, None where one is missing."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def raised(verdict: Verdict) -> list[str]:
    """Return the flags of a run, in the order of `analysis.flags.FLAGS`."""
    names = {*flags(verdict.record), *(["unverified"] if verdict.unverified else [])}
    return [name for name in FLAGS if name in names]


def _parsed(column: Column, cells: pd.Series) -> list[Any]:
    parse = _PARSE[column.kind]
    empty = "" if column.name in _NEVER_MISSING else None
    return [empty if pd.isna(cell) else parse(cell) for cell in cells]
