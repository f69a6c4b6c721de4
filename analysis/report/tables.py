"""The report's tables for readers, on the page, in Markdown and in LaTeX. Numbers are rounded; the CSV files hold the
exact numbers."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from analysis.columns import QUALITIES, Column, list_all_columns, list_columns
from analysis.formats import (
    MISSING,
    SETTINGS,
    UNITS,
    find_unit_power,
    format_cell,
    format_effect,
    format_interval_kind,
    format_outcomes,
    format_significant,
    format_size,
    format_within,
    name_briefly,
)
from analysis.questions import describe_series, name_question
from analysis.scaling import IntervalEstimate
from analysis.scaling.best import Best
from analysis.scaling.crossover import Crossover
from analysis.scaling.curves import CurvePoint, ScalingCurve
from analysis.stats.compare import EQUAL, NOT_DETECTED, TOO_FEW, Verdict
from analysis.summary import Row, is_disturbed

_RUN = (
    "config_id", "run", "study", "model", "engine", "precision", "ranks", "micro", "learning_rate", "seed", "machine",
    "evidence", "ended", *QUALITIES, "sample_s", "step_s", "step_s_p99", "step_s_max", "tokens_per_s", "mfu",
    "peak_allocated_bytes", "cost_per_million_tokens", "flags",
)  # fmt: skip
_CONFIGURATION = (
    "config_id", "model", "engine", "precision", "ranks", "micro", "machine", "evidence", "ended", "n", *QUALITIES,
    "sample_s",
    "step_s", "step_s_p99", "step_s_max", "tokens_per_s", "intervals", "peak_allocated_bytes",
    "cost_per_million_tokens", "flags",
)  # fmt: skip
_SAID_ABOVE = ("study", "model", "precision", "ranks", "machine", "run", "evidence", "seed", "learning_rate")
"""Columns that are shown only if their values differ. The report lists settings with a single value above the
tables."""
_PARTS = {"ranks": ("nodes", "devices_per_node"), "run": ("repeat", "attempt")}
_ONLY_IN_FILES = ("step_s_p99", "step_s_max", "token_f1_before", "token_f1")
_WHERE_KNOWN = ("peak_allocated_bytes", "cost_per_million_tokens", *QUALITIES)
_LABELS = {
    "config_id": "configuration", "micro": "micro-batch", "step_s": "step time", "sample_s": "time per sample",
    "step_s_p99": "99th percentile of step times", "step_s_max": "longest step time", "tokens_per_s": "throughput",
    "mfu": "MFU", "peak_allocated_bytes": "peak memory", "cost_per_million_tokens": "cost of a million tokens",
    "validation_loss": "held-out loss", "exact_match_before": "exact match before training",
    "exact_match": "exact match", "token_f1_before": "token F1 before training", "token_f1": "token F1",
    "learning_rate": "learning rate",
}  # fmt: skip
# Three digits are enough to compare rows by eye; the CSV files are exact.
_DIGITS = 3
_MOST_NAMED = 3
"""Most rivals with the same verdict that a cell names. It gives only the number of the other rivals. The file best.csv
names all rivals."""
_VERDICTS: dict[Verdict, str] = {
    EQUAL: "equal within 3 %", NOT_DETECTED: "not distinguishable", "slower": "slower",
    TOO_FEW: "slower, indicative only",
}  # fmt: skip
_LUCK_WORTH_SAYING = 0.002
"""Smallest selection bias that is reported, as a share of the time per sample. The bias is the amount by which the
fastest time is too short because it was selected as the shortest. A smaller bias would not change the three digits that
tables show."""


class ColumnHeading(NamedTuple):
    """Heading of a column. `note` adds a detail to the unit.

    `place` decides where the column appears. With "table", the page shows the column. With "groups", the values of the
    column become headings of groups of rows. With "files", the column is only written to the files, which have more
    room.
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
    """A cell: its text, its interval, and its sort key. A missing value has the sort key None and is sorted last."""

    text: str
    key: Any
    interval: str = ""

    @property
    def sort_text(self) -> str:
        """The sort key as text. Numbers have eight digits, which are enough to sort them."""
        return f"{self.key:.8g}" if isinstance(self.key, float) else str(self.key)

    @property
    def full(self) -> str:
        return f"{self.text} ({self.interval})" if self.interval else self.text


_NO_NUMBER = TableCell(MISSING, None)


class TextTable(NamedTuple):
    """A table whose cells are texts. If cells contain confidence intervals, `note` gives their level and method."""

    name: str
    title: str
    head: tuple[ColumnHeading, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""


_Source = tuple[ColumnHeading, Callable[[Row], TableCell]]


def build_runs_table(rows: Sequence[Row]) -> TextTable:
    """Return the main columns of the run table, without columns that are empty in all rows."""
    known = [name for name in _RUN if name in _MADE or any(row.get(name) not in (None, "") for row in rows)]
    # Intervals of single runs are omitted. If a configuration has one run, its own row has the interval of that run.
    bare = [{name: one for name, one in row.items() if not name.endswith(("_low", "_high"))} for row in rows]
    return _build_text_table("runs", "Runs", [_find_source(name, rows) for name in known if _varies(name, rows)], bare)


def build_configurations_table(rows: Sequence[Row]) -> TextTable:
    """Return the table of configurations: settings, n, medians with their intervals, memory and flags."""
    empty = {name for name in _WHERE_KNOWN if all(row.get(name) is None for row in rows)}
    sources = [_find_source(name, rows) for name in _CONFIGURATION if name not in empty and _varies(name, rows)]
    notes = [_describe_intervals(rows), _describe_loss_intervals(rows)]
    return _build_text_table("configurations", "Configurations", sources, rows, "; ".join(filter(None, notes)))


def build_best_table(found: Sequence[Best], rows: Sequence[Row]) -> TextTable:
    """Return a table with one row per question: its fastest configuration and the rivals of that configuration.

    A question is a group of configurations that do the same work on equal hardware. `rows` are the rows of all runs.
    """
    head = (
        _head_models([best.question["model"] for best in found]),
        ColumnHeading("question"),
        ColumnHeading("fastest"),
        ColumnHeading("time per sample", "s", number=True),
        _find_source("tokens_per_s", rows)[0],
        ColumnHeading("intervals", meaning="confidence level and kind of the intervals", place="files"),
        ColumnHeading("rivals", meaning="other configurations, with the change of their time per sample"),
        ColumnHeading("least memory", meaning="configurations with the smallest peak memory per rank"),
        ColumnHeading("without a time", meaning="number of configurations without a step time, by reason"),
        ColumnHeading("flags", meaning="flags of the fastest configuration"),
    )
    questions = [best.question for best in found]
    cells = tuple(_build_answer_row(best, name_question(best.question, questions)) for best in found)
    note = _describe_intervals([best.fastest for best in found if best.fastest])
    return TextTable("best", "Fastest configuration of each question", head, cells, note)


def build_scaling_table(curves: Sequence[ScalingCurve]) -> TextTable:
    """Return speed-up, efficiency and serial fraction, with one row per curve and node count."""
    head = (
        *_head_curves([curve.points[0].row for curve in curves]),
        *(ColumnHeading(label, number=True) for label in ("nodes", "speed-up", "efficiency")),
        ColumnHeading("serial fraction", "Karp–Flatt", number=True),
        ColumnHeading("flags"),
    )
    rows = [_build_scaling_row(curve, point) for curve in curves for point in curve.points]
    return TextTable("scaling", "Scaling", head, tuple(rows), _describe_scaling_intervals(curves))


def _describe_scaling_intervals(curves: Sequence[ScalingCurve]) -> str:
    """Return a note on the intervals of a scaling table; empty if the table has no intervals. If one of two compared
    configurations has too few repeats, the interval is computed from the steps within their runs."""
    estimates = [point.speedup for curve in curves for point in curve.points if point.speedup]
    kinds = {one.interval.kind for one in estimates if one.interval}
    if not kinds:
        return ""
    few = any("within" in kind for kind in kinds)
    return "95\u00a0% intervals between repeats" + few * "; with too few repeats, from the steps within runs, as marked"


def build_crossovers_table(found: Sequence[Crossover]) -> TextTable:
    """Return a table with one row per compared pair of ZeRO stages. It states which of the two stages is faster as
    nodes are added."""
    known = [(one, row) for one in found if (row := one.any_row)]
    rows = []
    for one, row in known:
        named = row["model"], row["machine"], f"{one.law}, {one.batch}", " compared with ".join(one.names)
        rows.append(tuple(map(_build_text_cell, (*named, one.sentence, row["flags"]))))
    head = *_head_curves([row for _, row in known]), ColumnHeading("result"), ColumnHeading("flags")
    note = "only ZeRO stages 2 and 3 are compared; of all stages, only stage 3 partitions the weights"
    return TextTable("crossovers", "Crossovers", head, tuple(rows), note)


def _head_curves(rows: Sequence[Row]) -> tuple[ColumnHeading, ...]:
    machine = ColumnHeading("machine", place="table" if len({row["machine"] for row in rows}) > 1 else "files")
    return _head_models([row["model"] for row in rows]), machine, ColumnHeading("scaling"), ColumnHeading("curve")


def _head_models(models: Sequence[str]) -> ColumnHeading:
    """Return the heading of the column "model". If there are several models, their names become headings of groups of
    rows."""
    return ColumnHeading("model", place="groups" if len(set(models)) > 1 else "files")


def _build_answer_row(best: Best, name: str) -> tuple[TableCell, ...]:
    row, model = best.fastest, best.question["model"]
    numbers = [list_columns()[column] for column in ("sample_s", "tokens_per_s")]
    # Configurations measured on a busy machine ended ok, but have no time. Readers must see that they are not ranked.
    failed = Counter([*(row["outcome"] for row in best.failed), *["busy"] * len(best.busy)])
    texts = (_describe_rivals(best), _describe_leanest(best), format_outcomes(failed), row["flags"] if row else "")
    return (
        _build_text_cell(model),
        _build_text_cell(name.removeprefix(f"{model} · ")),
        _build_text_cell(_name_choice(row) if row else "none"),
        *(_build_value_cell(column, row) if row else _NO_NUMBER for column in numbers),
        _build_text_cell(_format_row_interval_kind(row) if row else ""),
        *map(_build_text_cell, texts),
    )


def _describe_leanest(best: Best) -> str:
    """Return the names of the configurations with the smallest peak memory, the fastest first, and this memory."""
    peaks = [(point.row, point.row["peak_allocated_bytes"]) for point in best.pareto_points]
    if not peaks:
        return MISSING
    least = peaks[0][1]
    names = [_name_choice(row) for row, peak in peaks if peak == least]
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{'; '.join(names[:_MOST_NAMED])}{more}: {format_size(least)}"


def _describe_rivals(best: Best) -> str:
    """Return a text on the configurations that were compared with the fastest configuration (its rivals). It groups
    them by verdict, and states how much more time per sample each rival takes than the fastest.

    If the selection bias of the fastest time is at least _LUCK_WORTH_SAYING, a sentence on this bias is added.
    """
    parts: list[str] = []
    for verdict, words in _VERDICTS.items():
        rivals = [rival for rival in best.rivals if rival.verdict == verdict]
        named = [f"{_name_choice(one.row)} ({format_effect(one.comparison)})" for one in rivals[:_MOST_NAMED]]
        more = f" and {len(rivals) - _MOST_NAMED} more" if len(rivals) > _MOST_NAMED else ""
        parts += [f"{words}: {', '.join(named)}{more}"] if rivals else []
    if best.selection_bias >= _LUCK_WORTH_SAYING and best.ties:
        share = format_significant(100 * best.selection_bias, 1)
        parts.append(
            f"the fastest time is probably {share}\u00a0% too short, because it was selected from "
            f"{len(best.rivals) + 1} configurations"
        )
    return "; ".join(parts)


def _name_choice(row: Row) -> str:
    """Return the name of a configuration. If repeats of the configuration were excluded from its numbers, the count of
    excluded repeats and the reason follow in parentheses."""
    return f"{name_briefly(row)}, micro {row['micro']}{f' ({reason})' if (reason := row['reason']) else ''}"


def _build_scaling_row(curve: ScalingCurve, point: CurvePoint) -> tuple[TableCell, ...]:
    row = point.row
    numbers = (point.speedup, point.efficiency, point.serial_fraction)
    nodes = TableCell(f"{point.nodes}", point.nodes)
    cells = [_build_estimate_cell(number) for number in numbers]
    if not row["n"]:
        cells[0] = TableCell(_name_outcome(row), None)
    named = row["model"], row["machine"], f"{curve.law}, {curve.batch}", curve.name
    return *map(_build_text_cell, named), nodes, *cells, _build_text_cell(row["flags"])


def _build_estimate_cell(estimate: IntervalEstimate | None) -> TableCell:
    if estimate is None:
        return _NO_NUMBER
    known = estimate.interval
    cell = _build_number_cell(estimate.value, known and known.low, known and known.high)
    # Such an interval ignores the scatter between repeats, so it is much narrower than the others.
    return cell._replace(interval=f"{cell.interval}, within runs") if known and "within" in known.kind else cell


def _build_number_cell(value: float, low: float | None, high: float | None) -> TableCell:
    if low is None or high is None:
        return TableCell(format_significant(value, _DIGITS), value)
    text, *ends = format_within(value, low, high)
    return TableCell(text, value, " to ".join(ends))


def _build_text_table(
    name: str, title: str, sources: Sequence[_Source], rows: Sequence[Row], note: str = ""
) -> TextTable:
    cells = tuple(tuple(of(row) for _, of in sources) for row in rows)
    return TextTable(name, title, tuple(heading for heading, _ in sources), cells, note)


def _find_source(name: str, rows: Sequence[Row]) -> _Source:
    """Return the heading of a column, and the function that builds its cell from a row."""
    if name in _MADE:
        return _MADE[name]
    if name == "model":
        return _head_models([row[name] for row in rows]), lambda row: _build_text_cell(row[name])
    column = list_all_columns()[name]
    if column.unit == "bytes":
        return _find_size_source(column, rows)
    unit = "" if column.unit == "samples" or name == "cost_per_million_tokens" else column.unit
    heading = ColumnHeading(_LABELS.get(name, name), unit, column.meaning, column.kind in ("integer", "number"))
    if name == "tokens_per_s":
        heading = heading._replace(unit="tokens/s", note=_find_counted_tokens(rows))
    place: Literal["table", "files"] = "files" if name in _ONLY_IN_FILES else "table"
    return heading._replace(place=place), lambda row: _build_value_cell(column, row)


def _find_size_source(column: Column, rows: Sequence[Row]) -> _Source:
    """Return the heading of a column of byte sizes, and the function that builds its cell from a row.

    All cells have the unit of the largest size. If the smallest size is less than 1/100 of that unit, each cell gets
    its own unit.
    """
    sizes = [row[column.name] for row in rows if row[column.name]]
    # A common unit makes rows comparable, unless the smallest size would be rounded to nothing.
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
    if column.name == "sample_s" and value is None and (row["outcome"] != "ok" or is_disturbed(row)):
        return TableCell(_name_outcome(row), None)
    if value is None or column.kind != "number" or column.name in SETTINGS:
        return TableCell(format_cell(column, value), value)
    return _build_number_cell(value, low, high)


def _name_outcome(row: Row) -> str:
    """Return why a row has no time: the outcome of its runs, or "busy" if all runs were made on a busy machine."""
    return "busy" if row["outcome"] == "ok" and is_disturbed(row) else str(row["outcome"]).replace("_", " ")


def _find_counted_tokens(rows: Sequence[Row]) -> str:
    """Return a text that states which kinds of tokens are counted in a rate of tokens per second. The report states
    this, because other tools count encoder tokens only."""
    both = {row["encoder_tokens"] is not None for row in rows}
    if both <= {True}:
        return "encoder + decoder, with padding"
    return "of all kinds, with padding" if True in both else "with padding"


def _format_row_interval_kind(row: Row) -> str:
    known = any(row[f"{column}_low"] is not None for column in ("step_s", "tokens_per_s"))
    return format_interval_kind(row) if known else ""


def _describe_intervals(rows: Sequence[Row]) -> str:
    """Return a text that names, for each value of n, the confidence level of the intervals and how they are computed.
    The n of a row is the number of allocations from which its numbers are computed."""
    kinds: dict[int, dict[str, None]] = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        if kind := _format_row_interval_kind(row):
            kinds.setdefault(row["n"], {})[kind] = None
    parts = [f"n\u00a0=\u00a0{n}: {' or '.join(found)}" for n, found in kinds.items()]
    return f"intervals for {'; '.join(parts)}" if parts else ""


def _describe_loss_intervals(rows: Sequence[Row]) -> str:
    """Return the note of a table with held-out losses: a loss is a mean over seeds, and its interval is that of the
    mean. Empty if no row has a held-out loss."""
    if all(row.get("validation_loss") is None for row in rows):
        return ""
    return "held-out loss and exact match are means over seeds; a loss has the 95\u00a0% interval of its mean"


def _varies(name: str, rows: Sequence[Row]) -> bool:
    """Return True if a column is shown: rows differ in it, or it is always shown."""
    parts = _PARTS.get(name, (name,))
    return name not in _SAID_ABOVE or len({tuple(row.get(part) for part in parts) for row in rows}) > 1


def _build_text_cell(text: str) -> TableCell:
    return TableCell(text, text or None)


_MADE: dict[str, _Source] = {
    "engine": (
        ColumnHeading("engine", meaning="engine, with the settings that distinguish its configurations"),
        lambda row: _build_text_cell(describe_series({"variant": ""} | row)),
    ),
    "ranks": (
        ColumnHeading("ranks", meaning="number of nodes × devices per node", number=True),
        lambda row: TableCell(f"{row['nodes']} × {row['devices_per_node']}", row["nodes"] * row["devices_per_node"]),
    ),
    "ended": (ColumnHeading("outcome", place="files"), lambda row: _build_text_cell(_name_outcome(row))),
    "run": (
        ColumnHeading("run", meaning="repeat and attempt; also the name of the run's folder"),
        lambda row: TableCell(f"{row['repeat']}.{row['attempt']}", f"{row['repeat']:06}.{row['attempt']:06}"),
    ),
    "n": (
        ColumnHeading("n", meaning="sample size: allocations with a run that ended ok", number=True),
        lambda row: TableCell(f"{row['n']}", row["n"]),
    ),
    "intervals": (
        ColumnHeading("intervals", meaning="confidence level and kind of the intervals", place="files"),
        lambda row: _build_text_cell(_format_row_interval_kind(row)),
    ),
}
"""Columns of the report that the summary does not have: heading and cell function by name. Each is built from several
columns of the summary."""
