"""Tables for papers: LaTeX with the rules of `booktabs`, every cell escaped."""

from collections.abc import Sequence

import pandas as pd

LONG = 40
"""Rows; a longer table breaks over pages, with `longtable`."""

_NEEDS = "% needs \\usepackage{{{}}}\n"


def to_latex(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a LaTeX table with these headings; `right` says which columns are aligned to the right."""
    frame = pd.DataFrame([list(map(_join_lines, row)) for row in rows], columns=range(len(head)), dtype=object)
    frame.columns = pd.Index([_join_lines(heading) for heading in head])
    styled = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    long = len(rows) > LONG
    text = styled.to_latex(
        hrules=True,
        column_format="".join("r" if one else "l" for one in right),
        environment="longtable" if long else None,
    )
    return _NEEDS.format("booktabs,longtable" if long else "booktabs") + text


def _join_lines(text: str) -> str:
    return " ".join(text.replace("−", "-").split())  # LaTeX's fonts for text have no minus sign
