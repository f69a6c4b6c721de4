"""The report: `report.html`, one page that opens without a network, with its tables and figures as files beside it."""

import tempfile
from pathlib import Path

from analysis import claims, figures, formats
from analysis.reading import Reading
from analysis.report.analogue import analogue, tables
from analysis.report.page import Drawn, page
from analysis.results import of_verdicts
from analysis.verify import verify
from bench.errors import UserError

PAGE = "report.html"


def write(found: Reading, out: Path) -> Path:
    """Write the report of what was read into the folder `out`, and return the page's path.

    Equal records give equal files. An older report there is replaced, file by file, each whole; nothing else in the
    folder is touched. Raises UserError where there is no record, or the folder cannot be written.
    """
    if not found.records:
        raise UserError("", "no record to report", "give a results folder, e.g. results/runs/smoke")
    files = contents(found)
    try:
        _replace(out, files)
    except OSError as error:
        raise UserError(str(out), f"cannot be written ({error.strerror})", "choose another --out") from error
    return out / PAGE


def contents(found: Reading) -> dict[str, bytes]:
    """Return every file of the report by its path, the page last."""
    verdicts = verify(list(found.records.values()))
    results = of_verdicts(verdicts, found)
    judged = claims.findings(results.summary, results.specs)
    notes = {record.circumstance.machine.name: record.circumstance.machine.note for record in found.records.values()}
    section = analogue(judged, notes)
    files = {"runs.csv": formats.to_csv(results.table).encode(), "runs.md": formats.to_markdown(results.table).encode()}
    files |= tables(judged, section)
    drawn = []
    for picture in figures.pictures():
        rendered = figures.render(picture, results)
        names = {form: f"figures/{picture.name}.{form}" for form in rendered}
        files |= {names[form]: content for form, content in rendered.items()}
        drawn.append(Drawn(picture.title, figures.inline(picture.name, rendered["svg"], picture.alt), names))
    return files | {PAGE: page(found, verdicts, results.table, results.summary, section, drawn).encode()}


def _replace(out: Path, files: dict[str, bytes]) -> None:
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
