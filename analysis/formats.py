"""The run table as text for programs and documents. CSV and JSON are exact; Markdown is for reading."""

import json
import re

import pandas as pd

from analysis.columns import columns
from analysis.numbers import cell
from analysis.table import plain


def to_csv(frame: pd.DataFrame) -> str:
    """Return CSV with a header; missing is empty. `analysis.table.read_csv` gives the same table back."""
    return frame.to_csv(index=False, lineterminator="\n")


def to_json(frame: pd.DataFrame) -> str:
    """Return a list of objects, one per row; missing is null."""
    return json.dumps(plain(frame), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table; numbers to four digits."""
    known, names = columns(), [str(name) for name in frame.columns]
    header = [f"| {' | '.join(names)} |", f"|{'|'.join(' ---: ' if _right(n) else ' --- ' for n in names)}|"]
    rows = [
        f"| {' | '.join(_escaped(cell(known[name], value)) for name, value in row.items())} |" for row in plain(frame)
    ]
    return "\n".join([*header, *rows]) + "\n"


def _right(name: str) -> bool:
    return columns()[name].kind in ("integer", "number")


def _escaped(text: str) -> str:
    """Keep a cell one cell, and its text text: Markdown takes HTML as it is."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(text.split()))
