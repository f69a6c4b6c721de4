"""The page and the tables of predictions beside what came true, as text."""

import csv
import io
from collections.abc import Iterator, Sequence

from analysis.formats import markdown
from analysis.formats.numbers import MISSING, format_significant, format_size
from analysis.predictions import ComparisonSummary, PredictionComparison, PredictionPoint, Value, summarise_comparison

COLUMNS = (
    "what", "predicted", "truth", "truth_low", "truth_high", "unit", "error", "error_unit", "bound", "verdict",
    "reason", "rival", "rival_error",
)  # fmt: skip
HEAD = """\
# Predictions beside what came true

Every prediction that zeroscale makes and that something recorded can contradict, with its signed error: (predicted ÷
true − 1), in percent unless a table says points. No point is left out. What misses its bound is an `exception`;
`not testable` is what the recorded facts do not decide. Both say why. Bounds were set before anything was compared, and
no constant was fitted to the points that it is tested on, unless their table says so; where a comparison showed an
allocation that the formulas of memory had missed, they were given it, from the code that makes it.
Beside most stands what DeepSpeed's own estimators
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


def to_markdown(comparisons: Sequence[PredictionComparison]) -> str:
    """Return the page: what came of each comparison, then every point."""
    totals = [(comparison, summarise_comparison(comparison)) for comparison in comparisons]
    right = [name in ("Points", "Exceptions", "Not testable", "Mean of |error|") for name in SUMMARY]
    summary = markdown.to_markdown(SUMMARY, [_format_summary_row(*one) for one in totals], right)
    return "\n".join([HEAD, summary, *map(_render_section, comparisons)])


def to_csv(comparison: PredictionComparison) -> str:
    """Return a comparison's points as CSV with a header; unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in comparison.points:
        truth = (point.predicted, point.truth, point.truth_low, point.truth_high)
        judged = (point.error, comparison.error_unit, _format_bound(comparison), point.verdict, point.reason)
        cells = (point.what, *truth, comparison.unit, *judged, point.rival, point.rival_error)
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()


def to_text(comparison: PredictionComparison) -> str:
    """Return what came of a comparison, in a line for a terminal."""
    totals = summarise_comparison(comparison)
    error = (
        ""
        if totals.mean is None
        else f", mean |error| {totals.mean:.2f}{_format_unit(comparison)}, {_format_error_range(comparison, totals)}"
    )
    remarks = f", {totals.exceptions} exceptions" * (totals.exceptions > 0)
    remarks += f", {totals.not_testable} not testable" * (totals.not_testable > 0)
    return f"{comparison.name}: {totals.points} points{remarks}{error}: {totals.verdict}"


def _format_summary_row(comparison: PredictionComparison, totals: ComparisonSummary) -> tuple[str, ...]:
    mean = MISSING if totals.mean is None else f"{totals.mean:.2f}{_format_unit(comparison)}"
    counts = (totals.points, totals.exceptions, totals.not_testable)
    return (
        comparison.title,
        *map(str, counts),
        mean,
        _format_error_range(comparison, totals),
        _format_bound(comparison),
        totals.verdict,
        _format_rival(comparison, totals),
    )


def _format_rival(comparison: PredictionComparison, totals: ComparisonSummary) -> str:
    """Return the same for what the usual formula says, where it says anything."""
    if totals.rival_mean is not None:
        return f"{comparison.rival}: {totals.rival_mean:.3g}{_format_unit(comparison)}"
    said = [point for point in comparison.points if point.rival is not None and point.truth is not None]
    right = sum(point.rival == point.truth for point in said)
    return f"{comparison.rival}: right in {right} of {len(said)}" if said else MISSING


def _render_section(comparison: PredictionComparison) -> str:
    why = comparison.why if summarise_comparison(comparison).verdict == "missed" else ""
    exact = f"Exact: [{comparison.name}.csv]({comparison.name}.csv)"
    parts = (f"## {comparison.title}", comparison.text, why, exact, _render_folded_table(comparison))
    return "\n\n".join(filter(None, parts)) + "\n"


def _render_folded_table(comparison: PredictionComparison) -> str:
    """Return the table of a comparison, a long one folded; nothing where there are no points."""
    count = len(comparison.points)
    table = _render_point_table(comparison).rstrip("\n") if count else ""
    return f"<details><summary>All {count} points</summary>\n\n{table}\n\n</details>" if count >= LONG else table


def _render_point_table(comparison: PredictionComparison) -> str:
    columns = {
        "what": [point.what for point in comparison.points],
        "predicted": [_format_value(point.predicted, comparison.unit) for point in comparison.points],
        "true": [_format_truth(point, comparison.unit) for point in comparison.points],
        "error": [_format_error(point.error, comparison) for point in comparison.points],
        "verdict": [_format_verdict(point) for point in comparison.points],
        comparison.rival: [_format_value(point.rival, comparison.unit) for point in comparison.points],
        "its error": [_format_error(point.rival_error, comparison) for point in comparison.points],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != MISSING for cell in cells)}
    right = [name not in ("what", "verdict") for name in shown]
    return markdown.to_markdown(list(shown), list(zip(*shown.values(), strict=True)), right)


def _format_value(value: Value, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or MISSING
    return format_size(value) if unit == "bytes" else f"{format_significant(value)} {unit}".rstrip()


def _format_truth(point: PredictionPoint, unit: str) -> str:
    truth = _format_value(point.truth, unit)
    if point.truth_low is None or point.truth_high is None:
        return truth
    return f"{truth} ({format_significant(point.truth_low)}–{format_significant(point.truth_high)})"


def _format_verdict(point: PredictionPoint) -> str:
    return point.verdict + (f": {point.reason}" if point.reason else "")


def _format_error(error: float | None, comparison: PredictionComparison) -> str:
    return MISSING if error is None else f"{_format_signed(error)}{_format_unit(comparison)}"


def _format_signed(error: float) -> str:
    """Return an error with its sign; one that rounds to nothing has none."""
    return f"{error:+.2f}" if abs(error) >= 0.005 else "0.00"


def _format_unit(comparison: PredictionComparison) -> str:
    return f" {comparison.error_unit}"


def _format_error_range(comparison: PredictionComparison, totals: ComparisonSummary) -> str:
    if totals.low is None or totals.high is None:
        return MISSING
    return f"{_format_signed(totals.low)} to {_format_signed(totals.high)}{_format_unit(comparison)}"


def _format_bound(comparison: PredictionComparison) -> str:
    return comparison.bound or "; ".join(_list_bounds(comparison)) or MISSING


def _list_bounds(comparison: PredictionComparison) -> Iterator[str]:
    if comparison.each is not None:
        yield f"each {comparison.each:g}{_format_unit(comparison)}"
    if comparison.mean is not None:
        yield f"mean {comparison.mean:g}{_format_unit(comparison)}"
