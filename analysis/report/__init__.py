"""The report: `report.html`, one page that opens without a network, with its tables and figures as files beside it."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from analysis import figures
from analysis.claims import ClaimFinding
from analysis.claims.findings import find_findings
from analysis.claims.sources import STUDY
from analysis.report import files as tables_beside
from analysis.report.analogue import build_analogue, render_claim_tables
from analysis.report.evidence import read_evidence
from analysis.report.findings import ReportFindings, compute_findings
from analysis.report.limits import select_failures, select_runs
from analysis.report.page import PrintFigure, render_page
from analysis.results import Results
from bench.errors import UserError

Follow = Callable[[str, float | None], None]
"""What hears what is under way, and what share of it is done, between 0 and 1; None where nobody knows."""

PAGE = "report.html"
_CLAIMED_FAMILY = "t5"  # of the models that the study of the claims trained
_INLINE_BYTES = 300_000  # a larger drawing makes the page slow, and stands beside it all the same


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
    files = tables_beside.render_tables(found) | render_claim_tables(judged, section)
    drawn = []
    follow("figures", 0.0)
    for picture, rendered in figures.render_pictures(found.results, follow):
        names = {form: f"figures/{picture.name}.{form}" for form in rendered}
        files |= {names[form]: content for form, content in rendered.items()}
        small = len(rendered["svg"]) <= _INLINE_BYTES
        svg = figures.inline_svg(picture.name, rendered["svg"], picture.alt) if small else ""
        drawn.append(PrintFigure(picture.name, picture.title, svg, names))
    follow("the page", None)
    left = {
        place: read_evidence(found.results, place) for place in {*select_runs(found.rows), *select_failures(found.rows)}
    }
    return files | {PAGE: render_page(found, section, drawn, left).encode()}


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
