"""The run table as text for programs and documents. CSV and JSON are exact; Markdown is for reading."""

import functools
import json
import re

import pandas as pd

from analysis.columns import Column, list_all_columns
from analysis.csv_cells import FORMULA, CsvLines
from analysis.formats.numbers import format_cell
from analysis.table import list_rows, list_values


def to_csv(frame: pd.DataFrame) -> str:
    """Return CSV with a header; missing is empty. `analysis.table.read_csv` gives the same table back."""
    names = [str(name) for name, kind in frame.dtypes.items() if kind == "string"]
    texts = {name: _escape_formulas(frame[name]) for name in names}
    lines = CsvLines()
    frame.assign(**texts).to_csv(lines, index=False, lineterminator=lines.END)  # type: ignore[call-overload]
    return str(lines)


def _escape_formulas(column: "pd.Series[str]") -> "pd.Series[str]":
    return column.where(~column.str.startswith(FORMULA).fillna(False), "'" + column)


def to_json(frame: pd.DataFrame) -> str:
    """Return a list of objects, one per row; missing is null."""
    return json.dumps(list_rows(frame), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table; numbers to four digits."""
    known, names = list_all_columns(), [str(name) for name in frame.columns]
    right = {name: known[name].kind in ("integer", "number") for name in names}
    header = [f"| {' | '.join(names)} |", f"|{'|'.join(' ---: ' if right[n] else ' --- ' for n in names)}|"]
    cells = [_format_column(known[name], frame[name]) for name in names]
    return "\n".join([*header, *(f"| {' | '.join(row)} |" for row in zip(*cells, strict=True))]) + "\n"


def _format_column(column: Column, series: pd.Series) -> list[str]:
    """Return the cells of a column; many are the same in many rows."""
    write = functools.cache(lambda value: escape_markdown(format_cell(column, value)))
    return [write(value) for value in list_values(series)]


def escape_markdown(text: str) -> str:
    """Keep a cell one cell, and its text text: Markdown takes HTML as it is."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(text.split()))
