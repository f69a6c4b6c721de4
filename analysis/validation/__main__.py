"""Put each prediction of memory and time beside what came true, signed errors and no point left out.

  python -m analysis.validation
  python -m analysis.validation repository/results --out here

It writes a page, and a table for each comparison. It reads recorded runs and is part of a checkout alone.
"""

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from analysis.formats import MISSING, escape_markdown
from analysis.validation import (
    ComparisonSummary,
    PredictionComparison,
    frontier,
    memory,
    published_memory,
    published_steps,
    published_times,
    step_times,
    summarise_comparison,
)
from analysis.validation.recorded import RecordedRuns, find_recorded_runs
from bench.core.errors import UserError
from bench.core.store import build_unwritable_error, write_atomically

PAGE = "README.md"
COLUMNS = (
    "what", "predicted", "truth", "truth_low", "truth_high", "unit", "error", "error_unit", "bound", "verdict",
    "reason", "rival", "rival_error",
)  # fmt: skip
SOURCE_COLUMNS = ("source", "class", "predicted_as", "steps", "mean_error", "mean_signed_error", "inside")
HEAD = """\
# Predictions beside what came true

Signed errors are (predicted ÷ true − 1), in percent unless a table says points. No point is left out. What misses its
bound is an `exception`; `not testable` is what the recorded facts do not decide; the tables say why. Bounds were set
before anything was compared, and no constant was fitted to the points that it is tested on, unless it is said below;
where a comparison showed an allocation that the formulas of memory had missed, they were given it, from the code that
makes it. `make predictions` writes this page and the tables anew, from `results/published`, `results/measured` and
`inputs/`; a test holds that they are what it writes.
"""
SUMMARY = (
    "Comparison, with its points", "Points", "Exceptions", "Not testable", "Mean of |error|", "Errors", "Bound",
    "Verdict", "The usual formula",
)  # fmt: skip


def compare_all(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return every comparison, in the order of the page."""
    return [
        published_memory.compare_zero_table(),
        *memory.compare_real_runs(recorded),
        *memory.compare_rehearsals(recorded),
        published_memory.compare_fits(),
        *step_times.compare_testbed(recorded),
        published_times.compare_efficiency(),
        *published_steps.compare(),
        *published_times.compare_steps(),
        *frontier.compare_scaling(),
        *frontier.compare_log(recorded),
        *step_times.compare_gpu_runs(step_times.read_measured_runs(recorded)),
    ]


def render_files(found: Sequence[PredictionComparison]) -> dict[str, str]:
    """Return the files by name: the page, a table for each comparison, and the errors of each published source."""
    sources = [(*names, *errors) for *names, errors in published_steps.list_sources()]
    tables = {f"{comparison.name}.csv": to_csv(comparison) for comparison in found}
    return {PAGE: to_markdown(found), "published_sources.csv": _join_csv(SOURCE_COLUMNS, sources), **tables}


def to_markdown(comparisons: Sequence[PredictionComparison]) -> str:
    """Return the page: what came of each comparison, and what was compared with what."""
    rule = ["---:" if name in SUMMARY[1:5] else "---" for name in SUMMARY]
    rows = [[escape_markdown(name) for name in SUMMARY], rule, *map(_list_summary_cells, comparisons)]
    groups: dict[str, list[str]] = {}
    for comparison in comparisons:
        group, _, what = comparison.title.partition(": ")
        texts = groups.setdefault(group, [])
        texts.append(f"*{what}*: {comparison.text}" if what else comparison.text)
        if comparison.why not in texts and summarise_comparison(comparison).verdict == "missed":
            texts.append(comparison.why)
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return "\n".join([HEAD, table, *(f"- **{group}** – {' '.join(texts)}" for group, texts in groups.items())]) + "\n"


def to_csv(comparison: PredictionComparison) -> str:
    """Return a comparison's points as CSV with a header; unknown is empty."""
    rows = []
    for point in comparison.points:
        truth = (point.predicted, point.truth, point.truth_low, point.truth_high)
        judged = (point.error, comparison.error_unit, _format_bound(comparison), point.verdict, point.reason)
        rows.append((point.what, *truth, comparison.unit, *judged, point.rival, point.rival_error))
    return _join_csv(COLUMNS, rows)


def _join_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return text.getvalue()


def to_text(comparison: PredictionComparison) -> str:
    """Return what came of a comparison, in a line for a terminal."""
    totals = summarise_comparison(comparison)
    error = (
        ""
        if totals.mean is None
        else f", mean |error| {totals.mean:.2f} {comparison.error_unit}, {_format_error_range(comparison, totals)}"
    )
    remarks = f", {totals.exceptions} exceptions" * (totals.exceptions > 0)
    remarks += f", {totals.not_testable} not testable" * (totals.not_testable > 0)
    return f"{comparison.name}: {totals.points} points{remarks}{error}: {totals.verdict}"


def _list_summary_cells(comparison: PredictionComparison) -> list[str]:
    totals = summarise_comparison(comparison)
    cells = (
        *map(str, (totals.points, totals.exceptions, totals.not_testable)),
        MISSING if totals.mean is None else f"{totals.mean:.2f} {comparison.error_unit}",
        _format_error_range(comparison, totals),
        _format_bound(comparison),
        totals.verdict,
        _format_rival(comparison, totals),
    )
    return [f"[{comparison.title}]({comparison.name}.csv)", *map(escape_markdown, cells)]


def _format_rival(comparison: PredictionComparison, totals: ComparisonSummary) -> str:
    """Return the same for what the usual formula says, where it says anything."""
    if totals.rival_mean is not None:
        return f"{comparison.rival}: {totals.rival_mean:.3g} {comparison.error_unit}"
    said = [point for point in comparison.points if point.rival is not None and point.truth is not None]
    right = sum(point.rival == point.truth for point in said)
    return f"{comparison.rival}: right in {right} of {len(said)}" if said else MISSING


def _format_error_range(comparison: PredictionComparison, totals: ComparisonSummary) -> str:
    if totals.low is None or totals.high is None:
        return MISSING
    return f"{_format_signed(totals.low)} to {_format_signed(totals.high)} {comparison.error_unit}"


def _format_bound(comparison: PredictionComparison) -> str:
    return comparison.bound or "; ".join(_list_bounds(comparison)) or MISSING


def _list_bounds(comparison: PredictionComparison) -> Iterator[str]:
    if comparison.each is not None:
        yield f"each {comparison.each:g} {comparison.error_unit}"
    if comparison.mean is not None:
        yield f"mean {comparison.mean:g} {comparison.error_unit}"


def _format_signed(error: float) -> str:
    """Return an error with its sign; one that rounds to nothing has none."""
    return f"{error:+.2f}" if abs(error) >= 0.005 else "0.00"


def main(words: Sequence[str] | None = None) -> int:
    """Write the page and its tables, and print a line for each comparison, whatever came of the predictions."""
    parser = argparse.ArgumentParser(
        "python -m analysis.validation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "the folder results of a checkout; default: that of this checkout"
    parser.add_argument("results", nargs="?", type=Path, metavar="DIR", help=help_text)
    parser.add_argument(
        "--out", type=Path, default=Path("results/predictions"), metavar="DIR", help="default: %(default)s"
    )
    args = parser.parse_args(words)
    try:
        found = compare_all(find_recorded_runs(args.results))
        write_ledger(found, args.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*map(to_text, found), f"written: {args.out / PAGE}"]))
    return 0


def write_ledger(found: Sequence[PredictionComparison], folder: Path) -> None:
    """Write every file, each whole or not at all; UserError where the folder cannot be written to."""
    texts = render_files(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise build_unwritable_error(folder, error) from error


if __name__ == "__main__":
    sys.exit(main())
