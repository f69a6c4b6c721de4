"""Jobs of Slurm: submit and cancel them, and read the states of all of them at once."""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from bench.core import store
from bench.core.errors import UserError
from bench.core.scheduling import JobState, LaunchPlan, SchedulerUnavailable
from bench.launchers.slurm import states
from bench.launchers.slurm.cluster import build_user_environment, call, read_config

_LOGGER = logging.getLogger(__name__)
# By default sacct reports jobs since midnight only.
_ACCOUNTED = "now-30days"
# Bytes of names on a command line: the kernel allows some 128 kB per argument.
_NAMES_BYTES = 64_000
# Bytes that are read from the end of a completion log, which may hold years of jobs.
_LOG_BYTES = 64 * 2**20
# A controller that restarts, or is busy, answers again within half a minute.
_PAUSES_S = (2, 4, 8, 16)
_AT_ONCE = 1000  # jobs per call of scancel
_ENDED = re.compile(r"invalid job id|already complet", re.IGNORECASE)
_UNKNOWN = {
    "account": (r"invalid account", "`sacctmgr show assoc where user=$USER` lists yours, and for which partitions"),
    "qos": (r"invalid qos", "`sacctmgr show assoc where user=$USER format=account,qos` lists yours"),
    "partition": (r"invalid partition", "`sinfo --summarize` lists the partitions"),
}
"""By option of a site: words with which sbatch refuses it, and how to list its valid values."""
_OTHER_NAMES = {"TIME": "TIMELIMIT", "ARRAY": "ARRAY_INX"}
_NEVER_MEANT = ("SBATCH_ARRAY_INX", "SBATCH_DEPENDENCY", "SBATCH_CLUSTERS")
"""Variables of the user's shell that would turn any script into an array, a dependent job, or a job elsewhere.
SLURM_CLUSTERS is kept: it chooses a cluster for all of Slurm's programs alike."""


def ask(names: Collection[str]) -> dict[tuple[str, int | None], JobState]:
    """Return the state of every job of these names by (name, task of an array or None).

    A job that is missing is unknown to Slurm. Raise SchedulerUnavailable if Slurm does not answer. Three sources are
    read in turn, each once: the queue, and for jobs that it has forgotten accounting and the completion log, where
    the site has them. The queue may have forgotten some tasks of an array, so arrays are always looked up in all three.
    `scontrol show job` forgets jobs at the same moment as the queue, and is of no use.
    """
    wanted = frozenset(names)
    found: dict[tuple[str, int | None], JobState] = {}
    sources: tuple[Callable[[frozenset[str]], Iterable[JobState]], ...] = (
        lambda unknown: list_queued(),
        _read_accounting,
        lambda unknown: _read_completion_log(),
    )
    for read in sources:
        if unknown := wanted - {name for name, task in found if task is None}:
            found = states.select_latest(state for state in read(unknown) if state.name in unknown) | found
    return found


def list_queued() -> Iterable[JobState]:
    """Return every job of this user that the queue still knows, recently ended jobs included."""
    user, format_flag = f"--user={os.getuid()}", f"--Format={states.SQUEUE_FORMAT}"
    return states.parse_squeue(call("squeue", "--noheader", "--all", "--array", "--states=all", user, format_flag))


def _read_accounting(names: frozenset[str]) -> Iterable[JobState]:
    """Return the states that sacct reports; none where a site has no accounting, or none that answers here."""
    listed = ",".join(sorted(names))
    by_name = [f"--name={listed}"] if len(listed) < _NAMES_BYTES else []
    flags = ("--noheader", "--parsable2", "--allocations", "--duplicates", f"--user={os.getuid()}")
    try:
        text = call("sacct", *flags, f"--starttime={_ACCOUNTED}", f"--format={states.SACCT_FORMAT}", *by_name)
    except UserError:
        return ()
    return states.parse_sacct(text)


def _read_completion_log() -> Iterable[JobState]:
    """Return the states in the completion log, if it is a file that can be read here."""
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
    """Write the script and submit it; return the job's number.

    Raise UserError with Slurm's message if it refuses, and SchedulerUnavailable if it does not answer for half
    a minute.
    """
    for path, text in launch.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    script = "".join(launch.files.values())
    # The name identifies the job if sbatch fails after Slurm has taken it.
    found = re.search(r"^#SBATCH --job-name=(\S+)$", script, re.MULTILINE)
    assert found, "a script without a name"
    try:
        return _call_sbatch(launch, script)
    except SchedulerUnavailable as error:
        unavailable = error
    for pause_s in _PAUSES_S:
        _LOGGER.warning("%s; trying again in %g s, Ctrl-C ends it", unavailable, pause_s)
        time.sleep(pause_s)
        try:
            # The controller may have taken the job before it failed, or answered too late: look for it first.
            numbers = (state.handle for state in list_queued() if state.name == found[1])
            return max(numbers, key=int, default=None) or _call_sbatch(launch, script)
        except SchedulerUnavailable as error:
            unavailable = error
    raise unavailable


def _call_sbatch(launch: LaunchPlan, script: str) -> str:
    environment = build_user_environment() | launch.environment
    # An option in the script counts more than the variable of the same meaning in the user's shell.
    options = (name.replace("-", "_").upper() for name in re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE))
    for variable in (*_NEVER_MEANT, *(f"SBATCH_{_OTHER_NAMES.get(option, option)}" for option in options)):
        environment.pop(variable, None)
    try:
        return call(*launch.command, environment=environment).strip().partition(";")[0]
    except SchedulerUnavailable:
        raise
    except UserError as error:
        raise _explain_refusal(error, script, launch.command[-1]) from error


def _explain_refusal(error: UserError, script: str, path: str) -> UserError:
    """Return sbatch's refusal with the option that it is about, where its message tells."""
    for option, (words, remedy) in _UNKNOWN.items():
        if re.search(words, error.rule, re.IGNORECASE):
            written = re.search(rf"^#SBATCH --{option}=(.*)$", script, re.MULTILINE)
            return UserError(f"launcher.{option}={written[1] if written else 'null'}", error.rule, remedy)
    return UserError(error.value, error.rule, error.remedy or f"the script is {path}")


def cancel_all(handles: Iterable[str]) -> None:
    """Cancel jobs, and all tasks of arrays. Jobs that have ended in the meantime are no error."""
    numbers = list(dict.fromkeys(handles))
    for begin in range(0, len(numbers), _AT_ONCE):
        try:
            call("scancel", "--quiet", *numbers[begin : begin + _AT_ONCE])
        except SchedulerUnavailable:
            raise
        except UserError as error:
            if not _ENDED.search(error.rule):
                raise
