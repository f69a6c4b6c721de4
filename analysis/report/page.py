"""The report's page. It passes plain values to the template, and the template escapes texts from records."""

import base64
import gzip
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from analysis.answer import describe_answer
from analysis.columns import list_columns
from analysis.drawing import Picture
from analysis.drawing.svg import Describe, render_key, render_panel
from analysis.figures import list_figures, skipping
from analysis.flags import FLAGS, NOTES, Flag
from analysis.formats import load_template
from analysis.questions import describe_choice, describe_protocol, format_ranks
from analysis.report import tables
from analysis.report.analogue import HEAD, Analogue
from analysis.report.caveats import list_caveats, list_unfinished_sweeps
from analysis.report.contents import (
    MOST_ROWS,
    Evidence,
    Facet,
    PageTable,
    build_details,
    build_page_table,
    build_row_key,
    find_facets,
    find_place,
    list_reasons,
    select_failures,
    select_runs,
)
from analysis.report.findings import ReportFindings
from analysis.report.texts import describe_setup, format_hover
from analysis.scaling.best import rank_losses
from analysis.summary import Row

FIRST = "answers"
"""Name of the figure that stands directly below the answer."""
MOST_STUDIES = 3
"""Most studies that the title names."""
_SHOWN = 6  # panels that the page shows at once of a figure with many panels
_STYLE = re.compile(r' style="((?!url|[^"]*url\()[^"]*)"')


class PagePanel(NamedTuple):
    """A panel of a figure on the page, as one or two SVG elements: for wide screens and for narrow screens."""

    title: str
    svgs: tuple[Markup, ...]
    wide: bool


class PageFigure(NamedTuple):
    """A figure on the page. `keys` are label and symbol of each legend entry. `rows` are its panels, row by row.

    The first `shown` rows are part of the page's HTML. The page's script adds the other rows when they are opened.
    """

    name: str
    title: str
    note: str
    keys: tuple[tuple[str, Markup], ...]
    rows: tuple[tuple[PagePanel, ...], ...]
    shown: int

    @property
    def span(self) -> int:
        """Number of grid columns of the page that the figure takes, at most three."""
        panels = [panel for row in self.rows for panel in row]
        return 3 if any(panel.wide for panel in panels) else min(3, max(map(len, self.rows)))

    @property
    def folded(self) -> int:
        """Number of panels that the page's script adds when a reader opens the rest of the figure."""
        return sum(map(len, self.rows[self.shown :]))


def render_page(
    found: ReportFindings,
    claims: Analogue | None,
    evidence: Mapping[int, Evidence],
    follow: Callable[[str, float | None], None] = lambda what, share: None,
) -> str:
    """Return the whole report as HTML.

    `claims` is the section on published claims; None if the page has no such section. `evidence` maps row indices of
    the run table to record and log of the run. `follow` is the progress callback: it gets the name of the current task
    and the finished fraction, which is None if unknown.
    """
    page_facets, configurations = find_facets(found.rows), found.list_configurations(MOST_ROWS)
    places = select_runs(found.rows)
    runs, of_runs = [found.rows[one] for one in places], [evidence[one] for one in places]
    # Details and tooltips refer to rows by their index on the page, so they use the same lists as the tables.
    details = build_details(configurations, runs, of_runs, found.results.configuration_ids)
    tips = Tips(configurations)
    drawn, listed, styles = [], list_figures(), SharedStyles()
    # Figures take most of the time, so progress is counted in figures.
    for number, figure in enumerate(listed):
        follow(f"figures, {number} of {len(listed)}", number / len(listed))
        with skipping(figure):
            if (picture := figure.build(found.results)).panels:
                alt = f"{figure.alt} The tables hold the numbers."
                drawn.append(render_figure(figure.name, figure.title, alt, picture, tips, styles))
    follow("the page", None)
    shown = [table for table in _build_tables(found, runs, configurations, page_facets) if table.groups]
    folds = draw_folds(drawn)
    if claims:
        folds["claims"] = _render_macro("table.html.j2", "list_comparisons", HEAD, claims.comparisons)
    return load_template("analysis.report", "report.html.j2").render(
        **_build_summary(found, page_facets, evidence),
        glance=[figure for figure in drawn if figure.name == FIRST],
        figures=[figure for figure in drawn if figure.name != FIRST],
        claims=claims,
        facets=page_facets,
        tables=shown,
        ran_once=_ran_once(found),
        **_build_failures(found, page_facets, evidence),
        origin=found.origin,
        flags=_count("flags", FLAGS, found.rows),
        notes=_count("notes", NOTES, found.rows),
        columns=list_columns().values(),
        styles=styles.build_rules(),
        data=pack({**details, "tips": list(tips.texts), "folds": folds}),
    )


def _render_macro(template: str, macro: str, *values: Any) -> str:
    return str(getattr(load_template("analysis.report", template).module, macro)(*values))


def draw_folds(figures: Iterable[PageFigure]) -> dict[str, str]:
    """Return the HTML of the panels that the page's script adds later, as one text per figure, by name of the
    figure."""
    folded = {figure.name: figure.rows[figure.shown :] for figure in figures if figure.folded}
    return {name: _render_macro("figures.html.j2", "draw_rows", rows) for name, rows in folded.items()}


def pack(data: Mapping[str, Any]) -> str:
    """Return the page's data as JSON, compressed by gzip and written in base64. The text has no character that could
    end the script element in which the page stores it."""
    # mtime=0, so that equal records give equal pages
    return base64.b64encode(gzip.compress(json.dumps(data).encode(), mtime=0)).decode()


class SharedStyles:
    """CSS classes that replace the style attributes of the SVG elements of a page, so that each style is stored
    once."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def __call__(self, svg: str) -> str:
        """Return an SVG element whose style attributes are replaced by classes. Styles that refer to an id of the
        element stay."""
        return _STYLE.sub(lambda style: f' class="{self._name(style[1])}"', svg)

    def _name(self, style: str) -> str:
        return self._classes.setdefault(style, f"s{len(self._classes)}")

    def build_rules(self) -> Markup:
        """Return the CSS rules for the class names that replace repeated styles on the page."""
        return Markup("\n".join(f".{name} {{ {style} }}" for style, name in self._classes.items()))


class Tips:
    """Tooltips of the points in the figures of a page. Each distinct text is stored once.

    A point may also refer to one of `configurations`. In this case a click on the point opens the details of that
    configuration.
    """

    def __init__(self, configurations: Sequence[Row] = ()) -> None:
        self.texts: dict[str, int] = {}
        self._known = {build_row_key(row): place for place, row in enumerate(configurations)}

    def __call__(self, tip: Row | str) -> str:
        """Return the HTML attributes of a point: the index of its tooltip and, if known, the index of the configuration
        that a click opens."""
        text, place = (tip, None) if isinstance(tip, str) else (format_hover(tip), self._known.get(build_row_key(tip)))
        opens = "" if place is None else f' data-c="{place}"'
        return f'data-t="{self.texts.setdefault(text, len(self.texts))}"{opens}'


def render_figure(
    name: str, title: str, alt: str, picture: Picture, describe: Describe, share: Callable[[str], str] = str
) -> PageFigure:
    """Return a figure for the page. Each group of panels begins a new row of the figure. `alt` describes the figure for
    screen readers, and `describe` returns the HTML attributes of a point, such as its tooltip. `share` replaces the
    style attributes of an SVG element by classes."""
    rows: dict[str, list[PagePanel]] = {}
    # Two panels in a row take half the page each. They are drawn wider than panels of a row of three.
    halved = max(Counter(panel.group for panel in picture.panels).values()) == 2
    for place, panel in enumerate(picture.panels):
        heading = " · ".join(panel.title)
        words = ". ".join(dict.fromkeys(filter(None, (title, heading, alt))))
        svgs = render_panel(f"{name}-{place}", panel, words, describe, halved=halved)
        shown = tuple(Markup(share(svg)) for svg in svgs)
        rows.setdefault(panel.group, []).append(PagePanel(heading, shown, panel.wide))
    keys = tuple((key.label, Markup(render_key(key, name))) for key in picture.keys)
    # A few more panels than `_SHOWN` are not worth a click.
    most = _SHOWN if len(picture.panels) > 1.5 * _SHOWN else len(picture.panels)
    pieces = [tuple(row[start : start + most]) for row in rows.values() for start in range(0, len(row), most)]
    shown_rows = sum(end <= most for end in itertools.accumulate(map(len, pieces)))
    return PageFigure(name, title, picture.note, keys, tuple(pieces), shown_rows)


def _build_summary(
    found: ReportFindings, page_facets: Sequence[Facet], evidence: Mapping[int, Evidence]
) -> dict[str, Any]:
    """Return the values that the template needs for the first sections: the answer, the certainty of the answer, and
    the settings of the runs. `page_facets` are the filters of the page. `evidence` maps row indices of the run table to
    the record and log of the run."""
    studies = sorted({row["study"] for row in found.rows})
    asking = [[{"flags": ""} | (one.fastest or {}) | one.question] for one in found.answers]
    best = tables.build_best_table(found.answers, found.rows)
    days = sorted(day for one in evidence.values() if one.record and (day := one.record.circumstance.started_at[:10]))
    return {
        "title": title_page(studies, found.questions),
        "all_studies": studies if len(studies) > MOST_STUDIES else [],
        "questions": found.questions,
        # In a large set, records are read for some of the runs only, so the dates of all runs are unknown.
        "measured": dict.fromkeys((days[0], days[-1])) if days and len(evidence) == len(found.rows) else (),
        "asked": describe_setup(found.rows, found.results.configurations, len(found.summary)),
        "protocol": describe_protocol(found.results.specs.values()),
        "answer": [*describe_answer(found.results), *list_unfinished_sweeps(found.results)],
        "learned": bool(rank_losses(found.results)),
        "best": build_page_table(best, asking, page_facets, len(asking)),
        "doubts": list_caveats(found),
        "any_ok": any(row["outcome"] == "ok" for row in found.rows),
    }


def title_page(studies: Sequence[str], questions: Sequence[str]) -> str:
    """Return the title of the page. The title lists the names of the studies. If all studies have the same question,
    the question follows. A list of more than MOST_STUDIES names is cut and ends in "and N more"."""
    omitted = len(studies) - MOST_STUDIES
    names = ", ".join(studies[:MOST_STUDIES]) + f" and {omitted} more" * (omitted > 0)
    return f"{names}: {questions[0]}" if len(questions) == 1 else names


def _ran_once(found: ReportFindings) -> bool:
    """Return True if every configuration has a single run. A table of runs is then not needed, because it would repeat
    the table of configurations."""
    return len(found.rows) == len(found.summary)


def _build_tables(
    found: ReportFindings, runs: Sequence[Row], configurations: Sequence[Row], page_facets: Sequence[Facet]
) -> Iterator[PageTable]:
    scaled = [[point.row] for curve in found.curves for point in curve.points]
    yield build_page_table(tables.build_scaling_table(found.curves), scaled, page_facets, len(scaled))
    met = [rows for one in found.crossovers if (rows := one.rows)]
    yield build_page_table(tables.build_crossovers_table(found.crossovers), met, page_facets, len(met))
    content = tables.build_configurations_table(configurations)
    yield build_page_table(content, [[row] for row in configurations], page_facets, len(found.summary), opens=True)
    if not _ran_once(found):
        content = tables.build_runs_table(runs)
        yield build_page_table(content, [[row] for row in runs], page_facets, len(found.rows), opens=True)


def _build_failures(
    found: ReportFindings, page_facets: Sequence[Facet], evidence: Mapping[int, Evidence]
) -> dict[str, Any]:
    """Return the values that the template needs for the section on failures: runs that did not end ok, with their
    records and logs, and files that are not records. `page_facets` are the filters of the page. `evidence` maps row
    indices of the run table to the record and log of the run."""
    failures = []
    for place in select_failures(found.rows):
        row, record = found.rows[place], evidence[place].record
        failures.append({
            "row": row,
            "title": f"{row['model']}: {describe_choice(row | {'variant': ''})}, {format_ranks(row)}",
            "folder": evidence[place].folder,
            "facets": find_place([row], page_facets),
            "evidence": list_reasons(record) if record else [],
        })  # fmt: skip
    return {
        "failures": failures,
        "failed": sum(row["outcome"] != "ok" for row in found.rows),
        "skipped": found.results.skipped,
        "unfinished": found.results.unfinished,
        "read": len(found.rows) + len(found.results.skipped),
    }


def _count(column: str, known: Mapping[str, Flag], rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Return each flag (or note) in a column of flags (or notes), with its meaning and the number of runs that have it,
    in the order of `known`."""
    counts = Counter(name for row in rows for name in row[column].split())
    return [(name, flag.meaning, counts[name]) for name, flag in known.items() if counts[name]]
