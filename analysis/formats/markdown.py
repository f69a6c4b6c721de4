"""Tables for documents and pull requests: Markdown, every cell escaped."""

from collections.abc import Sequence

from analysis.formats import escape_markdown


def to_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a Markdown table with these headings; `right` says which columns are aligned to the right."""
    rule = ["---:" if one else "---" for one in right]
    lines = [[escape_markdown(cell) for cell in head], rule, *([escape_markdown(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
