"""The tables beside the page: exact as CSV, and for readers as Markdown and LaTeX."""

from collections.abc import Iterable

import pandas as pd

from analysis import formats
from analysis.formats import format_markdown_table, to_latex
from analysis.report import summary_tables
from analysis.report.findings import ReportFindings
from analysis.report.headline import describe_answers
from analysis.report.summary_tables import TextTable
from analysis.scaling import best, crossover, curves

MOST_ROWS = 1000
"""Of a table for readers; the CSV has all."""


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
    yield found.table, summary_tables.build_runs_table(found.rows[:MOST_ROWS]), len(found.rows)
    yield (
        found.summary,
        summary_tables.build_configurations_table(found.list_configurations(MOST_ROWS)),
        len(found.summary),
    )
    yield (
        best.as_table(found.best),
        summary_tables.build_best_table(answers, describe_answers(answers), found.rows),
        len(found.best),
    )
    yield curves.build_curve_table(list(found.curves)), summary_tables.build_scaling_table(found.curves), points
    met = summary_tables.build_crossovers_table(found.crossovers)
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
