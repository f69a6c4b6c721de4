"""The report's tables as people read them, on the page, in Markdown and in LaTeX; the CSV beside them is exact."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from analysis.columns import Column, list_columns
from analysis.formats.numbers import MISSING, format_cell, format_interval_of, format_significant
from analysis.questions import describe_series
from analysis.report.headline import AnswerText, format_ends, format_interval_kind, format_value
from analysis.scaling.crossover import Crossover
from analysis.scaling.curves import CurvePoint, ScalingCurve
from analysis.scaling.time_per_sample import IntervalEstimate
from analysis.scaling.usl import LawFit
from analysis.summary import Row

_RUN = (
    "config_id", "repeat", "attempt", "study", "model", "engine", "precision", "nodes", "devices_per_node", "micro",
    "accumulation", "machine", "evidence", "outcome", "sample_s", "step_s", "step_s_p99", "step_s_max", "tokens_per_s",
    "mfu", "peak_allocated_bytes", "cost_per_million_tokens", "flags",
)  # fmt: skip
_WHAT = ("precision", "nodes", "devices_per_node", "micro", "machine", "evidence", "outcome")
_SAID_ABOVE = (
    "study",
    "model",
    "precision",
    "nodes",
    "devices_per_node",
    "machine",
    "repeat",
    "attempt",
    "accumulation",
    "evidence",
)
"""Left out where all rows have the same; the report says once what was held equal."""
_LABELS = {
    "config_id": "configuration", "devices_per_node": "devices", "micro": "micro-batch", "step_s": "step time",
    "sample_s": "time per sample", "step_s_p95": "95th percentile of steps", "step_s_p99": "99th percentile of steps",
    "step_s_max": "longest step", "tokens_per_s": "throughput", "mfu": "MFU", "peak_allocated_bytes": "peak allocated",
    "cost_per_million_tokens": "cost of a million tokens",
}  # fmt: skip
_BOTH = "tokens/s, encoder + decoder, with padding"
"""What a unit leaves open: others count the encoder's tokens only."""


class ColumnHeading(NamedTuple):
    """Of a column: what it is called, its unit, what it means, and whether numbers stand in it."""

    label: str
    unit: str = ""
    meaning: str = ""
    number: bool = False

    @property
    def text(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class TableCell(NamedTuple):
    """A cell as it is read and as it is sorted; `key` None is missing, and sorted last."""

    text: str
    key: Any


class TextTable(NamedTuple):
    """A table of texts; without rows there is nothing to show."""

    name: str
    title: str
    head: tuple[ColumnHeading, ...]
    rows: tuple[tuple[TableCell, ...], ...]


_CURVE = (ColumnHeading("model"), ColumnHeading("machine"), ColumnHeading("scaling"), ColumnHeading("held"))

_Source = tuple[ColumnHeading, Callable[[Row], TableCell]]


def build_runs_table(rows: Sequence[Row]) -> TextTable:
    """Return the run table in the columns that people look at first, where any run has a value for them."""
    known = [name for name in _RUN if any(row[name] not in (None, "") for row in rows)]
    return _build_text_table(
        "runs", "Runs", [_find_source(name, rows) for name in known if _is_shown(name, rows)], rows
    )


def build_configurations_table(rows: Sequence[Row]) -> TextTable:
    """Return the summary: what was measured, n, medians with their intervals, memory and flags."""
    sources = [
        _find_source("config_id", rows),
        *(_find_source(name, rows) for name in ("model",) if _is_shown(name, rows)),
        (
            ColumnHeading("engine", meaning="with what sets it apart"),
            lambda row: _build_text_cell(describe_series(row)),
        ),
        *(_find_source(name, rows) for name in _WHAT if _is_shown(name, rows)),
        (
            ColumnHeading("n", meaning="allocations behind it", number=True),
            lambda row: TableCell(f"{row['n']}", row["n"]),
        ),
        *(_find_source(name, rows) for name in ("sample_s", "step_s")),
        _build_interval_source("step_s", rows),
        *(_find_source(name, rows) for name in ("step_s_p99", "step_s_max", "tokens_per_s")),
        _build_interval_source("tokens_per_s", rows),
        (
            ColumnHeading("intervals", meaning="level and kind"),
            lambda row: _build_text_cell(_format_row_interval_kind(row)),
        ),
        *(
            _find_source(name, rows)
            for name in ("peak_allocated_bytes", "cost_per_million_tokens")
            if _has_value(name, rows)
        ),
        _find_source("flags", rows),
    ]
    return _build_text_table("configurations", "Configurations", sources, rows)


def build_best_table(answers: Sequence[AnswerText], rows: Sequence[Row]) -> TextTable:
    """Return the answer to every question; `rows` are what was measured."""
    words = ("question", "fastest", "throughput", "interval", "equal or not told apart", "with too few repeats",
             "least memory", "peak allocated", "without a number")  # fmt: skip
    head = [ColumnHeading(word) for word in words]
    head[2] = ColumnHeading("throughput", _find_unit(list_columns()["tokens_per_s"], rows), number=True)
    return TextTable("best", "Best per question", tuple(head), tuple(map(_build_answer_row, answers)))


def build_scaling_table(curves: Sequence[ScalingCurve]) -> TextTable:
    """Return speed-up, efficiency and serial fraction, a row per node count of every curve."""
    head = (
        *_CURVE,
        ColumnHeading("nodes", number=True),
        ColumnHeading("speed-up", number=True),
        ColumnHeading("efficiency", number=True),
        ColumnHeading("serial fraction", "Karp–Flatt", number=True),
        ColumnHeading("flags"),
    )
    rows = [_build_scaling_row(curve, point) for curve in curves for point in curve.points]
    return TextTable("scaling", "Scaling", head, tuple(rows))


def build_law_table(curves: Sequence[ScalingCurve]) -> TextTable:
    """Return the universal scalability law of every curve that has enough node counts."""
    head = (
        *_CURVE,
        ColumnHeading("rate of one node", "samples/s", number=True),
        ColumnHeading("contention", "σ", "part of the work that waits for its turn", number=True),
        ColumnHeading("coherency", "κ", "what each pair of nodes costs", number=True),
        ColumnHeading("more nodes hurt beyond", "nodes", "– where no peak is within reach", number=True),
        ColumnHeading("rests on"),
    )
    rows = [_build_law_row(curve, fit) for curve in curves if (fit := curve.fit)]
    return TextTable("scalability_law", "Universal scalability law", head, tuple(rows))


def build_crossovers_table(found: Sequence[Crossover]) -> TextTable:
    """Return what becomes of two stages as nodes are added."""
    rows = [
        (
            *_build_curve_cells(row, f"{one.law}, {one.batch}", " against ".join(one.names)),
            _build_text_cell(one.sentence),
        )
        for one in found
        if (row := one.any_row)
    ]
    return TextTable("crossovers", "Crossovers", (*_CURVE, ColumnHeading("what becomes of them")), tuple(rows))


def _build_law_row(curve: ScalingCurve, fit: LawFit) -> tuple[TableCell, ...]:
    numbers = map(_build_estimate_cell, (fit.rate, fit.contention, fit.coherency, fit.peak))
    nodes = f"{', '.join(map(str, fit.measured))} nodes{': rejected, it does not fit' if fit.rejected else ''}"
    return (
        *_build_curve_cells(curve.points[0].row, f"{curve.law}, {curve.batch}", curve.name),
        *numbers,
        _build_text_cell(nodes),
    )


def _build_curve_cells(row: Row, scaling: str, fixed_work: str) -> tuple[TableCell, ...]:
    return (
        _build_text_cell(row["model"]),
        _build_text_cell(row["machine"]),
        _build_text_cell(scaling),
        _build_text_cell(fixed_work),
    )


def _build_answer_row(answer: AnswerText) -> tuple[TableCell, ...]:
    rest = (answer.interval, "; ".join((*answer.equal, *answer.tied)), answer.undecided, answer.leanest, answer.peak, answer.failed)
    return (
        _build_text_cell(answer.name),
        _build_text_cell(answer.fastest or "none"),
        TableCell(answer.rate, answer.tokens_per_s),
        *map(_build_text_cell, rest),
    )


def _build_scaling_row(curve: ScalingCurve, point: CurvePoint) -> tuple[TableCell, ...]:
    row = point.row
    numbers = (point.speedup, point.efficiency, point.serial_fraction)
    nodes = TableCell(f"{point.nodes}", point.nodes)
    cells = [_build_estimate_cell(number) for number in numbers]
    if not row["n"]:
        cells[0] = _build_text_cell(str(row["outcome"]).replace("_", " "))
    what = _build_curve_cells(row, f"{curve.law}, {curve.batch}", curve.name)
    return *what, nodes, *cells, _build_text_cell(row["flags"])


def _build_estimate_cell(estimate: IntervalEstimate | None) -> TableCell:
    if estimate is None:
        return TableCell(MISSING, None)
    known = estimate.interval
    text = format_interval_of(estimate.value, known.low, known.high) if known else format_significant(estimate.value, 3)
    return TableCell(text, estimate.value)


def _build_text_table(name: str, title: str, sources: Sequence[_Source], rows: Sequence[Row]) -> TextTable:
    cells = tuple(tuple(of(row) for _, of in sources) for row in rows)
    return TextTable(name, title, tuple(heading for heading, _ in sources), cells)


def _find_source(name: str, rows: Sequence[Row]) -> _Source:
    column = list_columns()[name]
    # sizes carry their unit in the cell, for they go from KiB to GiB
    unit = "" if column.unit in ("bytes", "samples") or name == "cost_per_million_tokens" else _find_unit(column, rows)
    heading = ColumnHeading(_LABELS.get(name, name), unit, column.meaning, column.kind in ("integer", "number"))
    return heading, lambda row: _build_value_cell(column, row)


def _build_value_cell(column: Column, row: Row) -> TableCell:
    value = row[column.name]
    if column.name == "outcome":
        return _build_text_cell(str(value).replace("_", " "))
    if value is not None and row.get(f"{column.name}_low") is not None:
        return TableCell(format_value(row, column.name), value)
    return TableCell(format_cell(column, value), value)


def _build_interval_source(column: str, rows: Sequence[Row]) -> _Source:
    heading = ColumnHeading(f"{_LABELS[column]}, interval", _find_unit(list_columns()[column], rows), number=True)
    return heading, lambda row: TableCell(format_ends(row, column) or MISSING, row[f"{column}_low"])


def _find_unit(column: Column, rows: Sequence[Row]) -> str:
    if column.name != "tokens_per_s":
        return column.unit
    both = {row["encoder_tokens"] is not None for row in rows}
    if both <= {True}:
        return _BOTH
    return "tokens/s of all kinds, with padding" if True in both else "tokens/s, with padding"


def _format_row_interval_kind(row: Row) -> str:
    known = any(row[f"{column}_low"] is not None for column in ("step_s", "tokens_per_s"))
    return format_interval_kind(row) if known else ""


def _is_shown(name: str, rows: Sequence[Row]) -> bool:
    return name not in _SAID_ABOVE or len({row[name] for row in rows}) > 1


def _has_value(name: str, rows: Sequence[Row]) -> bool:
    return any(row.get(name) is not None for row in rows)


def _build_text_cell(text: str) -> TableCell:
    return TableCell(text, text or None)
