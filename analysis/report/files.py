"""The tables beside the page: exact as CSV, and for readers as Markdown and LaTeX."""

from collections.abc import Iterable

import pandas as pd

from analysis import formats
from analysis.formats.latex import to_latex
from analysis.formats.markdown import to_markdown
from analysis.report import sheets
from analysis.report.findings import Findings
from analysis.report.headline import told
from analysis.report.sheets import Sheet
from analysis.scaling import best, crossover, curves
from analysis.table import plain

MOST_ROWS = 1000
"""Of a table for readers; the CSV has all."""


def tables(found: Findings) -> dict[str, bytes]:
    """Return every table in every format, by path; one that would have no row is none."""
    files: dict[str, bytes] = {}
    for exact, sheet, rows in _tables(found):
        if sheet.rows:
            files |= {f"{sheet.name}.csv": formats.to_csv(exact).encode(), **_readable(sheet, rows)}
    return files


def _tables(found: Findings) -> Iterable[tuple[pd.DataFrame, Sheet, int]]:
    """Yield what is exact, what is for readers, and how many rows the latter would have."""
    answers, points = found.best[:MOST_ROWS], sum(len(curve.points) for curve in found.curves)
    yield found.table, sheets.runs(found.rows[:MOST_ROWS]), len(found.rows)
    yield found.summary, sheets.configurations(plain(found.summary[:MOST_ROWS])), len(found.summary)
    yield best.as_table(found.best), sheets.best(told(answers), found.rows), len(found.best)
    yield curves.as_table(list(found.curves)), sheets.scaling(found.curves), points
    law, met = sheets.law(found.curves), sheets.crossovers(found.crossovers)
    yield curves.fit_table(list(found.curves)), law, len(law.rows)
    yield crossover.as_table(list(found.crossovers)), met, len(met.rows)


def _readable(sheet: Sheet, all_rows: int) -> dict[str, bytes]:
    rows = [[cell.text for cell in row] for row in sheet.rows[:MOST_ROWS]]
    head, right = [heading.text for heading in sheet.head], [heading.number for heading in sheet.head]
    more = all_rows - len(rows)
    said = f"{more:,} more rows stand in {sheet.name}.csv." if more else ""
    markdown, latex = to_markdown(head, rows, right), to_latex(head, rows, right)
    return {
        f"{sheet.name}.md": f"{markdown}\n{said}\n".encode() if more else markdown.encode(),
        f"{sheet.name}.tex": f"% {said}\n{latex}".encode() if more else latex.encode(),
    }
