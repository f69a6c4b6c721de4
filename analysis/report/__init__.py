"""The report: a page `report.html` that opens without a network, and its tables as files next to it."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from analysis import formats
from analysis.claims.findings import find_findings
from analysis.claims.sources import STUDY
from analysis.formats import format_markdown_table, to_latex
from analysis.report import tables
from analysis.report.analogue import build_analogue, render_claim_tables
from analysis.report.contents import MOST_ROWS, read_evidence, select_failures, select_runs
from analysis.report.findings import ReportFindings, compute_findings
from analysis.report.page import render_page
from analysis.report.tables import TextTable
from analysis.results import Results
from analysis.scaling import best, crossover, curves
from bench.core.errors import UserError

Follow = Callable[[str, float | None], None]
"""Progress callback. Its arguments are the name of the current task, and the finished share of the task (0 to 1, or
None if unknown)."""

PAGE = "report.html"
_CLAIMED_FAMILY = "t5"  # the claims are of a study that trained models of this family only


def write_report(
    results: Results, out: Path, price: float | None = None, follow: Follow = lambda what, share: None
) -> Path:
    """Write the report of a set of runs into the folder `out`, and return the path of its page.

    `price` is the price per device and hour, in any currency. Equal records give equal files. The files of an older
    report are replaced all at once; other files in the folder stay. Raise UserError if there is no record, or if the
    folder cannot be written.
    """
    if results.table.empty:
        raise UserError("", "no record to report", "give a results folder, e.g. results/runs/smoke")
    follow(f"comparing {len(results.table):,} runs", None)
    files = render_files(compute_findings(results, price), follow)
    follow(f"writing {len(files)} files", None)
    try:
        _replace_files(out, files)
    except OSError as error:
        raise UserError(str(out), f"cannot be written ({error.strerror})", "choose another --out") from error
    return out / PAGE


def render_files(found: ReportFindings, follow: Follow = lambda what, share: None) -> dict[str, bytes]:
    """Return the bytes of every file of the report by its path. The page is last."""
    follow("tables", None)
    # The published study trained T5 models only, so runs of other families cannot test its claims.
    models = {spec.model.name for spec in found.results.specs.values() if spec.model.family == _CLAIMED_FAMILY}
    judged = [one for one in find_findings(found.results) if one.claim.source == STUDY and one.model in models]
    section = build_analogue(judged, {machine.name: machine.note for machine in found.origin.machines})
    files = render_tables(found) | render_claim_tables(judged, section)
    # Reading records and logs from files takes time, so only those of runs on the page are read.
    places = {*select_runs(found.rows), *select_failures(found.rows)}
    evidence = {place: read_evidence(found.results, place) for place in places}
    return files | {PAGE: render_page(found, section, evidence, follow).encode()}


def render_tables(found: ReportFindings) -> dict[str, bytes]:
    """Return the bytes of every non-empty table in CSV, Markdown and LaTeX, by path."""
    files: dict[str, bytes] = {}
    for exact, table, rows in _list_tables(found):
        if table.rows:
            files |= {f"{table.name}.csv": formats.to_csv(exact).encode(), **_render_readable(table, rows)}
    return files


def _list_tables(found: ReportFindings) -> Iterable[tuple[pd.DataFrame, TextTable, int]]:
    """Yield for each table its exact form (for CSV), its form for readers, and its full number of rows.

    The form for readers has at most MOST_ROWS rows.
    """
    configurations = tables.build_configurations_table(found.list_configurations(MOST_ROWS))
    yield found.table, tables.build_runs_table(found.rows[:MOST_ROWS]), len(found.rows)
    yield found.summary, configurations, len(found.summary)
    yield best.as_table(found.best), tables.build_best_table(found.answers[:MOST_ROWS], found.rows), len(found.best)
    scaling, met = tables.build_scaling_table(found.curves), tables.build_crossovers_table(found.crossovers)
    yield curves.build_curve_table(list(found.curves)), scaling, len(scaling.rows)
    yield crossover.build_crossover_table(list(found.crossovers)), met, len(met.rows)


def _render_readable(table: TextTable, all_rows: int) -> dict[str, bytes]:
    rows = [[cell.full for cell in row] for row in table.rows[:MOST_ROWS]]
    head, right = [heading.text for heading in table.head], [heading.number for heading in table.head]
    markdown, latex = format_markdown_table(head, rows, right), to_latex(head, rows, right)
    if more := all_rows - len(rows):
        note = f"{more:,} more rows are in {table.name}.csv."
        markdown, latex = f"{markdown}\n{note}\n", f"% {note}\n{latex}"
    return {f"{table.name}.md": markdown.encode(), f"{table.name}.tex": latex.encode()}


def _replace_files(out: Path, files: dict[str, bytes]) -> None:
    """Write all files to a temporary folder, then move them into place. If the disk is full, the older report stays
    intact."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as aside:
        for name, content in files.items():
            path = Path(aside, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        for name in files:
            (out / name).parent.mkdir(exist_ok=True)
            Path(aside, name).replace(out / name)
