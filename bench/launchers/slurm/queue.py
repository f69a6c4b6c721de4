"""Asking Slurm about jobs: about all of them at once, and of whoever still remembers."""

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from bench.errors import UserError
from bench.launchers.slurm import states
from bench.launchers.slurm.cluster import read_config
from bench.launchers.slurm.programs import call
from bench.scheduling import JobState

_ACCOUNTED = "now-30days"  # sacct by itself looks back to midnight
_NAMES_BYTES = 64_000  # more than that is not put on a command line
_LOG_BYTES = 64 * 2**20  # from the end of a completion log, which may be years long


def ask(names: Collection[str]) -> dict[tuple[str, int | None], JobState]:
    """Return the state of every job of these names by (name, task of an array or None); a name that is missing is one
    that Slurm answers it does not know. Raise SchedulerAway if it does not answer.

    The queue is asked first, and for what it has forgotten accounting and the completion log, each once and where the
    site has them. Of an array the queue may have forgotten some tasks and not others, so those are always looked up.
    `scontrol show job` is not asked: it forgets at the same moment as the queue.
    """
    wanted = frozenset(names)
    found: dict[tuple[str, int | None], JobState] = {}
    look_ups: tuple[Callable[[frozenset[str]], Iterable[JobState]], ...] = (
        _ask_queue,
        _ask_accounting,
        _read_completion_log,
    )
    for look_up in look_ups:
        if unknown := wanted - {name for name, task in found if task is None}:
            found = states.select_latest(state for state in look_up(unknown) if state.name in unknown) | found
    return found


def find_number(name: str) -> str | None:
    """Return the number of the job of this name, if the queue knows one."""
    return max((state.handle for state in list_queued() if state.name == name), key=int, default=None)


def list_queued() -> Iterable[JobState]:
    """Return every job of this user that the queue still knows, those that ended lately included."""
    user, format_flag = f"--user={os.getuid()}", f"--Format={states.SQUEUE_FORMAT}"
    return states.parse_squeue(call("squeue", "--noheader", "--all", "--array", "--states=all", user, format_flag))


def _ask_queue(names: frozenset[str]) -> Iterable[JobState]:
    return list_queued()


def _ask_accounting(names: frozenset[str]) -> Iterable[JobState]:
    """Return what sacct says; nothing where a site keeps no accounts, or where they cannot be asked from here."""
    listed = ",".join(sorted(names))
    by_name = [f"--name={listed}"] if len(listed) < _NAMES_BYTES else []
    period, format_flag = f"--starttime={_ACCOUNTED}", f"--format={states.SACCT_FORMAT}"
    flags = ("--noheader", "--parsable2", "--allocations", "--duplicates")
    try:
        text = call("sacct", *flags, f"--user={os.getuid()}", period, format_flag, *by_name)
    except UserError:
        return ()
    return states.parse_sacct(text)


def _read_completion_log(names: frozenset[str]) -> Iterable[JobState]:
    """Return what the completion log says, where it is a file that can be read from here."""
    known = read_config()
    if known.get("JobCompType") != "jobcomp/filetxt":
        return ()
    try:
        with Path(known["JobCompLoc"]).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return states.parse_completion_log(file.read().decode(errors="surrogateescape"))
    except OSError:
        return ()
