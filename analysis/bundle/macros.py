r"""The numbers of a summary as LaTeX macros: `\zsStepSeconds{KEY}`, and `\zsStepSecondsInterval{KEY}` for its doubt.

A key is the config_id; where the set has it on several machines or in several environments, with `/` and these. The
same is known by the key `MODEL/ENGINE/NODESxDEVICES/microN`, with `/MACHINE` if need be, while only one row has that. A
key or a number that is not there stops LaTeX: a number that went missing is not printed as a hole.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from analysis.formats import format_significant, format_size
from analysis.questions import describe_choice
from analysis.summary import Row

_QUANTITIES = {
    "StepSeconds": "step_s", "TokensPerSecond": "tokens_per_s", "SamplesPerSecond": "samples_per_s",
    "EffectiveTokensPerSecond": "effective_tokens_per_s", "ModelTflopsPerDevice": "model_tflops_per_device",
    "Mfu": "mfu", "Hfu": "hfu", "PeakMemory": "peak_allocated_bytes", "InitPeakMemory": "init_peak_bytes",
}  # fmt: skip
_WITH_INTERVAL = ("StepSeconds", "TokensPerSecond")
_NAMES = (*_QUANTITIES, *(f"{name}Interval" for name in _WITH_INTERVAL), "Outcome", "Repeats", "Flags")

_HEAD = r"""% Written by zeroscale: the numbers of a set of runs, as \zsStepSeconds{KEY}. Medians over repeats, memory
% of the worst rank; numbers to four digits. Keys stand before each row. A key without the number asked for is an error.
\makeatletter
\providecommand*{\zs@number}[2]{\@ifundefined{zs@#1@#2}{%
  \PackageError{zeroscale}{No #1 of '#2'}{Was it measured? The keys are in numbers.tex.}\textbf{??}}%
  {\@nameuse{zs@#1@#2}}}
"""


def render_macros(rows: Sequence[Row]) -> str:
    """Return the file's text for the rows of a summary."""
    defined = [rf"\providecommand*{{\zs{name}}}[1]{{\zs@number{{{name}}}{{#1}}}}" for name in _NAMES]
    times = Counter(name for row in rows for name in _build_readable_keys(row))
    lines: list[str] = []
    for row, identity in zip(rows, build_keys(rows), strict=True):
        known = [identity, *[name for name in _build_readable_keys(row) if times[name] == 1][:1]]
        lines += ["", f"% {' or '.join(known)}: {_format_comment(row)}"]
        lines += [rf"\@namedef{{zs@{name}@{key}}}{{{text}}}" for key in known for name, text in _list_macro_values(row)]
    return _HEAD + "\n".join([*defined, *lines, r"\makeatother", ""])


def build_keys(rows: Sequence[Row]) -> list[str]:
    """Return the key of each row: as many of its parts as it takes for all to differ."""
    parts = ("config_id", "machine", "environment_id", "evidence")
    for count in range(1, len(parts) + 1):
        named = ["/".join(_escape_key(row[part]) for part in parts[:count]) for row in rows]
        if len(set(named)) == len(named):
            break
    return named if rows else []


def _build_readable_keys(row: Row) -> tuple[str, str]:
    """Name a row as people do, without and with its machine."""
    place = f"{row['nodes']}x{row['devices_per_node']}"
    name = "/".join([_escape_key(row["model"]), _escape_key(row["engine"]), place, f"micro{row['micro']}"])
    return name, f"{name}/{_escape_key(row['machine'])}"


def _escape_key(text: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", text or "unknown")  # no underscore: a package may make it active


def _format_comment(row: Row) -> str:
    return " ".join(f"{row['model']}, {row['nodes']} x {row['devices_per_node']}, {describe_choice(row)}".split())


def _list_macro_values(row: Row) -> Iterator[tuple[str, str]]:
    """Yield what is known of a row, by the names of the macros."""
    for name, column in _QUANTITIES.items():
        if row[column] is not None:
            written = format_size(row[column]) if column.endswith("_bytes") else format_significant(row[column])
            yield name, _escape_latex(written).replace(" ", "~")
    for name in _WITH_INTERVAL:
        low, high = (row[f"{_QUANTITIES[name]}_{end}"] for end in ("low", "high"))
        if None not in (low, high, row["interval_level"]):  # an interval says its kind, level and n
            level = rf"{100 * row['interval_level']:.0f}\,\% {row['interval_kind']}, $n={row['n']}$"
            yield f"{name}Interval", f"{format_significant(low)}--{format_significant(high)} ({level})"
    yield "Outcome", _escape_latex(row["outcome"])
    yield "Repeats", str(row["n"])
    yield "Flags", _escape_latex(row["flags"] or "none")


def _escape_latex(text: str) -> str:
    """Keep a record's text text in LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^{}$&#%_]", lambda match: special.get(match[0], rf"\{match[0]}"), " ".join(text.split()))
