"""The page and the tables of predictions beside what came true, as text."""

import csv
import io
from collections.abc import Iterator, Sequence

from analysis.formats import markdown
from analysis.formats.numbers import MISSING, significant, size
from analysis.predictions import Comparison, Point, Told, Value, tell

COLUMNS = (
    "what", "predicted", "truth", "truth_low", "truth_high", "unit", "error", "error_unit", "bound", "verdict",
    "reason", "rival", "rival_error",
)  # fmt: skip
HEAD = """\
# Predictions beside what came true

Every prediction that zeroscale makes and that something recorded can contradict, with its signed error: (predicted ÷
true − 1), in percent unless a table says points. No point is left out. What misses its bound is an `exception`;
`not testable` is what the recorded facts do not decide. Both say why. Bounds were set before anything was compared, and
no constant was fitted to the points that it is tested on; where a comparison showed an allocation that the formulas of
memory had missed, they were given it, from the code that makes it. Beside most stands what DeepSpeed's own estimators
or 6·N·tokens would have said.

`make predictions` writes this page and the CSV files beside it anew, from `results/published`, `results/measured` and
`inputs/`; a test holds that they are what it writes. The columns of the CSV files are those of the tables below, exact.
"""
LONG = 40
"""Rows from which on a table is folded."""
SUMMARY = (
    "Comparison", "Points", "Exceptions", "Not testable", "Mean of |error|", "Errors", "Bound", "Verdict",
    "The usual formula",
)  # fmt: skip


def to_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the page: what came of each comparison, then every point."""
    told = [(comparison, tell(comparison)) for comparison in comparisons]
    right = [name in ("Points", "Exceptions", "Not testable", "Mean of |error|") for name in SUMMARY]
    summary = markdown.to_markdown(SUMMARY, [_line(*one) for one in told], right)
    return "\n".join([HEAD, summary, *map(_section, comparisons)])


def to_csv(comparison: Comparison) -> str:
    """Return a comparison's points as CSV with a header; unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in comparison.points:
        truth = (point.predicted, point.truth, point.truth_low, point.truth_high)
        judged = (point.error, comparison.error_unit, _bound(comparison), point.verdict, point.reason)
        cells = (point.what, *truth, comparison.unit, *judged, point.rival, point.rival_error)
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()


def to_text(comparison: Comparison) -> str:
    """Return what came of a comparison, in a line for a terminal."""
    told = tell(comparison)
    error = (
        "" if told.mean is None else f", mean |error| {told.mean:.2f}{_unit(comparison)}, {_range(comparison, told)}"
    )
    doubts = f", {told.exceptions} exceptions" * (told.exceptions > 0)
    doubts += f", {told.not_testable} not testable" * (told.not_testable > 0)
    return f"{comparison.name}: {told.points} points{doubts}{error}: {told.verdict}"


def _line(comparison: Comparison, told: Told) -> tuple[str, ...]:
    mean = MISSING if told.mean is None else f"{told.mean:.2f}{_unit(comparison)}"
    counts = (told.points, told.exceptions, told.not_testable)
    return (
        comparison.title, *map(str, counts), mean, _range(comparison, told), _bound(comparison), told.verdict,
        _rival(comparison, told),
    )  # fmt: skip


def _rival(comparison: Comparison, told: Told) -> str:
    """Return the same for what the usual formula says, where it says anything."""
    if told.rival_mean is not None:
        return f"{comparison.rival}: {told.rival_mean:.3g}{_unit(comparison)}"
    said = [point for point in comparison.points if point.rival is not None and point.truth is not None]
    right = sum(point.rival == point.truth for point in said)
    return f"{comparison.rival}: right in {right} of {len(said)}" if said else MISSING


def _section(comparison: Comparison) -> str:
    why = comparison.why if tell(comparison).verdict == "missed" else ""
    exact = f"Exact: [{comparison.name}.csv]({comparison.name}.csv)"
    parts = (f"## {comparison.title}", comparison.text, why, exact, _folded(comparison))
    return "\n\n".join(filter(None, parts)) + "\n"


def _folded(comparison: Comparison) -> str:
    """Return the table of a comparison, a long one folded; nothing where there are no points."""
    count = len(comparison.points)
    table = _table(comparison).rstrip("\n") if count else ""
    return f"<details><summary>All {count} points</summary>\n\n{table}\n\n</details>" if count >= LONG else table


def _table(comparison: Comparison) -> str:
    columns = {
        "what": [point.what for point in comparison.points],
        "predicted": [_value(point.predicted, comparison.unit) for point in comparison.points],
        "true": [_truth(point, comparison.unit) for point in comparison.points],
        "error": [_error(point.error, comparison) for point in comparison.points],
        "verdict": [_verdict(point) for point in comparison.points],
        comparison.rival: [_value(point.rival, comparison.unit) for point in comparison.points],
        "its error": [_error(point.rival_error, comparison) for point in comparison.points],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != MISSING for cell in cells)}
    right = [name not in ("what", "verdict") for name in shown]
    return markdown.to_markdown(list(shown), list(zip(*shown.values(), strict=True)), right)


def _value(value: Value, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or MISSING
    return size(value) if unit == "bytes" else f"{significant(value)} {unit}".rstrip()


def _truth(point: Point, unit: str) -> str:
    truth = _value(point.truth, unit)
    if point.truth_low is None or point.truth_high is None:
        return truth
    return f"{truth} ({significant(point.truth_low)}–{significant(point.truth_high)})"


def _verdict(point: Point) -> str:
    return point.verdict + (f": {point.reason}" if point.reason else "")


def _error(error: float | None, comparison: Comparison) -> str:
    return MISSING if error is None else f"{_signed(error)}{_unit(comparison)}"


def _signed(error: float) -> str:
    """Return an error with its sign; one that rounds to nothing has none."""
    return f"{error:+.2f}" if abs(error) >= 0.005 else "0.00"


def _unit(comparison: Comparison) -> str:
    return f" {comparison.error_unit}"


def _range(comparison: Comparison, told: Told) -> str:
    if told.low is None or told.high is None:
        return MISSING
    return f"{_signed(told.low)} to {_signed(told.high)}{_unit(comparison)}"


def _bound(comparison: Comparison) -> str:
    return comparison.bound or "; ".join(_bounds(comparison)) or MISSING


def _bounds(comparison: Comparison) -> Iterator[str]:
    if comparison.each is not None:
        yield f"each {comparison.each:g}{_unit(comparison)}"
    if comparison.mean is not None:
        yield f"mean {comparison.mean:g}{_unit(comparison)}"
