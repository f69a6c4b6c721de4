"""The page of the report: what the template shows, in plain values. Text from records is escaped by the template."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from analysis.columns import columns
from analysis.flags import FLAGS
from analysis.questions import choice, ranks
from analysis.report import sheets
from analysis.report.analogue import HEAD, Analogue
from analysis.report.asked import asked
from analysis.report.charts import Page, key_of
from analysis.report.details import details
from analysis.report.doubts import doubts
from analysis.report.evidence import Evidence, reasons
from analysis.report.facets import Facet, facets, place
from analysis.report.findings import Findings
from analysis.report.headline import told, winners
from analysis.report.interactive import charts
from analysis.report.sheets import Cell, Sheet
from analysis.report.shown import MOST_ROWS, failures, runs_shown
from analysis.summary import Row
from analysis.table import plain

MOST_SENTENCES = 6
"""Questions that are answered in words, one by one; the answers to more are a table."""


class Drawn(NamedTuple):
    """A figure for print: its SVG as an element of the page, empty for a large one, and its files by format."""

    name: str
    title: str
    svg: str
    files: dict[str, str]


class Shown(NamedTuple):
    """A row of a table of the page: where it stands among the facets, and which details it opens, if any."""

    facets: str
    cells: tuple[Cell, ...]
    opens: str = ""


class Table(NamedTuple):
    """A table of the page; `left_out` says what only the files hold."""

    sheet: Sheet
    rows: tuple[Shown, ...]
    left_out: str


def page(found: Findings, claims: Analogue | None, drawn: Sequence[Drawn], left: Mapping[int, Evidence]) -> str:
    """Return the whole report as HTML; `left` is the evidence of runs, by their place in the run table."""
    among = facets(found.rows)
    return _template().render(
        **_summary(found, among, left),
        claims=claims,
        claims_head=HEAD,
        facets=among,
        **_explored(found, among, left),
        drawn=[figure._replace(svg=Markup(figure.svg)) for figure in drawn],
        **_failures(found, among, left),
        origin=found.origin,
        flags=[(flag, FLAGS[flag].meaning, count) for flag, count in _raised(found.rows).items()],
        columns=columns().values(),
    )


def _summary(found: Findings, among: Sequence[Facet], left: Mapping[int, Evidence]) -> dict[str, Any]:
    """Return what is said first: what was asked, the answer, how sure."""
    answers = told(found.best)
    few = len(answers) <= MOST_SENTENCES
    asking = [place(one.question, among) for one in found.best]
    return {
        "studies": sorted({row["study"] for row in found.rows}),
        "questions": found.asked,
        "measured": _measured(left.values()) if len(left) == len(found.rows) else (),
        "asked": asked(found.rows),
        "answers": answers if few else [],
        "best": None if few else _table(sheets.best(answers, found.rows), asking, len(answers)),
        "winners": winners(found.best),
        "doubts": doubts(found.results, found.best, found.drifts, found.origin),
    }


def _explored(found: Findings, among: Sequence[Facet], left: Mapping[int, Evidence]) -> dict[str, Any]:
    """Return what can be narrowed: interactive figures, tables, and the runs behind their points and rows."""
    places, configurations = runs_shown(found.rows), plain(found.summary[:MOST_ROWS])
    runs, evidence = [found.rows[one] for one in places], [left[one] for one in places]
    points = Page(among, {key_of(row): index for index, row in enumerate(configurations)})
    interactive = charts(found.summary[:MOST_ROWS], found.curves, points)
    return {
        "charts": interactive,
        "plotly": Markup(_plotly()) if interactive else "",
        "tables": [table for table in _tables(found, runs, configurations, among) if table.rows],
        "data": {"charts": [one._asdict() for one in interactive], **details(configurations, runs, evidence)},
    }


def _measured(left: Iterable[Evidence]) -> tuple[str, ...]:
    """Return the first and the last day of the runs, one if they are the same."""
    started = sorted(one.record.circumstance.started_at[:10] for one in left if one.record)
    known = [day for day in started if day]
    return tuple(dict.fromkeys((known[0], known[-1]))) if known else ()


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _plotly() -> str:
    """Return plotly.js, of which the page holds a copy."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _tables(
    found: Findings, runs: Sequence[Row], configurations: Sequence[Row], among: Sequence[Facet]
) -> Iterable[Table]:
    scaled = [point.row for curve in found.curves for point in curve.points]
    yield _table(sheets.scaling(found.curves), [place(row, among) for row in scaled], len(scaled))
    fitted = [curve.points[0].row for curve in found.curves if curve.fit]
    yield _table(sheets.law(found.curves), [place(row, among) for row in fitted], len(fitted))
    met = [row for one in found.crossovers if (row := one.any_row)]
    yield _table(sheets.crossovers(found.crossovers), [place(row, among) for row in met], len(met))
    for sheet, rows, all_rows in (
        (sheets.configurations(configurations), configurations, len(found.summary)),
        (sheets.runs(runs), runs, len(found.rows)),
    ):
        yield _table(sheet, [place(row, among) for row in rows], all_rows, opens=sheet.name)


def _table(sheet: Sheet, places: Sequence[str], all_rows: int, opens: str = "") -> Table:
    rows = zip(places[:MOST_ROWS], sheet.rows[:MOST_ROWS], strict=True)
    told = f"{MOST_ROWS:,} of {all_rows:,} rows; the CSV has all." if all_rows > MOST_ROWS else ""
    named = [Shown(facets, cells, f"{opens} {index}" if opens else "") for index, (facets, cells) in enumerate(rows)]
    return Table(sheet, tuple(named), told)


def _failures(found: Findings, among: Sequence[Facet], left: Mapping[int, Evidence]) -> dict[str, Any]:
    """Return the runs that did not end ok, each with the evidence that decided it, and what is no run at all."""
    return {
        "failures": [_failure(found.rows[one], left[one], among) for one in failures(found.rows)],
        "failed": sum(row["outcome"] != "ok" for row in found.rows),
        "skipped": found.results.skipped,
        "unfinished": found.results.unfinished,
        "read": len(found.rows) + len(found.results.skipped),
    }


def _failure(row: Row, left: Evidence, among: Sequence[Facet]) -> dict[str, Any]:
    return {
        "row": row,
        "title": f"{row['model']}: {choice(row | {'variant': ''})}, {ranks(row)}",
        "folder": left.folder,
        "facets": place(row, among),
        "evidence": reasons(left.record) if left.record else [],
    }


def _raised(rows: Sequence[Row]) -> dict[str, int]:
    counts = Counter(flag for row in rows for flag in row["flags"].split())
    return {flag: counts[flag] for flag in FLAGS if counts[flag]}
