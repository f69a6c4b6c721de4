"""Command-line arguments that several commands share, and texts that several commands print."""

import argparse
import contextlib
import errno
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bench.core import store, terminal
from bench.core.errors import Interrupted, UserError, make_printable
from bench.core.files import RESULTS
from bench.core.formatting import describe_point, describe_result, format_count
from bench.core.spec import config_id

if TYPE_CHECKING:
    from analysis.results import Results
    from bench.config.decode import Request
    from bench.core.record import RunRecord
    from bench.core.store import Unreadable
    from bench.core.study import Pair
    from bench.core.terminal import Progress
    from bench.sweep.local_sweep import SweepResult
    from bench.sweep.submitting import SubmitResult

JSON = "print JSON for another program"
RAISE_BUDGET = "repeat `zeroscale sweep` with a higher budget.node_hours"
TRY_AGAIN = "remove the cause, and repeat `zeroscale sweep`, with a higher budget.attempts if attempts failed"
ENOUGH = 5
"""Number of repeats that usually suffices to compare configurations."""


def list_given(args: argparse.Namespace, *names: str) -> list[str]:
    """Return those of the options `names` that were given, with their values, as words of a command."""
    given = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names]
    return [
        word for option, value in given if value not in (None, False)
        for word in ([option] if value is True else [option, str(value)])
    ]  # fmt: skip


def describe_argument(action: argparse.Action) -> str:
    """Return the help text of an argument with its default filled in."""
    choices = action.choices and ", ".join(map(str, action.choices))
    return (action.help or "") % {**vars(action), "choices": choices}


def add_points(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands that run points (configurations to measure) have in common."""
    add_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and start nothing")
    add_json(parser)
    add_config_dir(parser)
    add_results(parser)


def add_overrides(
    parser: argparse.ArgumentParser,
    help_text: str = "setting of a config key, or file of a config group",
    least: str = "*",
) -> None:
    parser.add_argument("overrides", nargs=least, default=[], metavar="KEY=VALUE", help=help_text)


def add_json(parser: argparse.ArgumentParser, help_text: str = JSON) -> None:
    parser.add_argument("--json", action="store_true", help=help_text)


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    help_text = "folder with your own config files, in subfolders as in conf/"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=help_text)


def add_results(parser: argparse.ArgumentParser) -> None:
    help_text = "folder with the results of all studies; default: %(default)s"
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=help_text)


def add_study_name(parser: argparse.ArgumentParser, default: str) -> None:
    help_text = "name of the results folder, within --results; default: %(default)s"
    parser.add_argument("--study", default=default, metavar="NAME", help=help_text)


def check_writable(folder: Path) -> None:
    """Raise UserError if a results folder could not be created or written to. Nothing is written."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    code = errno.ENOTDIR if not existing.is_dir() else 0 if os.access(existing, os.W_OK) else errno.EACCES
    if code:
        raise store.build_unwritable_error(folder, OSError(code, os.strerror(code)))


def list_given_folders(args: argparse.Namespace) -> list[str]:
    """Return --config-dir and --results as the user gave them, to be repeated in a printed command. Defaults are
    omitted."""
    given = (("--config-dir", args.config_dir, None), ("--results", args.results, RESULTS))
    return [word for option, value, usual in given if value not in (None, usual) for word in (option, str(value))]


def positive(option: str) -> Callable[[str], int]:
    """Return an argparse type for an option whose value is an integer of at least 1."""

    def number(text: str) -> int:
        # int() alone would accept " 3", "+3" and "3_0".
        if text.isdecimal() and int(text):
            return int(text)
        raise UserError(f"{option} {text}", "is not a positive integer", "set 1 or more")

    return number


def add_study_folder(parser: argparse.ArgumentParser, example: str = "smoke") -> None:
    help_text = f"results folder of a study, such as {RESULTS / example}"
    parser.add_argument("folder", type=Path, metavar="DIR", help=help_text)


def add_autopilot(parser: argparse.ArgumentParser) -> None:
    help_text = "submit a small job that resumes the sweep when jobs have ended, until every run has a final result"
    parser.add_argument("--autopilot", action="store_true", help=help_text)
    help_text = "command that the autopilot runs at its end; its last argument is the path of the summary"
    parser.add_argument("--notify", metavar="COMMAND", help=help_text)


def check_notify(args: argparse.Namespace) -> None:
    """Raise UserError for --notify without --autopilot, and for a notify command that a shell could not parse."""
    if args.notify is None:
        return
    if not args.autopilot:
        raise UserError("--notify", "needs --autopilot, which runs this command at its end", "add --autopilot")
    try:
        shlex.split(args.notify)
    except ValueError as error:
        raise UserError(f"--notify {args.notify}", str(error).lower(), "quote the command as for a shell") from error


def format_point(composed: "Request") -> str:
    """Return a one-line description of a point, which is a configuration to measure."""
    return describe_point(composed.spec, config_id(composed.spec))


def format_compact_point(composed: "Request") -> str:
    """Return the description of a point, wrapped for a terminal. It has no padding for alignment with other points."""
    return terminal.wrap_columns(re.sub(" {3,}", "  ", format_point(composed)))


def format_next(what: str, words: Sequence[str]) -> str:
    """Return a text that suggests a command as the next step. The first line has the purpose `what` of the command; the
    words of the command follow below."""
    return f"next, {what}:\n{terminal.wrap_command(words)}"


def format_point_json(composed: "Request") -> str:
    """Return a point's spec, machine and launcher as JSON."""
    plain = {
        "config_id": config_id(composed.spec),
        "spec": composed.spec.model_dump(mode="json", by_alias=True),
        "machine": composed.machine.model_dump(mode="json", exclude={"rented"}),
        "launcher": {"name": composed.launcher, **composed.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)


def print_chosen(chosen: "Sequence[Pair]") -> None:
    """Print the default overrides that were added to a point because it runs on a CPU, if there are any."""
    # Print on standard error, because a program may read standard output.
    if chosen:
        shown = " ".join(f"{key}={value}" for key, value in chosen)
        print(f"defaults on a CPU: {shown}", file=sys.stderr, flush=True)


def print_unreadable(found: "Sequence[Unreadable]") -> None:
    """Print the files that were ignored because they could not be read."""
    if found:
        print(f"zeroscale: {format_count(len(found), 'unreadable file')} ignored:", file=sys.stderr)
    for error in found:
        print(f"  {make_printable(str(error))}", file=sys.stderr)


def describe_run(record: "RunRecord") -> str:
    """Return the result of a run in one line: step time, peak memory, tokens per second, and quality flags (such as
    `busy`) that cast doubt on the measurement."""
    from analysis.flags import list_flags
    from analysis.metrics.throughput import compute_tokens_per_s

    rate = compute_tokens_per_s(record) if record.outcome.kind == "ok" else None
    flags = ", ".join(list_flags(record))
    return describe_result(record) + (f", {rate:,.0f} tokens/s" if rate else "") + (f"; flags: {flags}" * bool(flags))


def format_outcomes(counts: Counter[str], flags: Mapping[str, int]) -> str:
    """Return the numbers of runs by outcome as text, the largest first, such as `20 ok (14 busy, 2 short), 1 oom`.
    `flags` has the number of `ok` runs with each quality flag, such as `busy`."""
    flagged = ", ".join(f"{number} {name}" for name, number in Counter(flags).most_common())
    return ", ".join(
        f"{number} {kind}" + (f" ({flagged})" if kind == "ok" and flagged else "")
        for kind, number in counts.most_common()
    )


def print_ended(done: "SweepResult", *, as_json: bool) -> bool:
    """Print the outcomes and quality flags of a sweep that ran on this machine. Then print the answer to the study's
    question, for example which engine is fastest. Return True if every point ended `ok`.

    A run whose losses or gradient norms deviate from those of a reference run in the same folder counts as `invalid`.
    All sweeps without a study share a folder. Therefore, results of points that are not in this sweep are excluded.
    """
    from analysis import results
    from analysis.answer import describe_answer  # here: pandas takes longer to import than most commands to run

    found = results.read([done.folder])
    own = [place for folder, place in found.list_places().items() if folder in done.attempts]
    deviating = [place for place in own if place in found.deviating]
    if deviating:
        outcomes = done.outcomes - Counter(ok=len(deviating)) + Counter(invalid=len(deviating))
        done = done._replace(outcomes=outcomes)
    if as_json:
        plain = {"outcomes": done.outcomes, "skipped": done.skipped, "unanswered": done.unanswered}
        print(json.dumps({"study": done.folder.name, **plain, "folder": str(done.folder)}))
        return done.good
    print(format_ended(done, _count_flags(found, own)))
    # The line of such a run, printed when it ended, has the outcome `ok`.
    for reason, count in Counter(found.table["reason"].iloc[deviating]).most_common():
        print(terminal.wrap(f"{count} invalid: {reason}"))
    keys = zip(found.table["config_id"], found.table["machine"], strict=True)
    for line in describe_answer(found.take([place for place, key in enumerate(keys) if key in done.points])):
        print(terminal.wrap(line))
    return done.good


def _count_flags(found: "Results", places: Sequence[int]) -> Counter[str]:
    """Return, for each quality flag, the number of `ok` runs with this flag. Only the rows `places` of the run table
    are counted."""
    table = found.table.iloc[list(places)]
    return Counter(flag for flags in table["flags"][table["outcome"] == "ok"].fillna("") for flag in flags.split())


def format_ended(done: "SweepResult", flags: Mapping[str, int]) -> str:
    """Return the outcomes of a sweep in one line. `flags` has, for each quality flag such as `busy`, the number of `ok`
    runs with this flag."""
    parts = [format_outcomes(done.outcomes, flags), f"{done.skipped} already had a result"]
    parts += [f"{done.unanswered} without a final result: continue with zeroscale resume"] if done.unanswered else []
    return "; ".join([*filter(None, parts), str(done.folder)])


def format_submitted(done: "SubmitResult", folder: Path, *, as_json: bool) -> str:
    """Return a text, or JSON, on a submission: the submitted jobs, the points that were not submitted, and the next
    command. The text also has the number of attempts that had ended without a record. A record was written for each of
    these attempts."""
    if as_json:
        plain = {
            "folder": str(folder),
            "submitted": [
                {"job": number, "name": job.name, "points": len(job.points)} for job, number in done.submitted
            ],
            "concluded": done.concluded,
            "pruned": done.without_run.get("pruned", 0),
            "infeasible": done.without_run.get("infeasible", 0),
            "left": len(done.left),
            "impossible": done.impossible,
            "why_left": done.why_left,
            "queued": done.queued,
            "autopilot": done.autopilot,
            "autopilot_refused": done.autopilot_refused or None,
            "cut_short": done.cut_short or None,
        }
        return json.dumps(plain)
    from bench.sweep import jobs  # here: most commands submit nothing

    where = shlex.quote(str(folder))
    resume = f"continue with: zeroscale resume {where}"
    lines = [
        f"job {number}: {format_count(len(job.points), 'run')}, "
        f"{format_count(job.nodes, 'node')} × {job.devices_per_node}, "
        f"at most {job.time_limit_min} min{' each' if job.mode == 'array' else ''}  {folder / jobs.FOLDER / job.name}"
        for job, number in done.submitted
    ]
    if done.concluded:
        lines.append(f"{format_count(done.concluded, 'attempt')} had ended without a record; each has one now")
    lines += [
        f"not run, recorded as {kind}: {format_count(number, 'run')}" for kind, number in done.without_run.items()
    ]
    if done.impossible:
        never = format_count(done.impossible, "run")
        lines.append(f"cannot start on this cluster: {never} ({done.why_left})")
    if len(done.left) > done.impossible:
        to_come = format_count(len(done.left) - done.impossible, "run")
        then = "the autopilot will submit them" if done.autopilot else resume
        then = RAISE_BUDGET if done.is_budget_spent else then
        lines.append(f"not submitted yet: {to_come} ({done.why_left}); {then}")
    if done.autopilot:
        start = "when the first job has ended" if done.left else "when the other jobs have ended"
        start = start if done.queued else "some minutes later, because the queue is full"
        lines.append(f"job {done.autopilot}: the autopilot, which starts {start}")
    if done.autopilot_refused:
        other = "or repeat `zeroscale sweep` with other options"
        lines.append(f"the autopilot was not submitted: {done.autopilot_refused}; {resume} --autopilot, {other}")
    if done.cut_short:
        lines.append(f"the remaining jobs were not submitted: {done.cut_short}; {resume}")
    lines.append(f"progress: zeroscale status {where}" if done.submitted else _explain_nothing(done, where))
    return "\n".join(lines)


def _explain_nothing(done: "SubmitResult", where: str) -> str:
    """Return the reason why no job was submitted."""
    queued = f"{format_count(done.queued, 'job')} in the queue"
    if done.answered:
        cancel = f", with {queued}; to cancel them: zeroscale cancel {where}" if done.queued else ""
        return f"nothing to submit: every point has a final result{cancel}"
    if done.left:
        return f"no jobs submitted now; progress: zeroscale status {where}"
    rest = f"the remaining points wait or run, with {queued}" if done.queued else f"no attempts are left; {TRY_AGAIN}"
    return f"nothing to submit: {rest}; progress: zeroscale status {where}"


class BusyWarning:
    """Warning on standard error that this machine is busy. It is printed when the command starts its first run. The
    load is measured from the start of the command to that moment, so that the command need not wait for a
    measurement."""

    def __init__(self, remedy: str = "to wait for a quiet machine, add launcher.quiet_within_s=600") -> None:
        """Start measuring the load. `remedy` is the advice at the end of the warning."""
        from bench.measure.surroundings import CommandMonitor  # here: few commands measure

        self._remedy = remedy
        self._monitor, self._is_due = CommandMonitor(), True

    def print(self, launcher: Mapping[str, Any]) -> None:
        """Print the warning if the machine is busy, at the first call only. Print nothing if the run will wait for a
        quiet machine or for another local run."""
        from bench.sweep import local_attempt

        is_due, self._is_due = self._is_due, False
        waits = bool(launcher.get("lock")) and local_attempt.is_held(os.environ)
        if is_due and not waits and launcher.get("quiet_within_s") is None and (why := self._monitor.explain_busy()):
            effect = "step times measured now are excluded from comparisons"
            print(f"zeroscale: this machine is busy: {why}; {effect}; {self._remedy}", file=sys.stderr, flush=True)

    def before(self, follow: "Callable[[Progress], None]", launcher: Mapping[str, Any]) -> "Callable[[Progress], None]":
        """Return a function that passes progress to `follow`. At its first call, when the first run starts, it also
        prints the warning if this machine is busy."""

        def warn_and_follow(progress: "Progress") -> None:
            self.print(launcher)
            follow(progress)

        return warn_and_follow


@contextlib.contextmanager
def explain_end(folder: Path) -> Iterator[None]:
    """Context in which Ctrl-C or SIGTERM prints the command that resumes the study in `folder`, and then ends the
    command."""
    ended_by = "Ctrl-C"

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = "SIGTERM"
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # a shell starts background commands with Ctrl-C ignored
            raise KeyboardInterrupt
        interrupt(number, frame)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        kept = f"ended by {ended_by}; results of finished runs are kept"
        print(f"zeroscale: {kept}. To continue: zeroscale resume {shlex.quote(str(folder))}", file=sys.stderr)
        raise Interrupted from error
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def follow_runs(
    args: argparse.Namespace, folder: Path, launcher: Mapping[str, Any], busy: BusyWarning
) -> Iterator[dict[str, Any]]:
    """Context in which runs of the study in `folder` are measured or submitted. Yield the keyword arguments `tell`,
    `follow` and `describe` for functions of `bench.api`. With these arguments, the user sees the progress of the
    runs."""
    with explain_end(folder), terminal.progress(quiet=args.json) as follow:
        printer = terminal.build_printer(quiet=args.json)
        yield {"tell": printer, "follow": busy.before(follow, launcher), "describe": describe_run}


def add_page(parser: argparse.ArgumentParser) -> None:
    help_text = "also write the result as an HTML page with figures, which opens offline; an older page is replaced"
    parser.add_argument("--page", type=Path, metavar="FILE.html", help=help_text)


def check_page(path: Path) -> None:
    """Raise UserError if the path is a folder, if its parent folder does not exist, or if it does not end in .html or
    .htm."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--page {path}", "must end in .html", "rename the page")
    if path.is_dir():
        raise UserError(f"--page {path}", "is a folder", "name a file in this folder")
    if not path.parent.is_dir():
        rule = f"the folder {path.parent} does not exist"
        raise UserError(f"--page {path}", rule, "create the folder, or choose another file")


def write_page(path: Path, page: str, *, quiet: bool) -> None:
    """Write an HTML page, and print its path unless `quiet`."""
    try:
        # Write atomically, because a browser may have the older page open.
        store.write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"--page {path}", f"cannot be written ({error.strerror})", "choose another file") from error
    if not quiet:
        print(f"\npage: {path}")
