"""The report's tables as people read them, on the page, in Markdown and in LaTeX; the CSV beside them is exact."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from analysis.columns import Column, columns
from analysis.formats.numbers import MISSING, cell, significant
from analysis.questions import series
from analysis.report.headline import Told, ends, kind
from analysis.scaling.crossover import Crossover
from analysis.scaling.curves import Curve, Point
from analysis.scaling.pace import Estimate
from analysis.scaling.usl import Fit
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
_WORDS = {
    "config_id": "configuration", "devices_per_node": "devices", "micro": "micro-batch", "step_s": "step time",
    "sample_s": "time per sample", "step_s_p95": "95th percentile of steps", "step_s_p99": "99th percentile of steps",
    "step_s_max": "longest step", "tokens_per_s": "throughput", "mfu": "MFU", "peak_allocated_bytes": "peak allocated",
    "cost_per_million_tokens": "cost of a million tokens",
}  # fmt: skip
_BOTH = "tokens/s, encoder + decoder, with padding"
"""What a unit leaves open: others count the encoder's tokens only."""


class Heading(NamedTuple):
    """Of a column: what it is called, its unit, what it means, and whether numbers stand in it."""

    label: str
    unit: str = ""
    meaning: str = ""
    number: bool = False

    @property
    def text(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class Cell(NamedTuple):
    """A cell as it is read and as it is sorted; `key` None is missing, and sorted last."""

    text: str
    key: Any


class Sheet(NamedTuple):
    """A table of texts; without rows there is nothing to show."""

    name: str
    title: str
    head: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]


_CURVE = (Heading("model"), Heading("machine"), Heading("scaling"), Heading("held"))

_Source = tuple[Heading, Callable[[Row], Cell]]


def runs(rows: Sequence[Row]) -> Sheet:
    """Return the run table in the columns that people look at first, where any run has a value for them."""
    told = [name for name in _RUN if any(row[name] not in (None, "") for row in rows)]
    return _sheet("runs", "Runs", [_source(name, rows) for name in told if _varies(name, rows)], rows)


def configurations(rows: Sequence[Row]) -> Sheet:
    """Return the summary: what was measured, n, medians with their intervals, memory and flags."""
    sources = [
        _source("config_id", rows), *(_source(name, rows) for name in ("model",) if _varies(name, rows)),
        (Heading("engine", meaning="with what sets it apart"), lambda row: _text(series(row))),
        *(_source(name, rows) for name in _WHAT if _varies(name, rows)),
        (Heading("n", meaning="allocations behind it", number=True), lambda row: Cell(f"{row['n']}", row["n"])),
        *(_source(name, rows) for name in ("sample_s", "step_s")), _interval("step_s", rows),
        *(_source(name, rows) for name in ("step_s_p99", "step_s_max", "tokens_per_s")),
        _interval("tokens_per_s", rows),
        (Heading("intervals", meaning="level and kind"), lambda row: _text(_kind(row))),
        *(_source(name, rows) for name in ("peak_allocated_bytes", "cost_per_million_tokens") if _known(name, rows)),
        _source("flags", rows),
    ]  # fmt: skip
    return _sheet("configurations", "Configurations", sources, rows)


def best(told: Sequence[Told], rows: Sequence[Row]) -> Sheet:
    """Return the answer to every question; `rows` are what was measured."""
    words = ("question", "fastest", "throughput", "interval", "not told apart from it", "with too few repeats",
             "least memory", "peak allocated", "without a number")  # fmt: skip
    head = [Heading(word) for word in words]
    head[2] = Heading("throughput", _unit(columns()["tokens_per_s"], rows), number=True)
    return Sheet("best", "Best per question", tuple(head), tuple(map(_answer, told)))


def scaling(curves: Sequence[Curve]) -> Sheet:
    """Return speed-up, efficiency and serial fraction, a row per node count of every curve."""
    head = (
        *_CURVE, Heading("nodes", number=True), Heading("speed-up", number=True), Heading("efficiency", number=True),
        Heading("serial fraction", "Karp–Flatt", number=True), Heading("flags"),
    )  # fmt: skip
    rows = [_scaled(curve, point) for curve in curves for point in curve.points]
    return Sheet("scaling", "Scaling", head, tuple(rows))


def law(curves: Sequence[Curve]) -> Sheet:
    """Return the universal scalability law of every curve that has enough node counts."""
    head = (
        *_CURVE, Heading("rate of one node", "samples/s", number=True),
        Heading("contention", "σ", "part of the work that waits for its turn", number=True),
        Heading("coherency", "κ", "what each pair of nodes costs", number=True),
        Heading("more nodes hurt beyond", "nodes", "– where no peak is within reach", number=True), Heading("rests on"),
    )  # fmt: skip
    rows = [_fitted(curve, fit) for curve in curves if (fit := curve.fit)]
    return Sheet("scalability_law", "Universal scalability law", head, tuple(rows))


def crossovers(found: Sequence[Crossover]) -> Sheet:
    """Return what becomes of two stages as nodes are added."""
    rows = [
        (*_curve(row, f"{one.law}, {one.batch}", " against ".join(one.names)), _text(one.told))
        for one in found
        if (row := one.any_row)
    ]
    return Sheet("crossovers", "Crossovers", (*_CURVE, Heading("what becomes of them")), tuple(rows))


def _fitted(curve: Curve, fit: Fit) -> tuple[Cell, ...]:
    numbers = map(_estimate, (fit.rate, fit.contention, fit.coherency, fit.peak))
    nodes = f"{', '.join(map(str, fit.measured))} nodes{': rejected, it does not fit' if fit.rejected else ''}"
    return *_curve(curve.points[0].row, f"{curve.law}, {curve.batch}", curve.name), *numbers, _text(nodes)


def _curve(row: Row, scaling: str, held: str) -> tuple[Cell, ...]:
    return _text(row["model"]), _text(row["machine"]), _text(scaling), _text(held)


def _answer(told: Told) -> tuple[Cell, ...]:
    rest = (told.interval, "; ".join(told.tied), told.untold, told.leanest, told.peak, told.failed)
    return _text(told.name), _text(told.fastest or "none"), Cell(told.rate, told.tokens_per_s), *map(_text, rest)


def _scaled(curve: Curve, point: Point) -> tuple[Cell, ...]:
    row = point.row
    numbers = (point.speedup, point.efficiency, point.serial_fraction)
    nodes = Cell(f"{point.nodes}", point.nodes)
    told = [_estimate(number) for number in numbers]
    if not row["n"]:
        told[0] = _text(str(row["outcome"]).replace("_", " "))
    what = _curve(row, f"{curve.law}, {curve.batch}", curve.name)
    return *what, nodes, *told, _text(row["flags"])


def _estimate(estimate: Estimate | None) -> Cell:
    if estimate is None:
        return Cell(MISSING, None)
    known = estimate.interval
    around = f" ({significant(known.low, 3)} to {significant(known.high, 3)})" if known else ""
    return Cell(significant(estimate.value, 3) + around, estimate.value)


def _sheet(name: str, title: str, sources: Sequence[_Source], rows: Sequence[Row]) -> Sheet:
    cells = tuple(tuple(of(row) for _, of in sources) for row in rows)
    return Sheet(name, title, tuple(heading for heading, _ in sources), cells)


def _source(name: str, rows: Sequence[Row]) -> _Source:
    column = columns()[name]
    # sizes carry their unit in the cell, for they go from KiB to GiB
    unit = "" if column.unit in ("bytes", "samples") or name == "cost_per_million_tokens" else _unit(column, rows)
    heading = Heading(_WORDS.get(name, name), unit, column.meaning, column.kind in ("integer", "number"))
    return heading, lambda row: _cell(column, row)


def _cell(column: Column, row: Row) -> Cell:
    value = row[column.name]
    if column.name == "outcome":
        return _text(str(value).replace("_", " "))
    return Cell(cell(column, value), value)


def _interval(column: str, rows: Sequence[Row]) -> _Source:
    heading = Heading(f"{_WORDS[column]}, interval", _unit(columns()[column], rows), number=True)
    return heading, lambda row: Cell(ends(row, column) or MISSING, row[f"{column}_low"])


def _unit(column: Column, rows: Sequence[Row]) -> str:
    if column.name != "tokens_per_s":
        return column.unit
    both = {row["encoder_tokens"] is not None for row in rows}
    if both <= {True}:
        return _BOTH
    return "tokens/s of all kinds, with padding" if True in both else "tokens/s, with padding"


def _kind(row: Row) -> str:
    known = any(row[f"{column}_low"] is not None for column in ("step_s", "tokens_per_s"))
    return kind(row) if known else ""


def _varies(name: str, rows: Sequence[Row]) -> bool:
    return name not in _SAID_ABOVE or len({row[name] for row in rows}) > 1


def _known(name: str, rows: Sequence[Row]) -> bool:
    return any(row.get(name) is not None for row in rows)


def _text(text: str) -> Cell:
    return Cell(text, text or None)
