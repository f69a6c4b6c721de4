"""The run table: one row per run, also for those that failed. `analysis.columns` documents the columns."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from analysis.columns import LATER, LEARNED, Kind, list_all_columns, list_columns
from analysis.flags import FLAGS
from analysis.reading.rows import FILE, build_cases, compute_invalid_cells
from analysis.verify import build_invalid_outcome, judge
from bench.core.record import Outcome, RunRecord
from bench.core.store import Unreadable

_DTYPES: Mapping[Kind, str] = {"text": "string", "integer": "Int64", "number": "float64", "truth": "boolean"}
_MISSING = {pa.string(): pd.StringDtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


class JudgedTable(NamedTuple):
    """A run table, and by place the outcomes that are not what the record says."""

    table: pd.DataFrame
    outcomes: dict[int, Outcome]


def judge_table(core: pa.Table, load: Callable[[Path], RunRecord]) -> JudgedTable:
    """Return the run table of rows (`analysis.reading.rows`), judged beside each other. Few runs are judged invalid:
    what changes in their rows is worked out from their records, which `load` reads again."""
    unverified, mismatches = judge(build_cases(core))
    frame = core.select([*list_columns(), *_list_later_columns(core)]).to_pandas(types_mapper=_MISSING.get)
    frame["flags"] = _add_unverified_flags(core.column("flags"), unverified)
    outcomes: dict[int, Outcome] = {}
    for one in mismatches:
        outcome = build_invalid_outcome(one, frame["config_id"].iat[one.reference], frame["precision"].iat[one.place])
        outcomes[one.place] = outcome
    changes = {place: _compute_changes(Path(core.column(FILE)[place].as_py()), load) for place in outcomes}
    _invalidate(frame, changes, outcomes)
    return JudgedTable(frame, outcomes)


def _compute_changes(file: Path, load: Callable[[Path], RunRecord]) -> dict[str, Any]:
    try:
        return compute_invalid_cells(load(file))
    except (OSError, Unreadable):  # it is gone by now: no number in it may stand for a speed
        return {name: None for name, column in list_all_columns().items() if column.kind == "number"}


def _list_later_columns(core: pa.Table) -> list[str]:
    """Return the columns that are needed because some run is not as all of the first were: of another layout, say, or
    trained to its end."""
    other = [name for name, first in LATER.items() if core.column(name).unique().to_pylist() not in ([], [first])]
    return other + [name for name in LEARNED if core.column(name).null_count < len(core)]


def _add_unverified_flags(raised: pa.ChunkedArray, unverified: NDArray[np.bool_]) -> pd.Series:
    """Return the flags of runs, those that cannot be verified with theirs among them."""
    encoded = raised.combine_chunks().dictionary_encode()
    known = encoded.dictionary.to_pylist()
    more = [" ".join(name for name in FLAGS if name in {*text.split(), "unverified"}) for text in known]
    places = encoded.indices.to_numpy() + len(known) * unverified
    return pd.Series(pa.array([*known, *more], pa.string()).take(pa.array(places)).to_pandas(types_mapper=_MISSING.get))


def _invalidate(frame: pd.DataFrame, changes: Mapping[int, Mapping[str, Any]], outcomes: Mapping[int, Outcome]) -> None:
    """Write what becomes of runs that are judged invalid into the table: many change in the same way."""
    places_by_change: dict[tuple[str, Any], list[int]] = {}
    for place, cells in changes.items():
        for change in cells.items():
            places_by_change.setdefault(change, []).append(place)
    for (name, cell), places in places_by_change.items():
        frame.loc[places, name] = cell
    frame.loc[list(outcomes), "outcome"] = "invalid"
    frame.loc[list(outcomes), "reason"] = [outcome.reason for outcome in outcomes.values()]


def build_typed_frame(cells: Mapping[str, Sequence[Any]], kinds: Mapping[str, Kind] | None = None) -> pd.DataFrame:
    """Return columns of plain values as a DataFrame whose types know what is missing; `kinds` is of columns that the
    run table has not."""
    known = {name: column.kind for name, column in list_all_columns().items()} | dict(kinds or {})
    return pd.DataFrame({name: pd.Series(values, dtype=_DTYPES[known[name]]) for name, values in cells.items()})


def list_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as plain Python values, None where one is missing."""
    names = [str(name) for name in frame.columns]
    cells = [list_values(column) for _, column in frame.items()]
    return [dict(zip(names, row, strict=False)) for row in zip(*cells, strict=True)]


def list_values(column: pd.Series) -> list[Any]:
    """Return a column as plain Python values, None where one is missing."""
    values: list[Any] = column.to_numpy(dtype=object, na_value=None).tolist()  # type: ignore[call-overload]
    return values
