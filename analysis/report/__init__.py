"""The report: `report.html`, one page that opens without a network, with its tables as files beside it."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from analysis import formats
from analysis.claims import ClaimFinding
from analysis.claims.findings import find_findings
from analysis.claims.sources import STUDY
from analysis.formats import format_markdown_table, to_latex
from analysis.report import tables
from analysis.report.analogue import build_analogue, render_claim_tables
from analysis.report.contents import MOST_ROWS, select_failures, select_runs
from analysis.report.evidence import read_evidence
from analysis.report.findings import ReportFindings, compute_findings
from analysis.report.page import render_page
from analysis.report.tables import TextTable
from analysis.report.texts import describe_answers
from analysis.results import Results
from analysis.scaling import best, crossover, curves
from bench.core.errors import UserError

Follow = Callable[[str, float | None], None]
"""What hears what is under way, and what share of it is done, between 0 and 1; None where nobody knows."""

PAGE = "report.html"
_CLAIMED_FAMILY = "t5"  # of the models that the study of the claims trained


def write_report(
    results: Results, out: Path, price: float | None = None, follow: Follow = lambda what, share: None
) -> Path:
    """Write the report of what was read into the folder `out`, and return the page's path.

    `price` is of a device and hour, in a currency of the user's own; `follow` hears what is under way. Equal records
    give equal files. An older report there is replaced, file by file, each whole; nothing else in the folder is
    touched. Raises UserError where there is no record, or the folder cannot be written.
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
    """Return every file of the report by its path, the page last; `follow` hears what is under way."""
    follow("tables", None)
    judged = _judge_claims(found.results)
    section = build_analogue(judged, {machine.name: machine.note for machine in found.origin.machines})
    files = render_tables(found) | render_claim_tables(judged, section)
    left = {
        place: read_evidence(found.results, place) for place in {*select_runs(found.rows), *select_failures(found.rows)}
    }
    return files | {PAGE: render_page(found, section, left, follow).encode()}


def render_tables(found: ReportFindings) -> dict[str, bytes]:
    """Return every table in every format, by path; one that would have no row is none."""
    files: dict[str, bytes] = {}
    for exact, table, rows in _list_tables(found):
        if table.rows:
            files |= {f"{table.name}.csv": formats.to_csv(exact).encode(), **_render_readable(table, rows)}
    return files


def _list_tables(found: ReportFindings) -> Iterable[tuple[pd.DataFrame, TextTable, int]]:
    """Yield what is exact, what is for readers, and how many rows the latter would have."""
    answers, points = found.best[:MOST_ROWS], sum(len(curve.points) for curve in found.curves)
    yield found.table, tables.build_runs_table(found.rows[:MOST_ROWS]), len(found.rows)
    yield (
        found.summary,
        tables.build_configurations_table(found.list_configurations(MOST_ROWS)),
        len(found.summary),
    )
    yield (
        best.as_table(found.best),
        tables.build_best_table(answers, describe_answers(answers), found.rows),
        len(found.best),
    )
    yield curves.build_curve_table(list(found.curves)), tables.build_scaling_table(found.curves), points
    met = tables.build_crossovers_table(found.crossovers)
    yield crossover.build_crossover_table(list(found.crossovers)), met, len(met.rows)


def _render_readable(table: TextTable, all_rows: int) -> dict[str, bytes]:
    rows = [[cell.full for cell in row] for row in table.rows[:MOST_ROWS]]
    head, right = [heading.text for heading in table.head], [heading.number for heading in table.head]
    more = all_rows - len(rows)
    said = f"{more:,} more rows stand in {table.name}.csv." if more else ""
    markdown, latex = format_markdown_table(head, rows, right), to_latex(head, rows, right)
    return {
        f"{table.name}.md": f"{markdown}\n{said}\n".encode() if more else markdown.encode(),
        f"{table.name}.tex": f"% {said}\n{latex}".encode() if more else latex.encode(),
    }


def _judge_claims(results: Results) -> list[ClaimFinding]:
    """Return what becomes of the study's claims with models of its family; others would only seem to answer them."""
    families = {spec.model.name: spec.model.family for spec in results.specs.values()}
    of_study = [finding for finding in find_findings(results) if finding.claim.source == STUDY]
    return [finding for finding in of_study if families[finding.model] == _CLAIMED_FAMILY]


def _replace_files(out: Path, files: dict[str, bytes]) -> None:
    """Write all files aside, then move each into its place: a full disk leaves the older report as it was."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as aside:
        for name, content in files.items():
            path = Path(aside, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        for name in files:
            (out / name).parent.mkdir(exist_ok=True)
            Path(aside, name).replace(out / name)
