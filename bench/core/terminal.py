"""Terminal output: aligned columns of text, results of checks, and progress as a bar or as log lines."""

import contextlib
import io
import json
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from bench.core.errors import Check, CheckState

WIDTH = 100
"""Width of printed text, in columns. A path or another long word is not broken and may be wider, so that it can be
copied."""
_BAR_WIDTH = 20
_UNBROKEN = 10_000  # columns of text: wide enough that rich neither breaks nor cuts a line
_STYLES: dict[CheckState, str] = {"ok": "green", "missing": "bold red", "note": "yellow"}
_SUBJECT_WIDTH = 22
_UNBREAKABLE = "\xa0"  # a space at which no line breaks
_CONTINUED = " \\"  # end of a shell line that the next line continues
_LOG_EVERY_S = 60.0


class Progress(NamedTuple):
    """Progress of the current task."""

    what: str  # name of the task
    share: float | None = None  # completed share of the task, between 0 and 1; None if unknown
    left: str = ""  # remaining time, as text
    subject: str = ""  # item that the task is about, such as a point of a sweep


def align(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    least: Sequence[int] = (),
    gap: int = 2,
    indent: int = 0,
) -> str:
    """Return rows of cells as text in aligned columns. `right` are the indices of right-aligned columns. `least` are
    the minimum widths of the first columns, in characters."""
    from rich.console import Console  # imported in functions, because most commands do not need rich
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, gap, 0, 0))
    for column in range(max(map(len, rows), default=0)):
        width = least[column] if column < len(least) else None
        table.add_column(justify="right" if column in right else "left", min_width=width, no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    Console(file=drawn, width=_UNBROKEN, color_system=None).print(table)
    return "\n".join(f"{'':{indent}}{line}".rstrip() for line in drawn.getvalue().splitlines())


def wrap(text: str, indent: int = 0, hang: int = 2) -> str:
    """Return prose wrapped at WIDTH columns. Lines after the first are indented by `hang` more columns."""
    first, other = " " * indent, " " * (indent + hang)
    wrapped = textwrap.fill(
        text.replace(" %", f"{_UNBREAKABLE}%"), WIDTH,
        initial_indent=first, subsequent_indent=other, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return wrapped.replace(_UNBREAKABLE, " ")


def wrap_columns(text: str) -> str:
    """Return lines wrapped at WIDTH columns. If possible, a line breaks between two columns of text. Columns are
    separated by two spaces."""
    return "\n".join(line if len(line) <= WIDTH else _wrap_line(line) for line in text.splitlines())


def _wrap_line(line: str) -> str:
    body = line.lstrip()
    indent = len(line) - len(body)
    # A space within a column does not break, so the line breaks between columns.
    parts = wrap(re.sub(r"(?<! ) (?! )", _UNBREAKABLE, body), indent, hang=2 if indent else 4).splitlines()
    # A single column may be wider than a line, such as the reason of a failure.
    return "\n".join(wrap(part.lstrip(), len(part) - len(part.lstrip()), hang=0) for part in parts)


def wrap_command(words: Sequence[str], indent: int = 2) -> str:
    """Return a shell command wrapped at WIDTH columns. Each line but the last ends in a backslash, so that the lines
    can be pasted into a shell together."""
    lines = [" " * indent + shlex.quote(words[0])]
    for word in map(shlex.quote, words[1:]):
        if len(lines[-1]) + len(word) + 1 <= WIDTH - len(_CONTINUED):
            lines[-1] += f" {word}"
        else:
            lines.append(f"{'':{indent + 4}}{word}")
    return f"{_CONTINUED}\n".join(lines)


def print_findings(findings: Iterable[Check], *, as_json: bool) -> int:
    """Print each result of a check as soon as it is known or, with `as_json`, all results together as JSON. Return the
    exit code: 1 if something is missing, otherwise 0."""
    seen = []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            _print_finding(finding)
    if as_json:
        print(json.dumps([finding._asdict() for finding in seen], indent=1))
    return 1 if any(finding.state == "missing" for finding in seen) else 0


def _print_finding(finding: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    before = _SUBJECT_WIDTH + len("  missing  ")
    found = wrap(f"{'':{before}}{finding.found}", hang=before)[before:]
    line = Text(f"{finding.subject:<{_SUBJECT_WIDTH}}  ")
    line.append(f"{finding.state:<{len('missing')}}", _STYLES[finding.state]).append(f"  {found}")
    if finding.remedy:
        line.append(f"\n{'':{_SUBJECT_WIDTH}}  → {finding.remedy}")
    Console().print(line, soft_wrap=True)  # no line breaks, because users copy paths and commands


def build_printer(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints text with aligned columns, wrapped at WIDTH, without buffering. With `quiet`, the
    function does nothing."""
    return (lambda text: None) if quiet else lambda text: print(wrap_columns(text), flush=True)


class LogProgress:
    """Progress as lines of a log: a line at the start of each subject, and then one line per minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin a log in which no subject (item of work, such as a point of a sweep) has been shown yet. `clock`
        returns the current time in seconds."""
        self._clock, self._subject, self._printed_s = clock, "", clock()

    def show(self, shown: Progress | str) -> None:
        one = shown if isinstance(shown, Progress) else Progress(shown)
        is_new, now_s = one.subject != self._subject, self._clock()
        if is_new or now_s - self._printed_s >= _LOG_EVERY_S:
            share = "" if one.share is None or is_new else f"{100 * one.share:.0f} %"
            parts = [one.subject, one.what, share, one.left]
            print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)
            self._subject, self._printed_s = one.subject, now_s


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[Progress | str], None]]:
    """Yield a function that shows progress on standard error. On a terminal, it shows a bar with elapsed and remaining
    time.

    In a log, the function prints a line at the start of each subject and then one line per minute. A long run therefore
    does not look like a hang.
    """
    if quiet:
        yield lambda shown: None
        return
    if not sys.stderr.isatty():
        yield LogProgress().show
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column

    task_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}", markup=False, table_column=task_column),
        rich.BarColumn(_BAR_WIDTH),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True)),
    )
    # On a terminal, printed output appears above the bar. A redirected standard output must receive it unchanged.
    to_terminal = sys.stdout.isatty()
    with rich.Progress(
        *columns, console=Console(stderr=True), transient=True, expand=True, redirect_stdout=to_terminal
    ) as bar:
        task = bar.add_task("starting", total=None, left="")

        def show(shown: Progress | str) -> None:
            one = shown if isinstance(shown, Progress) else Progress(shown)
            total = None if one.share is None else 1.0
            what = f"{one.what}  {one.subject}" if one.subject else one.what
            bar.update(task, description=what, total=total, completed=one.share or 0.0, left=one.left)

        yield show
