"""What the autopilot leaves at its end: a report, a summary of one page, and a word to whoever asked for one."""

import shlex
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from bench import api, store
from bench.cli import status as status_text
from bench.errors import UserError, make_printable
from bench.formatting import describe_result
from bench.processes import build_module_command
from bench.sweep import exclusions, snapshot
from bench.sweep.status import PointStatus
from bench.sweep.submission.state import StudyState

SUMMARY = "summary.md"
_MOST_LINES = 40  # of points: a page
_REPORT_S, _NOTIFY_S = 600.0, 300.0


def finish(folder: Path, notify: str | None, refusal: str = "") -> None:
    """Write the report and the summary of a study whose autopilot ends, and call `notify` with the summary's path.
    Whatever fails of that is told on standard error, and harms nothing else. `refusal` is why it ends before its time.
    """
    report = _write_report(folder)
    path = folder / snapshot.REPORT / SUMMARY
    try:
        path.parent.mkdir(exist_ok=True)
        store.write_atomically(path, _format_summary(api.status(folder).view, report, refusal).encode())
    except OSError as error:
        _tell(f"{path}: the summary cannot be written ({error.strerror})")
        return
    print(f"the autopilot has ended; its summary: {path}", flush=True)
    if notify is not None:
        _call(notify, path)


def _write_report(folder: Path) -> str:
    """Have a process of its own write the report; return where it is, or why there is none. It may need what is not
    installed here, and more memory than this small job has."""
    out = folder / snapshot.REPORT
    command = build_module_command("bench.cli", "report", str(folder), "--out", str(out))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REPORT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        if done.returncode == 0:
            return f"report: {(done.stdout.splitlines() or [str(out)])[-1]}"
        why = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
    _tell(f"no report: {why}")
    return f"no report: {why}; to write it: zeroscale report {shlex.quote(str(folder))}"


def _format_summary(view: StudyState, report: str, refusal: str) -> str:
    """Return one page in Markdown: how every point ended, the most of them in one line each."""
    ended = f"The autopilot ended on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC."
    lines = [
        f"# {view.folder.name}",
        "",
        status_text.format_summary(view) + ".",
        "",
        ended,
        make_printable(report) + ".",
    ]
    if refusal:
        lines.append(f"It could not go on: {make_printable(refusal)}.")
    open_points = [one for one in view.statuses if not one.final]
    if open_points:
        lines += ["", "## Without an answer", "", *_list_reasons(open_points)]
    lines += [
        f"- node {found.host} is not used any more: {found.reason}" for found in exclusions.read_exclusions(view.folder)
    ]
    answered = [one for one in view.statuses if one.final]
    if answered:
        lines += ["", "## Answers", "", *(_format_answer(view.folder, one) for one in answered[:_MOST_LINES])]
    if len(answered) > _MOST_LINES:
        lines.append(f"- … and {len(answered) - _MOST_LINES} more; see the report")
    return "\n".join(lines) + "\n"


def _list_reasons(points: list[PointStatus]) -> list[str]:
    """Return why points have no answer, the most frequent first."""
    reasons = Counter((one.state, one.why) for one in points).most_common()
    lines = [f"- {number} × {state}: {make_printable(why)}" for (state, why), number in reasons[:_MOST_LINES]]
    return [*lines, *([f"- … and {len(reasons) - _MOST_LINES} reasons more"] if len(reasons) > _MOST_LINES else [])]


def _format_answer(folder: Path, one: PointStatus) -> str:
    try:
        result = describe_result(store.read_record(folder / one.folder / store.RECORD))
    except (OSError, UserError) as error:
        result = str(error)
    return f"- {make_printable(one.point.line)}  repeat {one.key.repeat}: {make_printable(result)}"


def _call(notify: str, summary: Path) -> None:
    try:
        done = subprocess.run([*shlex.split(notify), str(summary)], timeout=_NOTIFY_S, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        _tell(f"--notify {notify}: {error}")
        return
    if done.returncode:
        _tell(f"--notify {notify}: ended with exit code {done.returncode}")


def _tell(what: str) -> None:
    print(f"zeroscale: {make_printable(what)}", file=sys.stderr, flush=True)
