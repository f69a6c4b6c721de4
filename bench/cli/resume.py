"""Continue a sweep: start the points that have no final answer yet.

  zeroscale resume results/runs/paper
  zeroscale resume results/runs/paper --autopilot --notify "mail -s done me@example.org -a"

Attempts that ended without a record get a record first. A point is attempted at most as often as
its study allows.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from bench import api
from bench.cli import options, search
from bench.cli.status import format_summary
from bench.core import store
from bench.core.errors import UserError, make_printable
from bench.core.job_environment import read_job
from bench.core.processes import build_module_command
from bench.core.scheduling import SchedulerUnavailable
from bench.sweep import definition, jobs, snapshot
from bench.sweep.local_sweep import SweepResult
from bench.sweep.status import PointStatus, StudyState
from bench.sweep.submitting import PATIENCE_S, SubmitResult

_AUTOPILOT_PATIENCE_S = 600.0  # longer than that of other calls, because no user repeats the autopilot's call


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_study_folder(parser)
    options.add_autopilot(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if the remaining points were submitted or, without a scheduler, if all points ended `ok`.

    For a search that has ended, return 0 if the search found a best point.
    """
    options.check_notify(args)
    options.print_unreadable(api.unreadable(args.folder))
    try:
        done = _resume(args)
    except SchedulerUnavailable:
        raise
    except UserError as refusal:
        # The autopilot's job has no terminal, so its summary reports the error.
        if args.autopilot and read_job(os.environ):
            finish_autopilot(args.folder, args.notify, str(refusal))
        raise
    is_search = definition.find_search(definition.read(args.folder)) is not None
    if isinstance(done, SubmitResult):
        has_ended = is_search and done.has_ended
        if not has_ended:
            print(options.format_submitted(done, args.folder, as_json=args.json))
        if args.autopilot and not done.complete and read_job(os.environ):
            finish_autopilot(args.folder, args.notify, done.autopilot_refused or done.cut_short)
        elif args.autopilot and done.complete and not done.queued and not done.autopilot:
            finish_autopilot(args.folder, args.notify)
        if not has_ended:
            return 0 if done.good else 1
    elif not is_search:
        return 0 if options.print_ended(done, as_json=args.json) else 1
    return search.print_verdict(args.folder, as_json=args.json)


def _resume(args: argparse.Namespace) -> SubmitResult | SweepResult:
    # `resume` takes no overrides, so launcher.quiet_within_s cannot be set here.
    busy = options.BusyWarning("press Ctrl-C to stop, and resume when the machine is quiet")
    launcher = definition.read(args.folder)[-1].launcher
    given = {"autopilot": args.autopilot, "notify": args.notify}
    given["patience_s"] = _AUTOPILOT_PATIENCE_S if args.autopilot else PATIENCE_S
    with options.follow_runs(args, args.folder, launcher, busy) as listeners:
        return api.resume(args.folder, **given, **listeners)


SUMMARY = "summary.md"
_MOST_LINES = 40  # maximum number of points in the summary: a page
_REPORT_S, _NOTIFY_S = 600.0, 300.0


def finish_autopilot(folder: Path, notify: str | None, refusal: str = "") -> None:
    """Write the report and the summary of a study when its autopilot ends. (The autopilot is a job that submits the
    remaining points.) Then run the command `notify`, if given, with the path of the summary as last argument.

    A failure of these steps is printed on standard error and has no other effect. `refusal` is the reason why the
    autopilot could not continue; it is empty if all went well.
    """
    report = _write_report(folder)
    path = folder / snapshot.REPORT / SUMMARY
    try:
        path.parent.mkdir(exist_ok=True)
        view, own = api.status(folder).view, read_job(os.environ)
        if own:  # the job of this process ends with the summary
            view = view._replace(queue={key: state for key, state in view.queue.items() if key[0] != own.name})
        store.write_atomically(path, _format_summary(view, report, refusal).encode())
    except OSError as error:
        _tell(f"{path}: the summary cannot be written ({error.strerror})")
        return
    print(f"the autopilot has ended; its summary: {path}", flush=True)
    if notify is not None:
        _call(notify, path)


def _write_report(folder: Path) -> str:
    """Write the study's report in a separate process. Return a text with the report's path, or with the reason why no
    report was written.

    A separate process is used because the report may need packages that are not installed here, and more memory than
    this small job has.
    """
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
    """Return the summary of a study as one page of Markdown. Each point with a final result has a line, up to
    `_MOST_LINES` lines. A longer list is cut and ends in "and N more".

    `report` is a text with the path of the study's report, or with the reason why there is no report. `refusal` is the
    reason why the autopilot could not continue; it is empty if all went well.
    """
    ended = f"The autopilot ended on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC."
    lines = [f"# {view.folder.name}", "", format_summary(view) + ".", "", ended, make_printable(report) + "."]
    if refusal:
        lines.append(f"The autopilot could not continue: {make_printable(refusal)}.")
    if spent := view.explain_spent_budget():
        lines.append(f"{spent.capitalize()}; {options.RAISE_BUDGET}.")
    open_points = [one for one in view.statuses if not one.final]
    if open_points:
        lines += ["", "## Without a final result", "", *_list_reasons(open_points)]
    lines += [f"- node {found.host} is excluded: {found.reason}" for found in jobs.read_exclusions(view.folder)]
    answered = [one for one in view.statuses if one.final]
    if answered:
        lines += ["", "## Results", "", *(_format_answer(view.folder, one) for one in answered[:_MOST_LINES])]
    if len(answered) > _MOST_LINES:
        lines.append(f"- … and {len(answered) - _MOST_LINES} more; see the report")
    return "\n".join(lines) + "\n"


def _list_reasons(points: list[PointStatus]) -> list[str]:
    """Return Markdown lines with the reasons why `points` have no final result, the most frequent reason first."""
    reasons = Counter(f"{one.state}: {one.why}" if one.why else one.state for one in points).most_common()
    lines = [f"- {number} × {make_printable(reason)}" for reason, number in reasons[:_MOST_LINES]]
    return [*lines, *([f"- … and {len(reasons) - _MOST_LINES} more reasons"] if len(reasons) > _MOST_LINES else [])]


def _format_answer(folder: Path, one: PointStatus) -> str:
    try:
        result = options.describe_run(store.read_record(folder / one.folder / store.RECORD))
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
