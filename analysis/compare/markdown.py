"""A comparison as Markdown for a pull request: the outcome first, what changed, and the rest folded away."""

from analysis.compare import Compared
from analysis.compare.judging import Line
from analysis.compare.words import HEAD, RIGHT, cells, headline, level, sides
from analysis.formats import escaped
from analysis.formats.markdown import to_markdown as as_table

_FOLDED = (
    "no detectable difference", "too few repeats to tell", "not comparable", "only in A", "only in B", "failed in both",
)  # fmt: skip


def to_markdown(compared: Compared) -> str:
    """Return the comparison as GitHub shows it."""
    shown = [(name, line) for name, line in compared.lines if not _folded(line)]
    parts = [f"**{escaped(headline(compared))}**", escaped(sides(compared))]
    parts += [_table(shown)] if shown else []
    for status in _FOLDED:
        members = [(name, line) for name, line in compared.lines if _folded(line) and line.status == status]
        if members:
            summary = f"<summary>{len(members)} {status}</summary>"
            parts.append(f"<details>{summary}\n\n{_table(members)}\n\n</details>")
    return "\n\n".join([*parts, escaped(level(compared))]) + "\n"


def _folded(line: Line) -> bool:
    return line.status in _FOLDED and line.held != "broken" and not line.changes


def _table(lines: list[tuple[str, Line]]) -> str:
    return as_table(HEAD, [cells(name, line) for name, line in lines], [name in RIGHT for name in HEAD]).rstrip()
