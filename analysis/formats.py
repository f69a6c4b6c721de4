"""Tables and numbers as text: exact CSV and JSON for programs, Markdown, LaTeX and rounded numbers for readers."""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.columns import Column, Kind, list_all_columns
from analysis.table import build_typed_frame, list_rows, list_values

if TYPE_CHECKING:
    from jinja2 import Template

    from analysis.stats.compare import Comparison


FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""A text that begins like a formula gets an apostrophe before it, which is how spreadsheets mark text; one that begins
with an apostrophe gets another."""


class CsvLines:
    """The file of a csv writer whose `lineterminator` is END: then it quotes every cell with a line break of any kind.
    The lines themselves end as elsewhere."""

    END = "\r\n"

    def __init__(self) -> None:
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        self._lines.append(line.removesuffix(self.END) + "\n")

    def __str__(self) -> str:
        return "".join(self._lines)


def escape_cell(cell: str) -> str:
    """Return a text as a cell."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell


def parse_cell(cell: str) -> str:
    """Return the text that a cell holds."""
    return cell[1:] if cell.startswith("'") else cell


_PARSE: Mapping[Kind, Callable[[str], Any]] = {
    "text": parse_cell, "integer": int, "number": float, "truth": "True".__eq__,
}  # fmt: skip
_NEVER_MISSING = ("reason", "flags", "notes")  # empty says that there is none


def to_csv(frame: pd.DataFrame) -> str:
    """Return CSV with a header; missing is empty. `read_csv` gives the same table back."""
    texts = {}
    for name in frame.columns[frame.dtypes == "string"]:
        column = frame[name]
        texts[str(name)] = column.where(~column.str.startswith(FORMULA).fillna(False), "'" + column)
    lines = CsvLines()
    frame.assign(**texts).to_csv(lines, index=False, lineterminator=lines.END)  # type: ignore[call-overload]
    return str(lines)


def read_csv(path: Path) -> pd.DataFrame:
    """Read the run table that `zeroscale table --format csv` wrote, exactly as it was."""
    text = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""], lineterminator="\n")
    known = list_all_columns()
    cells = {name: _parse_cells(known[name], text[name]) for name in text.columns}
    return build_typed_frame(cells)


def _parse_cells(column: Column, cells: pd.Series) -> list[Any]:
    parse = _PARSE[column.kind]
    empty = "" if column.name in _NEVER_MISSING else None
    return [empty if pd.isna(cell) else parse(cell) for cell in cells]


def to_json(frame: pd.DataFrame) -> str:
    """Return a list of objects, one per row; missing is null."""
    return json.dumps(list_rows(frame), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table; numbers to four digits."""
    known, names = list_all_columns(), [str(name) for name in frame.columns]
    right = [known[name].kind in ("integer", "number") for name in names]
    cells = [_format_column(known[name], frame[name]) for name in names]
    return _join_markdown(names, list(zip(*cells, strict=True)), right)


def format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a Markdown table with these headings; `right` says which columns are aligned to the right."""
    escaped = [[escape_markdown(cell) for cell in row] for row in (head, *rows)]
    return _join_markdown(escaped[0], escaped[1:], right)


def _join_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    rule = ["---:" if one else "---" for one in right]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def _format_column(column: Column, series: pd.Series) -> list[str]:
    """Return the cells of a column; many are the same in many rows."""
    write = functools.cache(lambda value: escape_markdown(format_cell(column, value)))
    return [write(value) for value in list_values(series)]


def escape_markdown(text: str) -> str:
    """Keep a cell one cell, and its text text: Markdown takes HTML as it is."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(text.split()))


LONG = 40
"""Rows; a longer table breaks over pages, with `longtable`."""

_NEEDS = "% needs \\usepackage{{{}}}\n"


def to_latex(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a LaTeX table with these headings; `right` says which columns are aligned to the right."""
    frame = pd.DataFrame([list(map(_join_lines, row)) for row in rows], columns=range(len(head)), dtype=object)
    frame.columns = pd.Index([_join_lines(heading) for heading in head])
    styled = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    long = len(rows) > LONG
    text = styled.to_latex(
        hrules=True,
        column_format="".join("r" if one else "l" for one in right),
        environment="longtable" if long else None,
    )
    return _NEEDS.format("booktabs,longtable" if long else "booktabs") + text


def _join_lines(text: str) -> str:
    return " ".join(text.replace("−", "-").split())  # LaTeX's fonts for text have no minus sign


MISSING = "–"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_significant(value: float, digits: int = 4) -> str:
    """Return `value` to `digits` significant digits, thousands apart, without an exponent from 10^-5 to 10^15."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    before = math.floor(math.log10(abs(value))) + 1
    if not -5 < before <= 15:
        return f"{value:.{digits - 1}e}"
    return f"{round(value, digits - before):,.{max(digits - before, 0)}f}"


def format_within(value: float, low: float, high: float, sign: str = "") -> tuple[str, str, str]:
    """Return a value and the ends of its interval, all to the place of the second digit of the interval's width: more
    digits would tell what nobody knows. An interval without a width, or an end that is not finite, tells no digits:
    then to four significant ones. `sign` "+" writes one before positive values."""
    width = high - low
    known = math.isfinite(width) and width > 0
    decimals = 1 - math.floor(math.log10(width)) if known else 0

    def write(one: float) -> str:
        return _format_to(one, decimals, sign) if known else sign * (one > 0) + format_significant(one)

    return write(value), write(low), write(high)


def format_short(value: float, low: float, high: float) -> tuple[str, str]:
    """Return a value to three significant digits, or fewer where its interval tells no more, and beside it the
    interval with the digits that it tells."""
    text, *ends = format_within(value, low, high)
    width = high - low
    coarse = value == 0 or (math.isfinite(width) and width >= 10.0 ** (math.floor(math.log10(abs(value))) - 1))
    return text if coarse else format_significant(value, 3), " to ".join(ends)


def format_interval_of(value: float, low: float, high: float) -> str:
    """Return a value with its interval behind it."""
    text, *ends = format_within(value, low, high)
    return f"{text} ({' to '.join(ends)})"


def format_ratio_change(ratio: float, low: float | None = None, high: float | None = None) -> str:
    """Return a ratio as a change in percent, with its interval where one is known: +5.1 % (+4.0 to +6.3)."""
    change = 100 * (ratio - 1)
    if low is None or high is None:
        return f"{'+' if change >= 0 else '−'}{format_significant(abs(change), 2)} %"
    text, *ends = format_within(change, 100 * (low - 1), 100 * (high - 1), "+")
    return f"{text} % ({' to '.join(ends)})"


def _format_to(value: float, decimals: int, sign: str) -> str:
    rounded = round(value, decimals)
    if abs(rounded) >= 1e15:
        return format_significant(value)
    text = f"{abs(rounded):,.{max(decimals, 0)}f}"
    return ("−" if rounded < 0 else sign * (rounded > 0)) + text


def find_unit_power(value: float) -> int:
    """Return the power of 1024, and place in UNITS, of the largest unit of which `value` bytes hold at least one."""
    return min(int(math.log2(value) // 10), len(UNITS) - 1) if value >= 1 else 0


def format_size(value: float) -> str:
    """Return bytes in the largest binary unit of which there is at least one."""
    power = find_unit_power(value)
    return f"{format_significant(value / 1024**power)} {UNITS[power]}"


def format_cell(column: Column, value: Any) -> str:
    """Return a cell of the run table for a reader; `value` None is missing."""
    if value is None:
        return MISSING
    if column.kind == "truth":
        return "yes" if value else "no"
    if column.unit == "bytes":
        return format_size(value)
    if column.kind == "number":
        return format_significant(value)
    if column.kind == "integer" and column.name != "seed":
        return f"{value:,}"
    return str(value)


def format_effect(comparison: "Comparison") -> str:
    """Write the change of the time per sample with its interval."""
    known = comparison.interval
    if known is None:
        return format_ratio_change(comparison.ratio)
    change, *ends = (100 * (ratio - 1) for ratio in (comparison.ratio, known.low, known.high))
    text, low, high = format_within(change, ends[0], ends[1], "+")
    return f"{text}\u00a0%, {100 * known.level:.0f}\u00a0%: {low} to {high}\u00a0%"


def load_template(package: str, name: str) -> "Template":
    """Return a template of `package` or of the report; what it is given is escaped, and an unknown name fails."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # only pages need it

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("analysis.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
