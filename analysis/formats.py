"""Tables and numbers as text: exact CSV and JSON for programs; text, Markdown and LaTeX with rounded numbers."""

import functools
import io
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.columns import Column, list_all_columns
from analysis.questions import describe_series
from analysis.table import list_rows, list_values
from bench.core.errors import make_printable

if TYPE_CHECKING:
    from jinja2 import Template

    from analysis.stats.compare import Comparison
    from analysis.summary import Row

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""First letters that spreadsheets read as the begin of a formula. A text with one of them gets an apostrophe in front,
which marks text there."""


class CsvLines:
    r"""File object for a csv writer with `lineterminator=END`.

    A csv writer quotes a cell only if it contains a letter of the line terminator, so `\r\n` quotes line breaks of
    every kind. The lines written end in `\n` all the same.
    """

    END = "\r\n"

    def __init__(self) -> None:
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        self._lines.append(line.removesuffix(self.END) + "\n")

    def __str__(self) -> str:
        return "".join(self._lines)


def escape_cell(cell: str) -> str:
    """Return the CSV cell of a text, safe to open in a spreadsheet."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell


def to_csv(frame: pd.DataFrame) -> str:
    """Return CSV with a header and exact values. Missing values are empty."""
    texts = {}
    for name in frame.columns[frame.dtypes == "string"]:
        column = frame[name]
        texts[str(name)] = column.where(~column.str.startswith(FORMULA).fillna(False), "'" + column)
    # Only columns of text can hold a formula.
    lines = CsvLines()
    frame.assign(**texts).to_csv(lines, index=False, lineterminator=lines.END)  # type: ignore[call-overload]
    return str(lines)


def to_json(frame: pd.DataFrame) -> str:
    """Return a list of objects, one per row. Missing values are null."""
    return json.dumps(list_rows(frame), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table, numbers to four digits."""
    known, cells = list_all_columns(), []
    for name in frame.columns:
        # Many rows share a value, so each is formatted once.
        write = functools.cache(lambda value, column=known[str(name)]: escape_markdown(format_cell(column, value)))
        cells.append([write(value) for value in list_values(frame[name])])
    right = [known[str(name)].kind in ("integer", "number") for name in frame.columns]
    return _join_markdown(list(map(str, frame.columns)), list(zip(*cells, strict=True)), right)


def format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a Markdown table with these headings. `right`: whether each column is aligned to the right."""
    escaped = [[escape_markdown(cell) for cell in row] for row in (head, *rows)]
    return _join_markdown(escaped[0], escaped[1:], right)


def _join_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    rule = ["---:" if one else "---" for one in right]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def escape_markdown(text: str) -> str:
    """Return a text as one Markdown cell. HTML is escaped as well, which Markdown would pass on."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(text.split()))


LONG = 40
"""Rows from which a LaTeX table needs `longtable`, which breaks over pages."""

_NEEDS = "% needs \\usepackage{{{}}}\n"


def to_latex(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a LaTeX table with these headings. `right`: whether each column is aligned to the right."""
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
    return " ".join(text.replace("−", "-").split())  # the text fonts of LaTeX have no minus sign


WIDTH = 100
"""Columns of text output that is not a terminal's."""


def render_text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[bool],
    width: int | None,
    styles: Sequence[str] = (),
) -> str:
    """Return a table as text, long cells folded to fit `width`; None: one line per row, however wide.

    `right`: whether each column holds numbers, which are aligned to the right and never folded. `styles`: rich's
    style of each row, used on a terminal only.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown, buffer = Table(box=None, pad_edge=False, header_style="bold"), io.StringIO()
    for name, number in zip(head, right, strict=True):
        shown.add_column(Text(name), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for cells, style in itertools.zip_longest(rows, styles, fillvalue=""):
        shown.add_row(*(Text(make_printable(cell), style) for cell in cells))
    console = Console(file=buffer, width=width or 10_000, highlight=False, force_terminal=sys.stdout.isatty())
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def find_width() -> int:
    """Return the columns that text output has room for: those of the terminal, or WIDTH elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


_KEY = re.compile(r"\b(?:[a-z_]+\.)+(?=[a-z_]+=)")


def shorten_keys(text: str) -> str:
    """Return a text with the last part of each config key: `tensor=2` for `parallel.tensor=2`."""
    return _KEY.sub("", text)


def name_briefly(row: "Row") -> str:
    """Return the choice of a row without its micro-batch, in the shortest form: `pipeline × 16 (tensor=2)`."""
    return shorten_keys(describe_series(row)).replace(" accumulated", "")


MISSING = "–"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_significant(value: float, digits: int = 4) -> str:
    """Return `value` to `digits` significant digits, with thousands separators; an exponent only below 10^-5 or above
    10^15."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    before = math.floor(math.log10(abs(value))) + 1
    if not -5 < before <= 15:
        return f"{value:.{digits - 1}e}"
    return f"{round(value, digits - before):,.{max(digits - before, 0)}f}"


def format_within(value: float, low: float, high: float, sign: str = "") -> tuple[str, str, str]:
    """Return a value and the ends of its interval, rounded to the second digit of the interval's width.

    Further digits would be noise. An interval of zero or infinite width supports no rounding: then four significant
    digits. `sign="+"` writes a plus before positive values.
    """
    width = high - low
    known = math.isfinite(width) and width > 0
    decimals = 1 - math.floor(math.log10(width)) if known else 0

    def write(one: float) -> str:
        rounded = round(one, decimals) if known else math.inf
        if abs(rounded) >= 1e15:
            return sign * (one > 0) * (not known) + format_significant(one)
        return ("−" if rounded < 0 else sign * (rounded > 0)) + f"{abs(rounded):,.{max(decimals, 0)}f}"

    return write(value), write(low), write(high)


def format_short(value: float, low: float, high: float) -> tuple[str, str]:
    """Return a value to three significant digits, or fewer if its interval supports no more; then its interval."""
    text, *ends = format_within(value, low, high)
    width = high - low
    coarse = value == 0 or (math.isfinite(width) and width >= 10.0 ** (math.floor(math.log10(abs(value))) - 1))
    return text if coarse else format_significant(value, 3), " to ".join(ends)


def format_interval_of(value: float, low: float, high: float) -> str:
    """Return a value followed by its interval."""
    text, *ends = format_within(value, low, high)
    return f"{text} ({' to '.join(ends)})"


def format_ratio_change(ratio: float, low: float | None = None, high: float | None = None) -> str:
    """Return a ratio as a change in percent, with its interval if known: `+5.1 % (+4.0 to +6.3)`."""
    change = 100 * (ratio - 1)
    if low is None or high is None:
        return f"{'+' if change >= 0 else '−'}{format_significant(abs(change), 2)} %"
    text, *ends = format_within(change, 100 * (low - 1), 100 * (high - 1), "+")
    return f"{text} % ({' to '.join(ends)})"


def find_unit_power(value: float) -> int:
    """Return the power of 1024 of the largest unit that `value` bytes fill; it is an index of UNITS."""
    return min(int(math.log2(value) // 10), len(UNITS) - 1) if value >= 1 else 0


def format_size(value: float) -> str:
    """Return bytes in the largest binary unit that they fill."""
    power = find_unit_power(value)
    return f"{format_significant(value / 1024**power)} {UNITS[power]}"


def format_cell(column: Column, value: Any) -> str:
    """Return a cell of the run table for readers; None means missing."""
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


def format_interval_kind(row: "Row") -> str:
    """Write level and kind of the intervals of a row of the summary, or that they come from a single run.

    A run of few steps may have an interval of its rate and none of its median, whose kind is then missing.
    """
    kind = row["interval_kind"] or "within the run"
    if kind == "within the run":
        return "of one run's steps, indicative"
    return f"{100 * row['interval_level']:.0f}\u00a0%, {kind}"


def format_effect(comparison: "Comparison") -> str:
    """Write the change of the time per sample, with its interval where there are enough runs for a verdict."""
    known = comparison.interval
    if known is None or not comparison.decides:
        return format_ratio_change(comparison.ratio)
    change, *ends = (100 * (ratio - 1) for ratio in (comparison.ratio, known.low, known.high))
    text, low, high = format_within(change, ends[0], ends[1], "+")
    return f"{text}\u00a0%, {100 * known.level:.0f}\u00a0%: {low} to {high}\u00a0%"


def load_template(package: str, name: str) -> "Template":
    """Return a template of `package` or of the report. It escapes its values; an unknown name in it is an error."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # here: only pages need jinja2

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("analysis.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
