"""Tables and numbers as text: CSV and JSON with exact values for programs; text, Markdown and LaTeX with rounded
numbers."""

import csv
import functools
import io
import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.columns import Column, list_all_columns
from analysis.questions import describe_series, format_ranks
from analysis.table import list_rows, list_values
from bench.core.errors import make_printable

if TYPE_CHECKING:
    from jinja2 import Template

    from analysis.stats.compare import Comparison
    from analysis.summary import Row

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""First characters of a cell that spreadsheets read as a formula. A cell that begins with one of them gets a leading
apostrophe, by which spreadsheets recognise text."""


class CsvLines:
    r"""File object that collects the lines of a csv writer. The writer must end lines with `\r\n`
    (`lineterminator=END`). The collected lines end in `\n`.

    The reason is that a csv writer quotes a cell with `\r` or `\n` only if its line terminator contains the same
    character. With `\r\n`, the writer quotes cells with either character.
    """

    END = "\r\n"

    def __init__(self) -> None:
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        self._lines.append(line.removesuffix(self.END) + "\n")

    def __str__(self) -> str:
        return "".join(self._lines)


def escape_cell(cell: str) -> str:
    """Return a text as a CSV cell that is safe to open in a spreadsheet."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell


def join_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with the columns `names`. Texts are safe to open in a spreadsheet."""
    lines = CsvLines()
    writer = csv.DictWriter(lines, names, lineterminator=lines.END)
    writer.writeheader()
    writer.writerows({n: escape_cell(v) if isinstance(v, str) else v for n, v in row.items()} for row in rows)
    return str(lines)


def to_csv(frame: pd.DataFrame) -> str:
    """Return a table as CSV with a header and exact values. Missing values are empty."""
    texts = {}
    for name in frame.columns[frame.dtypes == "string"]:
        column = frame[name]
        texts[str(name)] = column.where(~column.str.startswith(FORMULA).fillna(False), "'" + column)
    # Other columns are written unchanged, because only text can be a formula.
    lines = CsvLines()
    frame.assign(**texts).to_csv(lines, index=False, lineterminator=lines.END)  # type: ignore[call-overload]
    return str(lines)


def to_json(frame: pd.DataFrame) -> str:
    """Return a table as a JSON list of objects, one per row. Missing values are null."""
    return json.dumps(list_rows(frame), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a run table as a Markdown table, with numbers rounded to four significant digits."""
    known, cells = list_all_columns(), []
    for name in frame.columns:
        # Many rows have equal values, so results are cached.
        write = functools.cache(lambda value, column=known[str(name)]: escape_markdown(format_cell(column, value)))
        cells.append([write(value) for value in list_values(frame[name])])
    right = [known[str(name)].kind in ("integer", "number") for name in frame.columns]
    return join_markdown(list(map(str, frame.columns)), list(zip(*cells, strict=True)), right)


def format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a Markdown table with the headings `head`. `right` is True for each right-aligned column."""
    escaped = [[escape_markdown(cell) for cell in row] for row in (head, *rows)]
    return join_markdown(escaped[0], escaped[1:], right)


def join_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a Markdown table whose cells are already escaped. `right` is True for each right-aligned column."""
    rule = ["---:" if one else "---" for one in right]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def escape_markdown(text: str) -> str:
    """Return a text as one Markdown table cell. HTML is escaped too, because Markdown would pass it through."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(text.split()))


LONG = 40
"""Number of rows above which a LaTeX table uses `longtable`, which can break over pages."""

_NEEDS = "% needs \\usepackage{{{}}}\n"


def to_latex(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a LaTeX table with the headings `head`. `right` is True for each right-aligned column."""
    frame = pd.DataFrame([list(map(_join_lines, row)) for row in rows], columns=range(len(head)), dtype=object)
    frame.columns = pd.Index([_join_lines(heading) for heading in head])
    styled = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    long, columns = len(rows) > LONG, "".join("r" if one else "l" for one in right)
    text = styled.to_latex(hrules=True, column_format=columns, environment="longtable" if long else None)
    return _NEEDS.format("booktabs,longtable" if long else "booktabs") + text


def _join_lines(text: str) -> str:
    return " ".join(text.replace("−", "-").split())  # the text fonts of LaTeX have no minus sign


def join_words(texts: Iterable[str]) -> str:
    """Return texts as a list in a sentence, such as "a, b and c"."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last


WIDTH = 100
"""Width, in characters, of text output that does not go to a terminal."""


def render_text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[bool],
    width: int | None,
    styles: Sequence[str] = (),
) -> str:
    """Return a table as text. Long cells are wrapped to fit `width` characters; with None, each row stays on one line.

    `right` is True for each column of numbers, which is right-aligned and never wrapped. `styles` holds for each row a
    style of the library rich, such as "bold". Styles are used on a terminal only.
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
    """Return the width of text output in characters: that of the terminal, or WIDTH if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


_KEY = re.compile(r"\b(?:[a-z_]+\.)+(?=[a-z_]+=)")


def shorten_keys(text: str) -> str:
    """Return a text in which each config key is shortened to its last component: `parallel.tensor=2` becomes
    `tensor=2`."""
    return _KEY.sub("", text)


def name_briefly(row: "Row") -> str:
    """Return a short name of a row's configuration, made of engine, layout and options but not the micro-batch:
    `pipeline × 16 (tensor=2)`."""
    return shorten_keys(describe_series(row)).replace(" accumulated", "")


class BriefNames:
    """Short names of configurations that are compared. If the micro-batch varies, names contain it. If the accumulation
    varies at the same micro-batch, names contain the accumulation as well. A further setting is added only if two names
    would otherwise be equal."""

    _PARTS: tuple[Callable[["Row"], str], ...] = (
        lambda row: f"micro {row['micro']}",
        lambda row: f"accumulation {row['accumulation']}",
        lambda row: str(row["precision"]),
        format_ranks,
        lambda row: str(row.get("adapter", "none")),
        lambda row: str(row["machine"]),
        lambda row: f"environment {row['environment_id']}",
    )

    def __init__(self, rows: Sequence["Row"]) -> None:
        batches = {(row["micro"], row["accumulation"]) for row in rows}
        named = self._PARTS[: 2 if len(batches) > len(dict(batches)) else 1]
        self._parts: list[Callable[[Row], str]] = []
        for part in self._PARTS:
            needed = part in named or len(set(map(self.of, rows))) < len(rows)
            if needed and len(set(map(part, rows))) > 1:
                self._parts.append(part)

    def of(self, row: "Row") -> str:
        parts = ", ".join(part(row) for part in self._parts)
        name = name_briefly({**row, "accumulation": 1})
        return f"{name} ({parts})" if parts else name


MISSING = "–"
SETTINGS = ("learning_rate", "seed")
"""Columns of numbers that a user has set. They are written like the user's values, not rounded as measurements."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_significant(value: float, digits: int = 4) -> str:
    """Return `value` rounded to `digits` significant digits, with thousands separators. Scientific notation is used
    only below 10^-5 or above 10^15."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    before = math.floor(math.log10(abs(value))) + 1
    if not -5 < before <= 15:
        return f"{value:.{digits - 1}e}"
    return f"{round(value, digits - before):,.{max(digits - before, 0)}f}"


def format_within(value: float, low: float, high: float, sign: str = "") -> tuple[str, str, str]:
    """Return a value and the two ends of its interval as texts, rounded to the second significant digit of the
    interval's width.

    Further digits would be noise. If the width is zero or infinite, four significant digits are kept. `sign="+"` puts a
    plus sign before positive values.
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


def format_interval_of(value: float, low: float, high: float) -> str:
    """Return a value as text, followed by the ends of its interval in parentheses."""
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
    """Return the index in UNITS of the largest unit that is at most `value` bytes. The unit is 1024 to the power of
    this index."""
    return min(int(math.log2(value) // 10), len(UNITS) - 1) if value >= 1 else 0


def format_size(value: float) -> str:
    """Return a number of bytes as text, in the largest binary unit that does not exceed it."""
    power = find_unit_power(value)
    return f"{format_significant(value / 1024**power)} {UNITS[power]}"


def format_outcomes(counts: Counter[str]) -> str:
    """Return a text with the number of runs of each outcome, the most frequent outcome first."""
    return ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in counts.most_common())


def format_cell(column: Column, value: Any) -> str:
    """Return a cell of the run table as text for readers. A `value` of None is shown as missing."""
    if value is None:
        return MISSING
    if column.kind == "truth":
        return "yes" if value else "no"
    if column.unit == "bytes":
        return format_size(value)
    if column.name in SETTINGS:
        return f"{value:g}" if column.kind == "number" else str(value)
    if column.kind == "number":
        return format_significant(value)
    if column.kind == "integer":
        return f"{value:,}"
    return str(value)


def format_interval_kind(row: "Row") -> str:
    """Return a text on the source of the intervals of a summary row. It states their confidence level and kind, such as
    "95 %, between repeats". For a single run, it states that the intervals were computed from the steps of the run.

    A run of few steps may have an interval of its throughput, but no interval of its median step time. The column
    `interval_kind` is then empty, and the text is the same as for a single run.
    """
    kind = row["interval_kind"] or "within the run"
    if kind == "within the run":
        return "from the steps of one run, indicative"
    return f"{100 * row['interval_level']:.0f}\u00a0%, {kind}"


def format_effect(comparison: "Comparison") -> str:
    """Return the relative change of the time per sample as text, in percent. The interval of the change is included if
    there are enough runs for a verdict."""
    known = comparison.interval
    if known is None or not comparison.decides:
        return format_ratio_change(comparison.ratio)
    change, *ends = (100 * (ratio - 1) for ratio in (comparison.ratio, known.low, known.high))
    text, low, high = format_within(change, ends[0], ends[1], "+")
    return f"{text}\u00a0%, {100 * known.level:.0f}\u00a0%: {low} to {high}\u00a0%"


def load_template(package: str, name: str) -> "Template":
    """Return the jinja2 template `name` of the package `package`. If this package has no template of this name, return
    the template of `analysis.report`.

    The template escapes HTML in its values, and undefined names raise an error. Its filter `coded` shows text between
    backticks as code, and prevents line breaks within options such as --repeats. Its filter `css` returns a text as a
    string of CSS.
    """
    # imported here because only pages need jinja2
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("analysis.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def show_code(text: str) -> Markup:
        code = re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text)))
        return Markup(re.sub(r"(?<!\S)--[\w-]+", r'<span class="option">\g<0></span>', code))

    def quote_css(text: str) -> Markup:
        escaped = re.sub(r'["\\<\n]', lambda found: f"\\{ord(found[0]):x} ", text)
        return Markup(f'"{escaped}"')

    environment.filters |= {"coded": show_code, "css": quote_css}
    return environment.get_template(name)
