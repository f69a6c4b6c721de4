"""The page of the report: what the template shows, in plain values. Text from records is escaped by the template."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from analysis import figures
from analysis.charts.answers import build_answer_chart
from analysis.charts.scatter import ScatterChart
from analysis.columns import list_columns
from analysis.flags import FLAGS, NOTES, Flag
from analysis.formats import load_template
from analysis.questions import describe_choice, format_ranks
from analysis.report import summary_tables
from analysis.report.analogue import HEAD, Analogue
from analysis.report.caveats import list_caveats
from analysis.report.charts import Page, PageChart, build_row_key, render_chart
from analysis.report.details import build_details
from analysis.report.evidence import Evidence, list_reasons
from analysis.report.facets import Facet, find_facets, find_place
from analysis.report.findings import ReportFindings
from analysis.report.glance import render_glance
from analysis.report.headline import describe_answers, describe_winners
from analysis.report.limits import MOST_ROWS, select_failures, select_runs
from analysis.report.page_tables import PageTable, build_page_table
from analysis.report.scatter import render_scatter
from analysis.report.setup import describe_setup
from analysis.summary import Row
from analysis.variants import describe_protocol

MOST_SENTENCES = 6
"""Questions that are answered in words, one by one; the answers to more are a table."""

MOST_STUDIES = 3
"""That the title names."""


class PrintFigure(NamedTuple):
    """A figure for print: its SVG as an element of the page, empty for a large one, and its files by format."""

    name: str
    title: str
    svg: str
    files: dict[str, str]


def render_page(
    found: ReportFindings, claims: Analogue | None, drawn: Sequence[PrintFigure], left: Mapping[int, Evidence]
) -> str:
    """Return the whole report as HTML; `left` is the evidence of runs, by their place in the run table."""
    page_facets = find_facets(found.rows)
    return load_template("analysis.report", "report.html.j2").render(
        **_build_summary(found, page_facets, left),
        claims=claims,
        claims_head=HEAD,
        facets=page_facets,
        **_build_interactive_part(found, page_facets, left),
        drawn=[figure._replace(svg=Markup(figure.svg)) for figure in drawn],
        **_build_failures(found, page_facets, left),
        origin=found.origin,
        flags=_count("flags", FLAGS, found.rows),
        notes=_count("notes", NOTES, found.rows),
        columns=list_columns().values(),
    )


def _build_summary(found: ReportFindings, page_facets: Sequence[Facet], left: Mapping[int, Evidence]) -> dict[str, Any]:
    """Return what is said first: what was asked, the answer, how sure."""
    studies = sorted({row["study"] for row in found.rows})
    answers = describe_answers(found.best)
    few = len(answers) <= MOST_SENTENCES
    glance = build_answer_chart(found.best)
    asking = [find_place(one.question, page_facets) for one in found.best]
    return {
        "studies": shorten_names(studies),
        "all_studies": studies if len(studies) > MOST_STUDIES else [],
        "questions": found.questions,
        "measured": _find_measured_days(left.values()) if len(left) == len(found.rows) else (),
        "asked": describe_setup(found.rows),
        "protocol": describe_protocol(found.results.specs.values()),
        "answers": answers if few else [],
        "best": None
        if few
        else build_page_table(summary_tables.build_best_table(found.best, answers, found.rows), asking, len(answers)),
        "winners": describe_winners(found.best),
        "glance": render_glance(glance) if glance else [],
        "glance_note": glance.note if glance else "",
        "doubts": list_caveats(found.results, found.best, found.drifts, found.origin),
    }


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return names for a title: of too many the first, and how many there are besides."""
    if len(names) <= MOST_STUDIES:
        return list(names)
    return [*names[: MOST_STUDIES - 1], f"{names[MOST_STUDIES - 1]} and {len(names) - MOST_STUDIES} more"]


def _build_interactive_part(
    found: ReportFindings, page_facets: Sequence[Facet], left: Mapping[int, Evidence]
) -> dict[str, Any]:
    """Return what can be narrowed: interactive figures, tables, and the runs behind their points and rows."""
    places, configurations = select_runs(found.rows), found.list_configurations(MOST_ROWS)
    runs, evidence = [found.rows[one] for one in places], [left[one] for one in places]
    points = Page(page_facets, {build_row_key(row): index for index, row in enumerate(configurations)})
    interactive = _render_charts(found, points)
    return {
        "charts": interactive,
        "on_page": [*(one.name for one in interactive), "answers"],
        "plotly": Markup(_read_plotly()) if interactive else "",
        "tables": [table for table in _build_tables(found, runs, configurations, page_facets) if table.groups],
        "data": {"charts": [one._asdict() for one in interactive], **build_details(configurations, runs, evidence)},
    }


def _render_charts(found: ReportFindings, page: Page) -> list[PageChart]:
    """Return the interactive figures in which there is something to see."""
    charted = ((one, one.chart(found.results)) for one in figures.list_pictures(found.results) if one.chart)
    rendered = [
        render_scatter(one.name, one.title, chart)
        if isinstance(chart, ScatterChart)
        else render_chart(one.name, one.title, chart, page)
        for one, chart in charted
    ]
    return [one for one in rendered if one.panels]


def _find_measured_days(left: Iterable[Evidence]) -> tuple[str, ...]:
    """Return the first and the last day of the runs, one if they are the same."""
    started = sorted(one.record.circumstance.started_at[:10] for one in left if one.record)
    known = [day for day in started if day]
    return tuple(dict.fromkeys((known[0], known[-1]))) if known else ()


def _read_plotly() -> str:
    """Return plotly.js, of which the page holds a copy."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _build_tables(
    found: ReportFindings, runs: Sequence[Row], configurations: Sequence[Row], page_facets: Sequence[Facet]
) -> Iterable[PageTable]:
    scaled = [point.row for curve in found.curves for point in curve.points]
    yield build_page_table(
        summary_tables.build_scaling_table(found.curves), [find_place(row, page_facets) for row in scaled], len(scaled)
    )
    met = [row for one in found.crossovers if (row := one.any_row)]
    yield build_page_table(
        summary_tables.build_crossovers_table(found.crossovers), [find_place(row, page_facets) for row in met], len(met)
    )
    for content, rows, all_rows in (
        (summary_tables.build_configurations_table(configurations), configurations, len(found.summary)),
        (summary_tables.build_runs_table(runs), runs, len(found.rows)),
    ):
        yield build_page_table(content, [find_place(row, page_facets) for row in rows], all_rows, opens=content.name)


def _build_failures(
    found: ReportFindings, page_facets: Sequence[Facet], left: Mapping[int, Evidence]
) -> dict[str, Any]:
    """Return the runs that did not end ok, each with the evidence that decided it, and what is no run at all."""
    return {
        "failures": [_build_failure(found.rows[one], left[one], page_facets) for one in select_failures(found.rows)],
        "failed": sum(row["outcome"] != "ok" for row in found.rows),
        "skipped": found.results.skipped,
        "unfinished": found.results.unfinished,
        "read": len(found.rows) + len(found.results.skipped),
    }


def _build_failure(row: Row, left: Evidence, page_facets: Sequence[Facet]) -> dict[str, Any]:
    return {
        "row": row,
        "title": f"{row['model']}: {describe_choice(row | {'variant': ''})}, {format_ranks(row)}",
        "folder": left.folder,
        "facets": find_place(row, page_facets),
        "evidence": list_reasons(left.record) if left.record else [],
    }


def _count(column: str, known: Mapping[str, Flag], rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Return the names in a column with their meaning and how many runs have them, in the order of `known`."""
    counts = Counter(name for row in rows for name in row[column].split())
    return [(name, flag.meaning, counts[name]) for name, flag in known.items() if counts[name]]
