"""The page of the report: what the template shows, in plain values. Text from records is escaped by the template."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from analysis.columns import list_columns
from analysis.drawing import Picture
from analysis.drawing.svg import Describe, render_key, render_panel
from analysis.figures import list_figures
from analysis.flags import FLAGS, NOTES, Flag
from analysis.formats import load_template
from analysis.questions import describe_choice, describe_protocol, format_ranks
from analysis.report import tables
from analysis.report.analogue import HEAD, Analogue
from analysis.report.caveats import list_caveats
from analysis.report.contents import (
    MOST_ROWS,
    Facet,
    PageTable,
    build_details,
    build_page_table,
    build_row_key,
    find_facets,
    find_place,
    select_failures,
    select_runs,
)
from analysis.report.evidence import Evidence, list_reasons
from analysis.report.findings import ReportFindings
from analysis.report.texts import describe_answers, describe_setup, describe_winners, format_hover
from analysis.summary import Row

FIRST = "answers"
"""The figure that stands above everything else."""

MOST_SENTENCES = 6
"""Questions that are answered in words, one by one; the answers to more are a table."""

MOST_STUDIES = 3
"""That the title names."""


class PagePanel(NamedTuple):
    """A panel as elements of the page: one, or another for a narrow screen besides."""

    title: str
    svgs: tuple[Markup, ...]
    wide: bool


class PageFigure(NamedTuple):
    """A figure as the page shows it; `keys` are the label and the sign of each series, panels stand by `rows`."""

    name: str
    title: str
    note: str
    keys: tuple[tuple[str, Markup], ...]
    rows: tuple[tuple[PagePanel, ...], ...]

    @property
    def span(self) -> int:
        """Columns of the page that it takes, at most three."""
        panels = [panel for row in self.rows for panel in row]
        return 3 if any(panel.wide for panel in panels) else min(3, max(map(len, self.rows)))


def render_page(
    found: ReportFindings,
    claims: Analogue | None,
    left: Mapping[int, Evidence],
    follow: Callable[[str, float | None], None] = lambda what, share: None,
) -> str:
    """Return the whole report as HTML; `left` is the evidence of runs, by their place in the run table."""
    page_facets, configurations = find_facets(found.rows), found.list_configurations(MOST_ROWS)
    places = select_runs(found.rows)
    runs, evidence = [found.rows[one] for one in places], [left[one] for one in places]
    details = build_details(configurations, runs, evidence)
    tips = Tips(configurations)
    drawn, listed = [], list_figures()
    for number, figure in enumerate(listed):
        follow(f"figures, {number} of {len(listed)}", number / len(listed))
        if (picture := figure.build(found.results)).panels:
            drawn.append(render_figure(figure.name, figure.title, figure.alt, picture, tips))
    follow("the page", None)
    shown = _build_tables(found, runs, configurations, page_facets)
    return load_template("analysis.report", "report.html.j2").render(
        **_build_summary(found, page_facets, left),
        glance=[figure for figure in drawn if figure.name == FIRST],
        figures=[figure for figure in drawn if figure.name != FIRST],
        claims=claims,
        claims_head=HEAD,
        facets=page_facets,
        tables=[table for table in shown if table.groups],
        **_build_failures(found, page_facets, left),
        origin=found.origin,
        flags=_count("flags", FLAGS, found.rows),
        notes=_count("notes", NOTES, found.rows),
        columns=list_columns().values(),
        data={**details, "tips": list(tips.texts)},
    )


class Tips:
    """The words behind the points of a page, each once, and which of its configurations a point opens."""

    def __init__(self, configurations: Sequence[Row] = ()) -> None:
        self.texts: dict[str, int] = {}
        self._known = {build_row_key(row): place for place, row in enumerate(configurations)}

    def __call__(self, tip: Row | str) -> str:
        """Return the attributes of a point."""
        text = tip if isinstance(tip, str) else format_hover(tip)
        place = None if isinstance(tip, str) else self._known.get(build_row_key(tip))
        opens = "" if place is None else f' data-c="{place}"'
        return f'data-t="{self.texts.setdefault(text, len(self.texts))}"{opens}'


def render_figure(name: str, title: str, alt: str, picture: Picture, describe: Describe) -> PageFigure:
    """Return a figure as the page shows it: panels of a group in rows of their own."""
    rows: dict[str, list[PagePanel]] = {}
    halved = max(Counter(panel.group for panel in picture.panels).values()) == 2
    for place, panel in enumerate(picture.panels):
        heading = " · ".join(panel.title)
        words = ". ".join(dict.fromkeys(filter(None, (title, heading, alt))))
        svgs = render_panel(f"{name}-{place}", panel, words, describe, halved=halved)
        rows.setdefault(panel.group, []).append(PagePanel(heading, tuple(map(Markup, svgs)), panel.wide))
    keys = tuple((key.label, Markup(render_key(key, name))) for key in picture.keys)
    return PageFigure(name, title, picture.note, keys, tuple(map(tuple, rows.values())))


def _build_summary(found: ReportFindings, page_facets: Sequence[Facet], left: Mapping[int, Evidence]) -> dict[str, Any]:
    """Return what is said first: what was asked, the answer, how sure."""
    studies = sorted({row["study"] for row in found.rows})
    answers = describe_answers(found.best)
    few = len(answers) <= MOST_SENTENCES
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
        else build_page_table(tables.build_best_table(found.best, answers, found.rows), asking, len(answers)),
        "winners": describe_winners(found.best),
        "doubts": list_caveats(found.results, found.best, found.drifts, found.origin),
    }


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return names for a title: of too many the first, and how many there are besides."""
    if len(names) <= MOST_STUDIES:
        return list(names)
    return [*names[: MOST_STUDIES - 1], f"{names[MOST_STUDIES - 1]} and {len(names) - MOST_STUDIES} more"]


def _find_measured_days(left: Iterable[Evidence]) -> tuple[str, ...]:
    """Return the first and the last day of the runs, one if they are the same."""
    started = sorted(one.record.circumstance.started_at[:10] for one in left if one.record)
    known = [day for day in started if day]
    return tuple(dict.fromkeys((known[0], known[-1]))) if known else ()


def _build_tables(
    found: ReportFindings, runs: Sequence[Row], configurations: Sequence[Row], page_facets: Sequence[Facet]
) -> Iterable[PageTable]:
    scaled = [point.row for curve in found.curves for point in curve.points]
    yield build_page_table(
        tables.build_scaling_table(found.curves), [find_place(row, page_facets) for row in scaled], len(scaled)
    )
    met = [row for one in found.crossovers if (row := one.any_row)]
    yield build_page_table(
        tables.build_crossovers_table(found.crossovers), [find_place(row, page_facets) for row in met], len(met)
    )
    for content, rows, all_rows in (
        (tables.build_configurations_table(configurations), configurations, len(found.summary)),
        (tables.build_runs_table(runs), runs, len(found.rows)),
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
