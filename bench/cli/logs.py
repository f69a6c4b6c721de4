"""Print the logs of a point: the logs of its attempts, and of the jobs that ran them.

  zeroscale logs 3fa9c1d27b results/runs/paper
  zeroscale logs 3fa9c1d27b/0.1 --rank 3 --lines 50
  zeroscale logs 3fa9c1d27b results/runs/paper --follow

A point is named by its config_id or by an unambiguous beginning of the config_id. To select one
attempt, append a slash and the name of the attempt's folder. The folder of attempt 1 of repeat 0 is
0.1. `zeroscale status --json` shows config_ids and names of folders.
`zeroscale table DIR --columns config_id,repeat,attempt` shows config_ids and the numbers of repeats
and attempts.

`run.log` has the lines of all ranks, each with its rank in front. `run.log` may be empty for a run
that ended ok. The exit code is 0 if a log was found.
"""

import argparse
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from bench.cli import options
from bench.core import store
from bench.core.errors import UserError, make_printable
from bench.core.files import RESULTS
from bench.core.formatting import format_count
from bench.core.record import Circumstance
from bench.core.spec import RunSpec
from bench.sweep import jobs, snapshot

_POINT = re.compile(r"([0-9a-f]{1,10})(?:/(\d+\.\d+))?")
_LINES = 20
_END_BYTES = 2**20  # bytes that are read from the end of a log: enough for thousands of lines
_POLL_S = 0.5


def arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "config_id of a configuration, or its first digits; /0.1 selects attempt 1 of repeat 0"
    parser.add_argument("point", metavar="POINT", help=help_text)
    help_text = f"folder of one study, or folder with several studies; default: {RESULTS}"
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="DIR", help=help_text)
    parser.add_argument("--rank", type=_parse_rank, metavar="N", help="print only lines of this rank")
    help_text = "number of last lines to print of each log; default: %(default)s"
    parser.add_argument("--lines", type=options.positive("--lines"), default=_LINES, metavar="N", help=help_text)
    parser.add_argument("--follow", action="store_true", help="print new lines of the last attempt until it ends")


def run(args: argparse.Namespace) -> int:
    """Print the logs. Return the exit code: 0 if a log was found."""
    folder: Path = args.folder
    if not (named := _POINT.fullmatch(args.point)):
        remedy = "write a config_id such as 3fa9c1d27b, or an attempt such as 3fa9c1d27b/0.1"
        raise UserError(args.point, "is not a config_id", remedy)
    if not folder.is_dir():
        raise UserError(str(folder), "no such folder", f"name the folder of a study, or {RESULTS}")
    beginning, chosen = named.groups()
    studies = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    attempts = _find_attempts(beginning, chosen, studies)
    found = [log for attempt in attempts for log in _list_logs(attempt)]
    if chosen is None:  # include jobs that started no attempt
        for job in (job for study in studies for job in jobs.list_submitted(study)[0]):
            tasks = [task for key, task in job.points if key.config_id.startswith(beginning)]
            found += [log for task in tasks for log in _list_logs_of_job(job.folder, task)]
    logs = list(dict.fromkeys(found))
    if not attempts and not logs:
        rule = f"no attempt and no log of this configuration in {folder}"
        raise UserError(args.point, rule, "`zeroscale status DIR --json` lists all configurations")
    if args.rank is not None and attempts:
        _check_rank(attempts[-1], args.rank)
    for path in logs:
        print(f"── {path}")
        rank = args.rank if path.name == store.LOG else None
        lines = _read_lines(path, rank) or ["(empty)" if rank is None else f"(no lines of rank {rank})"]
        for line in lines[-args.lines :]:
            print(make_printable(line))
    if args.follow and attempts:
        _follow(attempts[-1], args.rank)
    if not logs:
        print("no log yet in " + ", ".join(map(str, attempts)))
    return 0 if logs else 1


def _parse_rank(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise UserError(f"--rank {text}", "is not the number of a rank", "ranks are numbered from 0")


def _find_attempts(beginning: str, chosen: str | None, studies: list[Path]) -> list[Path]:
    """Return the folders of the attempts (tries at a run) of the point whose config_id begins with `beginning`, oldest
    first. `chosen` selects one attempt by its name. Raise UserError if several config_ids begin with `beginning`."""
    points = [path for study in studies for path in study.glob(f"{beginning}*")]
    points = [path for path in points if path.is_dir() and re.fullmatch(r"[0-9a-f]{10}", path.name)]
    if len(names := {path.name for path in points}) > 1:
        rule = f"{len(names)} configurations have a config_id that begins so"
        raise UserError(beginning, rule, f"choose from {', '.join(sorted(names)[:5])}")
    attempts = [made.folder for path in points for made in store.list_attempts(path)]
    attempts = [made for made in attempts if chosen in (None, made.name)]
    # Sort by time within a study, because attempt numbers restart with each repeat.
    return sorted(attempts, key=lambda made: (made.parent.parent, made.stat().st_mtime))


def _list_logs(attempt: Path) -> Iterator[Path]:
    """Yield the log of an attempt and the logs of the job that ran it. Missing logs are skipped."""
    if (attempt / store.LOG).is_file():
        yield attempt / store.LOG
    try:
        launcher = store.read_value(attempt / store.CIRCUMSTANCE, Circumstance).launcher
        origin = snapshot.AttemptOrigin.model_validate(launcher)
    except (OSError, ValueError, UserError):
        return
    if origin.job:
        yield from _list_logs_of_job(attempt.parent.parent / jobs.FOLDER / origin.job, origin.task)


def _list_logs_of_job(folder: Path, task: int | None) -> list[Path]:
    return sorted(path for path in folder.glob("*.log" if task is None else f"*_{task}.log") if path.is_file())


def _check_rank(attempt: Path, rank: int) -> None:
    """Raise UserError if an attempt has no such rank."""
    with contextlib.suppress(OSError, store.Unreadable):
        spec = store.read_value(attempt / store.SPEC, RunSpec)
        ranks = spec.nodes * spec.devices_per_node
        if rank >= ranks:
            remedy = f"choose a rank from 0 to {ranks - 1}"
            raise UserError(f"--rank {rank}", f"the run has {format_count(ranks, 'rank')}", remedy)


def _read_lines(path: Path, rank: int | None) -> list[str]:
    try:
        lines = jobs.read_end(path, _END_BYTES)
    except OSError as error:
        return [f"cannot be read: {error.strerror or error}"]
    return lines if rank is None else [line for line in lines if line.startswith(f"[{rank}] ")]


def _follow(attempt: Path, rank: int | None) -> None:
    """Print new lines of an attempt's log until the attempt has a record, or until Ctrl-C."""
    path, prefix = attempt / store.LOG, b"" if rank is None else b"[%d] " % rank
    position, rest = path.stat().st_size if path.exists() else 0, b""
    while True:
        # Look for the record before reading: log lines written before the record are then read in this last pass.
        ended = (attempt / store.RECORD).exists()
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                added = file.read()
            position += len(added)
            *lines, rest = (rest + added).split(b"\n")
            for line in lines:
                if line.startswith(prefix):
                    print(make_printable(line.decode(errors="replace")), flush=True)
        if ended:
            return
        time.sleep(_POLL_S)
