"""Conversions between DataFrames, Arrow tables and rows of plain values. Column types can represent missing values."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa

from analysis.columns import Kind, list_all_columns

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

_DTYPES: Mapping[Kind, str] = {"text": "string", "integer": "Int64", "number": "float64", "truth": "boolean"}
_ARROW_DTYPES = {pa.string(): pd.StringDtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def to_pandas(columns: "pa.Table | pa.ChunkedArray") -> Any:
    """Return an Arrow table or column as a DataFrame or Series. The column types are the same as in
    `build_typed_frame`."""
    return columns.to_pandas(types_mapper=_ARROW_DTYPES.get)


def build_typed_frame(cells: Mapping[str, Sequence[Any]], kinds: Mapping[str, Kind] | None = None) -> pd.DataFrame:
    """Return a DataFrame of the columns in `cells`. `kinds` has the types of columns that are not in the run table."""
    known = {name: column.kind for name, column in list_all_columns().items()} | dict(kinds or {})
    return pd.DataFrame({name: pd.Series(values, dtype=_DTYPES[known[name]]) for name, values in cells.items()})


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return a mapping from each key to the list of items with this key. Keys and items are in the order in which they
    first appear."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def list_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame as dictionaries of plain Python values. A missing value is None."""
    names = [str(name) for name in frame.columns]
    cells = [list_values(column) for _, column in frame.items()]
    return [dict(zip(names, row, strict=False)) for row in zip(*cells, strict=True)]


def list_values(column: pd.Series) -> list[Any]:
    """Return the values of a column as plain Python values. A missing value is None."""
    values: list[Any] = column.to_numpy(dtype=object, na_value=None).tolist()  # type: ignore[call-overload]
    return values
