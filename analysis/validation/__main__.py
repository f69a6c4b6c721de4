"""Compare predictions of memory and time with recorded and published numbers.

  python -m analysis.validation
  python -m analysis.validation repository/results --out here

The command writes a page, and a table for each comparison. Errors have a sign, and no point is
omitted. The recorded runs of a checkout are needed (folder `results`).
"""

import argparse
import csv
import io
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from analysis.formats import MISSING, escape_markdown, join_markdown
from analysis.validation import (
    ComparisonSummary,
    PredictionComparison,
    frontier,
    published_adapters,
    published_memory,
    published_steps,
    published_times,
    recorded,
    step_times,
    summarise_comparison,
)
from bench.core.errors import UserError
from bench.core.store import build_unwritable_error, write_atomically

PAGE = "README.md"
COLUMNS = (
    "what", "predicted", "truth", "truth_low", "truth_high", "unit", "error", "error_unit", "bound", "verdict",
    "reason", "rival", "rival_error",
)  # fmt: skip
SOURCE_COLUMNS = ("source", "class", "predicted_as", "steps", "mean_error", "mean_signed_error", "inside")
HEAD = """\
# Predictions compared with measurements

The table has one row per comparison; the sections below explain each comparison. A point is one predicted value, which
is compared with one true value. Its error is predicted ÷ true − 1, in percent. Efficiencies are compared by their
difference, in percentage points. Every point is in a table. A point is not testable in two cases: its true value is not
known, or a setting on which the true value depends is not known.

Each comparison has a bound, the largest error allowed. All bounds were set before anything was compared. For example,
*each 5 %* means that the error of every point may be at most 5 %, and *mean 2 %* means that the mean absolute error may
be at most 2 %. An exception is a point outside of the limit of its comparison. This limit is the bound *each*, if there
is one. For published step times with a *mean* bound it is the predicted interval; such exceptions do not miss the
bound. On the testbed it is 25 % beyond the measured interval. Words, such as *fits*, are exceptions if they are wrong.
The last column has the errors of another formula, for the points to which it applies.

No constant was chosen on the points of a comparison, except where its text says so. If a comparison showed that the
memory formulas had missed an allocation, the allocation was added to the formulas. Three comparisons were corrected
after a first look ([results](../../docs/results.md#predictions)). `make predictions` writes this page and the tables.

Several comparisons use these words:

- *Live tensor bytes* are the bytes of all tensors that exist at the same time. *Steady steps* are the steps after the
  warm-up, so their memory peak excludes the construction of model and engine.
- A *rehearsal* (`zeroscale rehearse`) runs one rank of a job alone, with simulated collectives. *Calibrated* values
  were measured on the machine itself by `zeroscale calibrate`.
- *6·N·tokens* are the FLOPs of a step by the usual formula, with N parameters.
- The *class* of training software is `eager` (little optimised), `usual`, or `fused` (hand-written kernels). `eager`
  and `fused` have a factor on the compute time, the *pace*.
- The *interval score* is the width of an interval plus, if the true value lies outside, 20 times its distance from the
  interval. It is given in percent of a step.
"""
SUMMARY = (
    "Comparison, with its points", "Points", "Exceptions", "Not testable", "Mean of |error|", "Errors", "Bound",
    "Verdict", "The usual formula",
)  # fmt: skip


def compare_all(runs: recorded.RecordedRuns) -> list[PredictionComparison]:
    """Return all comparisons of predictions with measured or published numbers, in the order in which the page shows
    them."""
    return [
        published_memory.compare_zero_table(),
        *recorded.compare_real_runs(runs),
        *recorded.compare_rehearsals(runs),
        published_memory.compare_fits(),
        *step_times.compare_testbed(runs),
        published_times.compare_efficiency(),
        *published_steps.compare(),
        *published_times.compare_steps(),
        *published_adapters.compare(runs),
        *frontier.compare_scaling(),
        *frontier.compare_log(runs),
        *step_times.compare_gpu_runs(step_times.read_measured_runs(runs), runs.table("rehearsed_h200")),
    ]


def render_files(found: Sequence[PredictionComparison]) -> dict[str, str]:
    """Return the text of every file by file name: the page, a CSV for each comparison, and a CSV with the errors of
    each published source."""
    sources = [(*names, *errors) for *names, errors in published_steps.list_sources()]
    tables = {f"{comparison.name}.csv": to_csv(comparison) for comparison in found}
    return {PAGE: to_markdown(found), "published_sources.csv": _join_csv(SOURCE_COLUMNS, sources), **tables}


def to_markdown(comparisons: Sequence[PredictionComparison]) -> str:
    """Return the page in Markdown: a table with the result of each comparison, then a section for each group of
    comparisons."""
    head, rows = list(map(escape_markdown, SUMMARY)), list(map(_list_summary_cells, comparisons))
    table = join_markdown(head, rows, [name in SUMMARY[1:5] for name in SUMMARY])
    lines = [HEAD, table]
    for group in dict.fromkeys(comparison.title.partition(": ")[0] for comparison in comparisons):
        lines += ["", f"## {group}"]
        for comparison in comparisons:
            name, _, what = comparison.title.partition(": ")
            if name == group:
                lines += _describe_comparison(what or "points", comparison)
    return "\n".join(lines) + "\n"


def _describe_comparison(what: str, comparison: PredictionComparison) -> list[str]:
    """Return the lines of a comparison on the page: the link to its points, its text, and why it misses its bound."""
    lines = ["", *_wrap(f"**[{what[0].upper()}{what[1:]}]({comparison.name}.csv).** {comparison.text}")]
    if comparison.why and summarise_comparison(comparison).verdict == "missed":
        lines += ["", *_wrap(f"*Why the bound is missed.* {comparison.why}")]
    return lines


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 160, break_long_words=False, break_on_hyphens=False)


def to_csv(comparison: PredictionComparison) -> str:
    """Return the points of a comparison as CSV with a header. Cells of unknown values are empty."""
    shared = {"unit": comparison.unit, "error_unit": comparison.error_unit, "bound": _format_bound(comparison)}
    rows = [point._asdict() | shared for point in comparison.points]
    return _join_csv(COLUMNS, ([row[name] for name in COLUMNS] for row in rows))


def _join_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return text.getvalue()


def to_text(comparison: PredictionComparison) -> str:
    """Return the result of a comparison as one line for a terminal."""
    totals, unit = summarise_comparison(comparison), comparison.error_unit
    errors = _format_error_range(comparison, totals)
    error = "" if totals.mean is None else f", mean |error| {totals.mean:.2f} {unit}, {errors}"
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
    """Return a table cell that shows how well the usual formula predicts the same values. For example, the usual
    formula for FLOPs is 6·N·tokens.

    The cell has the mean error of the usual formula, from `totals` (the summary of the comparison). If the predicted
    values are words, such as `fits`, the cell states for how many points the usual formula is right. If the usual
    formula predicts no point, the cell is a dash.
    """
    if totals.rival_mean is not None:
        return f"{comparison.rival}: {totals.rival_mean:.3g} {comparison.error_unit}"
    known = [point for point in comparison.points if point.rival is not None and point.truth is not None]
    right = sum(point.rival == point.truth for point in known)
    return f"{comparison.rival}: right in {right} of {len(known)}" if known else MISSING


def _format_error_range(comparison: PredictionComparison, totals: ComparisonSummary) -> str:
    if totals.low is None or totals.high is None:
        return MISSING
    return f"{_format_signed(totals.low)} to {_format_signed(totals.high)} {comparison.error_unit}"


def _format_bound(comparison: PredictionComparison) -> str:
    bounds = {"each": comparison.each, "mean": comparison.mean}
    known = [f"{name} {bound:g} {comparison.error_unit}" for name, bound in bounds.items() if bound is not None]
    return comparison.bound or "; ".join(known) or MISSING


def _format_signed(error: float) -> str:
    """Return an error as text with its sign. An error that rounds to 0 has no sign."""
    return f"{error:+.2f}" if abs(error) >= 0.005 else "0.00"


def main(words: Sequence[str] | None = None) -> int:
    """Write README.md and a table for each comparison of predictions with true values, and print a line for each
    comparison. Return 0, even if the errors of a comparison exceed their bound, and 2 on a user error."""
    parser = argparse.ArgumentParser(
        "python -m analysis.validation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "folder `results` of a checkout; default: that of this checkout"
    parser.add_argument("results", nargs="?", type=Path, metavar="DIR", help=help_text)
    parser.add_argument(
        "--out", type=Path, default=Path("results/predictions"), metavar="DIR", help="default: %(default)s"
    )
    args = parser.parse_args(words)
    try:
        found = compare_all(recorded.find_recorded_runs(args.results))
        _write_files(render_files(found), args.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*map(to_text, found), f"written: {args.out / PAGE}"]))
    return 0


def _write_files(texts: Mapping[str, str], folder: Path) -> None:
    """Write every file atomically. Raise UserError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise build_unwritable_error(folder, error) from error


if __name__ == "__main__":
    sys.exit(main())
