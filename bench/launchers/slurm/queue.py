"""Jobs of Slurm: submitted, canceled, and their states asked for, of all of them at once."""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from bench.core import store
from bench.core.errors import UserError
from bench.core.scheduling import JobState, LaunchPlan, SchedulerUnavailable
from bench.launchers.slurm import states
from bench.launchers.slurm.cluster import read_config
from bench.launchers.slurm.programs import build_user_environment, call

_ACCOUNTED = "now-30days"  # sacct by itself looks back to midnight
_NAMES_BYTES = 64_000  # more than that is not put on a command line
_LOG_BYTES = 64 * 2**20  # from the end of a completion log, which may be years long
_PAUSES_S = (2, 4, 8, 16)  # a controller that restarts, or is busy, is back within half a minute
_AT_ONCE = 1000  # jobs of one call of scancel
_ENDED = re.compile(r"invalid job id|already complet", re.IGNORECASE)
_UNKNOWN = {
    "account": (r"invalid account", "`sacctmgr show assoc where user=$USER` lists yours, and for which partitions"),
    "qos": (r"invalid qos", "`sacctmgr show assoc where user=$USER format=account,qos` lists yours"),
    "partition": (r"invalid partition", "`sinfo --summarize` lists what there is"),
}
"""For options of a site, the words with which sbatch refuses them, and how to learn what it takes."""
_OTHER_NAMES = {"TIME": "TIMELIMIT", "ARRAY": "ARRAY_INX"}
_NEVER_MEANT = ("SBATCH_ARRAY_INX", "SBATCH_DEPENDENCY", "SBATCH_CLUSTERS")
"""Variables of the user's shell that would make another job of any script: an array, one that waits, one elsewhere.
SLURM_CLUSTERS chooses a cluster for all of Slurm's programs alike."""


def ask(names: Collection[str]) -> dict[tuple[str, int | None], JobState]:
    """Return the state of every job of these names by (name, task of an array or None); a name that is missing is one
    that Slurm answers it does not know. Raise SchedulerUnavailable if it does not answer.

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


def submit(launch: LaunchPlan) -> str:
    """Write the script and submit it; return the job's number. Raise UserError with Slurm's words if it refuses, and
    SchedulerUnavailable if it does not answer for half a minute."""
    for path, text in launch.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    script = "".join(launch.files.values())
    try:
        return _call_sbatch(launch, script)
    except SchedulerUnavailable as error:
        away = error
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        try:
            # It may have taken the job and died, or been too slow, before it could say so.
            return find_number(_find_name(script)) or _call_sbatch(launch, script)
        except SchedulerUnavailable as error:
            away = error
    raise away


def _call_sbatch(launch: LaunchPlan, script: str) -> str:
    environment = build_user_environment() | launch.environment
    for variable in _NEVER_MEANT:
        environment.pop(variable, None)
    for option in re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE):  # what the script says is what is meant
        variable = option.replace("-", "_").upper()
        environment.pop(f"SBATCH_{_OTHER_NAMES.get(variable, variable)}", None)
    try:
        return call(*launch.command, environment=environment).strip().partition(";")[0]
    except SchedulerUnavailable:
        raise
    except UserError as error:
        raise _explain(error, script, launch.command[-1]) from error


def _explain(error: UserError, script: str, path: str) -> UserError:
    """Return sbatch's refusal with the option that it is about, where its words tell that."""
    for option, (words, remedy) in _UNKNOWN.items():
        if re.search(words, error.rule, re.IGNORECASE):
            written = re.search(rf"^#SBATCH --{option}=(.*)$", script, re.MULTILINE)
            return UserError(f"launcher.{option}={written[1] if written else 'null'}", error.rule, remedy)
    return UserError(error.value, error.rule, error.remedy or f"the script is {path}")


def _find_name(script: str) -> str:
    found = re.search(r"^#SBATCH --job-name=(\S+)$", script, re.MULTILINE)
    assert found, "a script without a name"
    return found[1]


def cancel_all(handles: Iterable[str]) -> None:
    """Cancel jobs, and all tasks of arrays, those that have ended meanwhile excepted."""
    numbers = list(dict.fromkeys(handles))
    for begin in range(0, len(numbers), _AT_ONCE):
        try:
            call("scancel", "--quiet", *numbers[begin : begin + _AT_ONCE])
        except SchedulerUnavailable:
            raise
        except UserError as error:
            if not _ENDED.search(error.rule):
                raise
