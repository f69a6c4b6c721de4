"""A comparison as Markdown for a pull request: the outcome first, what changed, and the rest folded away."""

from analysis.compare import SetComparison
from analysis.compare.judging import PairResult
from analysis.compare.phrases import HEAD, RIGHT, build_cells, describe_intervals, describe_sides, format_headline
from analysis.formats import escape_markdown
from analysis.formats.markdown import to_markdown as as_table

_FOLDED = (
    "equal within 3 %", "no detectable difference", "too few repeats to tell", "not comparable", "only in A",
    "only in B", "failed in both",
)  # fmt: skip


def to_markdown(compared: SetComparison) -> str:
    """Return the comparison as GitHub shows it."""
    shown = [(name, line) for name, line in compared.lines if not _is_folded(line)]
    parts = [f"**{escape_markdown(format_headline(compared))}**", escape_markdown(describe_sides(compared))]
    parts += [_render_pairs_table(shown)] if shown else []
    for status in _FOLDED:
        members = [(name, line) for name, line in compared.lines if _is_folded(line) and line.status == status]
        if members:
            summary = f"<summary>{len(members)} {status}</summary>"
            parts.append(f"<details>{summary}\n\n{_render_pairs_table(members)}\n\n</details>")
    return "\n\n".join([*parts, escape_markdown(describe_intervals(compared))]) + "\n"


def _is_folded(line: PairResult) -> bool:
    return line.status in _FOLDED and line.held != "broken" and not line.changes


def _render_pairs_table(lines: list[tuple[str, PairResult]]) -> str:
    return as_table(HEAD, [build_cells(name, line) for name, line in lines], [name in RIGHT for name in HEAD]).rstrip()
