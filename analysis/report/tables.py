"""The report's tables as people read them, on the page, in Markdown and in LaTeX; the CSV beside them is exact."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from analysis.columns import Column, list_columns
from analysis.formats import (
    MISSING,
    UNITS,
    find_unit_power,
    format_cell,
    format_short,
    format_significant,
)
from analysis.questions import describe_series
from analysis.report.texts import AnswerText, format_interval_kind
from analysis.scaling import IntervalEstimate
from analysis.scaling.best import Best
from analysis.scaling.crossover import Crossover
from analysis.scaling.curves import CurvePoint, ScalingCurve
from analysis.summary import Row

_RUN = (
    "config_id", "run", "study", "model", "engine", "precision", "ranks", "micro", "machine", "evidence", "ended",
    "sample_s", "step_s", "step_s_p99", "step_s_max", "tokens_per_s", "mfu", "peak_allocated_bytes",
    "cost_per_million_tokens", "flags",
)  # fmt: skip
_CONFIGURATION = (
    "config_id", "model", "engine", "precision", "ranks", "micro", "machine", "evidence", "ended", "n", "sample_s",
    "step_s", "step_s_p99", "step_s_max", "tokens_per_s", "intervals", "peak_allocated_bytes",
    "cost_per_million_tokens", "flags",
)  # fmt: skip
_SAID_ABOVE = ("study", "model", "precision", "ranks", "machine", "run", "evidence")
"""Left out where all rows have the same; the report says once what was held equal."""
_PARTS = {"ranks": ("nodes", "devices_per_node"), "run": ("repeat", "attempt")}
_ONLY_IN_FILES = ("step_s_p99", "step_s_max")
_WHERE_KNOWN = ("peak_allocated_bytes", "cost_per_million_tokens")
_LABELS = {
    "config_id": "configuration", "micro": "micro-batch", "step_s": "step time", "sample_s": "time per sample",
    "step_s_p99": "99th percentile of steps", "step_s_max": "longest step", "tokens_per_s": "throughput", "mfu": "MFU",
    "peak_allocated_bytes": "peak allocated", "cost_per_million_tokens": "cost of a million tokens",
}  # fmt: skip
_DIGITS = 3
_MOST_NAMED = 3
"""Rivals in a cell."""


class ColumnHeading(NamedTuple):
    """Of a column: what it is called, its unit, what it means, and whether numbers stand in it.

    `note` is what a unit leaves open. `place` says where it stands on the page: in the table, as headings of groups of
    rows, or nowhere, for the page has less room than the files.
    """

    label: str
    unit: str = ""
    meaning: str = ""
    number: bool = False
    note: str = ""
    place: Literal["table", "groups", "files"] = "table"

    @property
    def text(self) -> str:
        more = ", ".join(filter(None, (self.unit, self.note)))
        return f"{self.label} ({more})" if more else self.label


class TableCell(NamedTuple):
    """A cell as it is read and as it is sorted; `key` None is missing, and sorted last."""

    text: str
    key: Any
    interval: str = ""

    @property
    def full(self) -> str:
        return f"{self.text} ({self.interval})" if self.interval else self.text


_NO_NUMBER = TableCell(MISSING, None)


class TextTable(NamedTuple):
    """A table of texts; without rows there is nothing to show. `note` says what its intervals are."""

    name: str
    title: str
    head: tuple[ColumnHeading, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""


_Source = tuple[ColumnHeading, Callable[[Row], TableCell]]


def build_runs_table(rows: Sequence[Row]) -> TextTable:
    """Return the run table in the columns that people look at first, where any run has a value for them."""
    known = [name for name in _RUN if name in _MADE or any(row[name] not in (None, "") for row in rows)]
    return _build_text_table(
        "runs",
        "Runs",
        [_find_source(name, rows) for name in known if _is_shown(name, rows)],
        [_remove_intervals(row) for row in rows],
    )


def build_configurations_table(rows: Sequence[Row]) -> TextTable:
    """Return the summary: what was measured, n, medians with their intervals, memory and flags."""
    known = [name for name in _CONFIGURATION if name not in _WHERE_KNOWN or _has_value(name, rows)]
    sources = [_find_source(name, rows) for name in known if _is_shown(name, rows)]
    return _build_text_table("configurations", "Configurations", sources, rows, _describe_intervals(rows))


def build_best_table(found: Sequence[Best], answers: Sequence[AnswerText], rows: Sequence[Row]) -> TextTable:
    """Return the answer to every question, and its words; `rows` are what was measured."""
    head = (
        _head_models([best.question["model"] for best in found]),
        ColumnHeading("question"),
        ColumnHeading("fastest"),
        ColumnHeading("time per sample", "s", number=True),
        _find_source("tokens_per_s", rows)[0],
        ColumnHeading("intervals", meaning="level and kind", place="files"),
        ColumnHeading("the others", meaning="by the time per sample"),
        ColumnHeading("least memory", meaning="the peak allocated on a rank"),
        ColumnHeading("without a number"),
    )
    note = _describe_intervals([best.fastest for best in found if best.fastest])
    return TextTable("best", "Best per question", head, tuple(map(_build_answer_row, found, answers)), note)


def build_scaling_table(curves: Sequence[ScalingCurve]) -> TextTable:
    """Return speed-up, efficiency and serial fraction, a row per node count of every curve."""
    head = (
        *_head_curves([curve.points[0].row for curve in curves]),
        ColumnHeading("nodes", number=True),
        ColumnHeading("speed-up", number=True),
        ColumnHeading("efficiency", number=True),
        ColumnHeading("serial fraction", "Karp–Flatt", number=True),
        ColumnHeading("flags"),
    )
    rows = [_build_scaling_row(curve, point) for curve in curves for point in curve.points]
    return TextTable("scaling", "Scaling", head, tuple(rows))


def build_crossovers_table(found: Sequence[Crossover]) -> TextTable:
    """Return what becomes of two stages as nodes are added."""
    known = [(one, row) for one in found if (row := one.any_row)]
    rows = [
        (
            *_build_curve_cells(row, f"{one.law}, {one.batch}", " against ".join(one.names)),
            _build_text_cell(one.sentence),
        )
        for one, row in known
    ]
    head = (*_head_curves([row for _, row in known]), ColumnHeading("what becomes of them"))
    return TextTable("crossovers", "Crossovers", head, tuple(rows))


def _head_curves(rows: Sequence[Row]) -> tuple[ColumnHeading, ...]:
    machine = ColumnHeading("machine", place="table" if len({row["machine"] for row in rows}) > 1 else "files")
    return _head_models([row["model"] for row in rows]), machine, ColumnHeading("scaling"), ColumnHeading("held")


def _head_models(models: Sequence[str]) -> ColumnHeading:
    """Return the heading of a column of models, by which the rows of several are grouped."""
    return ColumnHeading("model", place="groups" if len(set(models)) > 1 else "files")


def _build_curve_cells(row: Row, scaling: str, fixed_work: str) -> tuple[TableCell, ...]:
    return (
        _build_text_cell(row["model"]),
        _build_text_cell(row["machine"]),
        _build_text_cell(scaling),
        _build_text_cell(fixed_work),
    )


def _build_answer_row(best: Best, answer: AnswerText) -> tuple[TableCell, ...]:
    row, model, columns = best.fastest, best.question["model"], list_columns()
    beside = (
        _shorten_list("equal within 3 %", answer.equal),
        _shorten_list("not told apart", answer.tied),
        answer.slower,
        answer.undecided,
    )
    lean = f"{answer.leanest}: {answer.peak}" if answer.leanest else MISSING
    return (
        _build_text_cell(model),
        _build_text_cell(answer.name.removeprefix(f"{model} · ")),
        _build_text_cell(answer.fastest or "none"),
        *(_build_value_cell(columns[name], row) if row else _NO_NUMBER for name in ("sample_s", "tokens_per_s")),
        _build_text_cell(_format_row_interval_kind(row) if row else ""),
        *map(_build_text_cell, ("; ".join(filter(None, beside)), lean, answer.failed)),
    )


def _shorten_list(said: str, texts: Sequence[str]) -> str:
    """Write what is said of several, naming the first of them; best.csv names all."""
    if not texts:
        return ""
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return f"{said}: {', '.join(texts[:_MOST_NAMED])}{more}"


def _build_scaling_row(curve: ScalingCurve, point: CurvePoint) -> tuple[TableCell, ...]:
    row = point.row
    numbers = (point.speedup, point.efficiency, point.serial_fraction)
    nodes = TableCell(f"{point.nodes}", point.nodes)
    cells = [_build_estimate_cell(number) for number in numbers]
    if not row["n"]:
        cells[0] = TableCell(_name_outcome(row), None)
    what = _build_curve_cells(row, f"{curve.law}, {curve.batch}", curve.name)
    return *what, nodes, *cells, _build_text_cell(row["flags"])


def _build_estimate_cell(estimate: IntervalEstimate | None) -> TableCell:
    if estimate is None:
        return _NO_NUMBER
    known = estimate.interval
    if known is None:
        return TableCell(format_significant(estimate.value, _DIGITS), estimate.value)
    text, ends = format_short(estimate.value, known.low, known.high)
    return TableCell(text, estimate.value, ends)


def _build_text_table(
    name: str, title: str, sources: Sequence[_Source], rows: Sequence[Row], note: str = ""
) -> TextTable:
    cells = tuple(tuple(of(row) for _, of in sources) for row in rows)
    return TextTable(name, title, tuple(heading for heading, _ in sources), cells, note)


def _find_source(name: str, rows: Sequence[Row]) -> _Source:
    """Return the heading of a column and what makes its cells."""
    if name in _MADE:
        return _MADE[name]
    if name == "model":
        return _head_models([row[name] for row in rows]), lambda row: _build_text_cell(row[name])
    column = list_columns()[name]
    if column.unit == "bytes":
        return _find_size_source(column, rows)
    unit = "" if column.unit == "samples" or name == "cost_per_million_tokens" else column.unit
    heading = ColumnHeading(_LABELS.get(name, name), unit, column.meaning, column.kind in ("integer", "number"))
    if name == "tokens_per_s":
        heading = heading._replace(unit="tokens/s", note=_find_counted_tokens(rows))
    place: Literal["table", "files"] = "files" if name in _ONLY_IN_FILES else "table"
    return heading._replace(place=place), lambda row: _build_value_cell(column, row)


def _find_size_source(column: Column, rows: Sequence[Row]) -> _Source:
    """Return a column of sizes in the unit of the largest; each has its own where that would hide the smallest."""
    sizes = [row[column.name] for row in rows if row[column.name]]
    power = find_unit_power(max(sizes, default=0))
    same = min(sizes, default=0) >= 1024**power / 100
    heading = ColumnHeading(_LABELS[column.name], UNITS[power] if same else "", column.meaning, number=True)

    def build(row: Row) -> TableCell:
        value = row[column.name]
        if value is None:
            return _NO_NUMBER
        own = power if same else find_unit_power(value)
        text = format_significant(value / 1024**own, _DIGITS)
        return TableCell(text if same else f"{text} {UNITS[own]}", value)

    return heading, build


def _build_value_cell(column: Column, row: Row) -> TableCell:
    value, low, high = (row.get(f"{column.name}{end}") for end in ("", "_low", "_high"))
    if column.name == "sample_s" and value is None and row["outcome"] != "ok":
        return TableCell(_name_outcome(row), None)
    if value is None or column.kind != "number":
        return TableCell(format_cell(column, value), value)
    if low is None or high is None:
        return TableCell(format_significant(value, _DIGITS), value)
    text, ends = format_short(value, low, high)
    return TableCell(text, value, ends)


def _name_outcome(row: Row) -> str:
    return str(row["outcome"]).replace("_", " ")


def _build_ranks_cell(row: Row) -> TableCell:
    nodes, devices = row["nodes"], row["devices_per_node"]
    return TableCell(f"{nodes} × {devices}", nodes * devices)


def _find_counted_tokens(rows: Sequence[Row]) -> str:
    """Say what a rate leaves open: others count the encoder's tokens only."""
    both = {row["encoder_tokens"] is not None for row in rows}
    if both <= {True}:
        return "encoder + decoder, with padding"
    return "of all kinds, with padding" if True in both else "with padding"


def _format_row_interval_kind(row: Row) -> str:
    known = any(row[f"{column}_low"] is not None for column in ("step_s", "tokens_per_s"))
    return format_interval_kind(row) if known else ""


def _describe_intervals(rows: Sequence[Row]) -> str:
    """Say which level and kind the intervals of rows are, by how many allocations are behind them."""
    kinds: dict[int, dict[str, None]] = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        if kind := _format_row_interval_kind(row):
            kinds.setdefault(row["n"], {})[kind] = None
    parts = [f"of n\u00a0=\u00a0{n}: {' or '.join(found)}" for n, found in kinds.items()]
    return f"intervals {'; '.join(parts)}" if parts else ""


def _remove_intervals(row: Row) -> Row:
    """Return a run without the intervals of its steps, which are those of its configuration where it ran once."""
    return {name: value for name, value in row.items() if not name.endswith(("_low", "_high"))}


def _is_shown(name: str, rows: Sequence[Row]) -> bool:
    if name not in _SAID_ABOVE:
        return True
    return len({tuple(row[part] for part in _PARTS.get(name, (name,))) for row in rows}) > 1


def _has_value(name: str, rows: Sequence[Row]) -> bool:
    return any(row.get(name) is not None for row in rows)


def _build_text_cell(text: str) -> TableCell:
    return TableCell(text, text or None)


_MADE: dict[str, _Source] = {
    "engine": (
        ColumnHeading("engine", meaning="with what sets it apart"),
        lambda row: _build_text_cell(describe_series({"variant": ""} | row)),
    ),
    "ranks": (ColumnHeading("ranks", meaning="nodes × devices of each", number=True), _build_ranks_cell),
    "ended": (ColumnHeading("outcome", place="files"), lambda row: _build_text_cell(_name_outcome(row))),
    "run": (
        ColumnHeading("run", meaning="repeat and attempt, as its folder is called"),
        lambda row: TableCell(f"{row['repeat']}.{row['attempt']}", f"{row['repeat']:06}.{row['attempt']:06}"),
    ),
    "n": (
        ColumnHeading("n", meaning="allocations behind it", number=True),
        lambda row: TableCell(f"{row['n']}", row["n"]),
    ),
    "intervals": (
        ColumnHeading("intervals", meaning="level and kind", place="files"),
        lambda row: _build_text_cell(_format_row_interval_kind(row)),
    ),
}
"""Columns that are made of several of the summary's."""
