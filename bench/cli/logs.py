"""Print what was logged of a point: of its attempts, and of the jobs that had it.

  zeroscale logs 3fa9c1d27b results/runs/paper
  zeroscale logs 3fa9c1d27b/0.1 --rank 3 --lines 50
  zeroscale logs 3fa9c1d27b results/runs/paper --follow

A point is named by its config_id, the beginning of which is enough where no other begins so, and an attempt at it by
the name of its folder besides; `zeroscale status --json` and every table have both. `run.log` holds all ranks' lines,
each behind its rank. Exit code 0 if there was a log.
"""

import argparse
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.cli import options
from bench.core import store
from bench.core.errors import UserError, make_printable
from bench.core.files import RESULTS
from bench.core.record import Circumstance
from bench.sweep import jobs, snapshot
from bench.sweep.jobs import read_end

_POINT = re.compile(r"([0-9a-f]{1,10})(?:/(\d+\.\d+))?")
_LINES = 20
_END_BYTES = 2**20
_POLL_S = 0.5


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("point", metavar="POINT", help="config_id, or its beginning; /0.1 behind it is one attempt")
    help_text = f"folder of a study, or of several; default: {RESULTS}"
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="DIR", help=help_text)
    parser.add_argument("--rank", type=_parse_rank, metavar="N", help="this rank's lines alone")
    help_text = "so many of the last lines of each log; default: %(default)s"
    parser.add_argument("--lines", type=options.positive("--lines"), default=_LINES, metavar="N", help=help_text)
    parser.add_argument("--follow", action="store_true", help="go on with the last attempt's log until it has ended")


def run(args: argparse.Namespace) -> int:
    """Return 0 if there was a log."""
    point = _parse_point(args.point)
    attempts = _find_attempts(point, args.folder)
    logs = list(dict.fromkeys(log for attempt in attempts for log in _list_logs(attempt)))
    if point.attempt is None:
        logs += [log for log in _list_logs_of_jobs(point, args.folder) if log not in logs]
    if not attempts and not logs:
        rule = f"nothing was logged of such a point below {args.folder}"
        raise UserError(args.point, rule, "zeroscale status DIR --json has them all")
    for path in logs:
        rank = args.rank if path.name == store.LOG else None
        print(f"── {path}")
        for line in _read_lines(path, rank)[-args.lines :]:
            print(make_printable(line))
    if args.follow and attempts:
        _follow(attempts[-1], args.rank)
    if not logs:
        print("no log yet: " + ", ".join(str(attempt) for attempt in attempts))
    return 0 if logs else 1


class Point(NamedTuple):
    """What was named: the beginning of a config_id, and perhaps one attempt."""

    beginning: str
    attempt: str | None


def _parse_point(text: str) -> Point:
    named = _POINT.fullmatch(text)
    if not named:
        raise UserError(text, "not a point", "give its config_id, such as 3fa9c1d27b, or an attempt 3fa9c1d27b/0.1")
    return Point(named[1], named[2])


def _parse_rank(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise UserError(f"--rank {text}", "not the number of a rank", "the first is 0")


def _find_attempts(point: Point, folder: Path) -> list[Path]:
    """Return the folders of the attempts at a point, oldest first; UserError where it is not one point."""
    if not folder.is_dir():
        raise UserError(str(folder), "no such folder", f"give the folder of a study, or {RESULTS}")
    named = [path for study in _list_studies(folder) for path in study.glob(f"{point.beginning}*")]
    found = [path for path in named if path.is_dir() and re.fullmatch(r"[0-9a-f]{10}", path.name)]
    if len(names := {path.name for path in found}) > 1:
        raise UserError(point.beginning, f"{len(names)} points begin so", f"choose from {', '.join(sorted(names)[:5])}")
    attempts = [made.folder for path in found for made in store.list_attempts(path)]
    attempts = [made for made in attempts if point.attempt in (None, made.name)]
    return sorted(attempts, key=lambda made: (made.parent.parent, made.stat().st_mtime))


def _list_studies(folder: Path) -> list[Path]:
    """Return the folder itself and those in it: one of them is a study's."""
    return [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]


def _list_logs(attempt: Path) -> Iterator[Path]:
    """Yield the log of an attempt, and those of the job that made it, where they are there."""
    if (attempt / store.LOG).is_file():
        yield attempt / store.LOG
    try:
        launcher = store.read_value(attempt / store.CIRCUMSTANCE, Circumstance).launcher
        origin = snapshot.AttemptOrigin.model_validate(launcher)
    except (OSError, ValueError, UserError):
        return
    if origin.job:
        yield from _list_logs_of_job(attempt.parent.parent / jobs.FOLDER / origin.job, origin.task)


def _list_logs_of_jobs(point: Point, folder: Path) -> Iterator[Path]:
    """Yield the logs of all jobs that had a point, also of those that began no attempt."""
    for study in _list_studies(folder):
        for job in jobs.list_submitted(study)[0]:
            for key, task in job.points:
                if key.config_id.startswith(point.beginning):
                    yield from _list_logs_of_job(job.folder, task)


def _list_logs_of_job(folder: Path, task: int | None) -> list[Path]:
    return sorted(path for path in folder.glob("*.log" if task is None else f"*_{task}.log") if path.is_file())


def _read_lines(path: Path, rank: int | None) -> list[str]:
    try:
        lines = read_end(path, _END_BYTES)
    except OSError as error:
        return [f"cannot be read: {error.strerror or error}"]
    return lines if rank is None else [line for line in lines if line.startswith(f"[{rank}] ")]


def _follow(attempt: Path, rank: int | None) -> None:
    """Print what is added to the log of an attempt until it has a record, or somebody presses Ctrl-C."""
    path, prefix = attempt / store.LOG, b"" if rank is None else b"[%d] " % rank
    position, rest = path.stat().st_size if path.exists() else 0, b""
    while True:
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
