"""Reader of a run table in CSV. Tests use it to show that the CSV contains every value exactly."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import Kind, list_all_columns
from analysis.table import build_typed_frame

_PARSE: Mapping[Kind, Callable[[str], Any]] = {
    "text": lambda cell: cell.removeprefix("'"), "integer": int, "number": float, "truth": "True".__eq__,
}  # fmt: skip
_NEVER_MISSING = ("reason", "flags", "notes")  # here, an empty cell is an empty text


def read_csv(path: Path) -> pd.DataFrame:
    """Read a run table written by `zeroscale table --format csv`, and restore values and types."""
    text = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""], lineterminator="\n")
    known = list_all_columns()
    cells = {}
    for name in text.columns:
        parse, empty = _PARSE[known[name].kind], "" if name in _NEVER_MISSING else None
        cells[name] = [empty if pd.isna(cell) else parse(cell) for cell in text[name]]
    return build_typed_frame(cells)
