"""Submission and cancellation of Slurm jobs, and queries of the states of many jobs at once."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from pathlib import Path

from bench.core import store
from bench.core.errors import UserError
from bench.core.scheduling import JobContext, JobState, LaunchPlan, SchedulerUnavailable
from bench.launchers.slurm import states
from bench.launchers.slurm.cluster import build_user_environment, call, read_config
from bench.launchers.slurm.options import Options
from bench.launchers.slurm.script import quote_directive

_LOGGER = logging.getLogger(__name__)
# Start of the period that sacct reports. By default sacct reports only jobs since midnight.
_ACCOUNTED = "now-30days"
# Maximum bytes of job names on a command line. The kernel allows about 128 kB per argument.
_NAMES_BYTES = 64_000
# Bytes that are read from the end of a completion log, which may hold years of jobs.
_LOG_BYTES = 64 * 2**20
# Seconds between tries to submit a job. A controller that is restarting or busy answers again within half a minute.
_PAUSES_S = (2, 4, 8, 16)
_AT_ONCE = 1000  # jobs per call of scancel
_ENDED = re.compile(r"invalid job id|already complet", re.IGNORECASE)
_UNKNOWN = {
    "account": (r"invalid account", "`sacctmgr show assoc where user=$USER` lists your accounts and their partitions"),
    "qos": (r"invalid qos", "`sacctmgr show assoc where user=$USER format=account,qos` lists your accounts and QOS"),
    "partition": (r"invalid partition", "`sinfo --summarize` lists the partitions"),
    "constraint": (r"invalid (feature|constraint)", '`sinfo --format="%P %f"` lists the features of each partition'),
    "reservation": (
        r"reservation is invalid|invalid reservation",
        "`scontrol show reservation` lists the reservations",
    ),
    "mem": (r"memory specification", 'reduce launcher.memory_gb; `sinfo --format="%P %m"` lists the MB of the nodes'),
}
_KEYS = {"mem": "memory_gb"}
"""Option of a site by the name of sbatch's option, if the names differ."""
"""For each option of a site: a pattern of sbatch's message for a wrong value, and the command that lists the valid
values."""
_OTHER_NAMES = {"TIME": "TIMELIMIT", "ARRAY": "ARRAY_INX"}
_NEVER_MEANT = ("SBATCH_ARRAY_INX", "SBATCH_DEPENDENCY", "SBATCH_CLUSTERS")
"""Environment variables of the user that are never passed to sbatch. They would turn any script into an array, a
dependent job, or a job on another cluster. SLURM_CLUSTERS is passed, because all Slurm programs obey it."""


def ask(names: Collection[str], options: Options | None = None) -> dict[tuple[str, int | None], JobState]:
    """Return the states of all jobs with these names, by job name and array task number (None without an array).

    A job that is not in the result is unknown to Slurm. Raise SchedulerUnavailable if Slurm does not answer.

    Up to three sources are read, each once. The first source is the queue. Jobs that are no longer in the queue are
    looked up in Slurm's accounting and then in its completion log, if the site has them. Arrays are looked up in all
    three sources, because the queue may have removed only some of their tasks. `scontrol show job` is not used, because
    it does not show jobs that are no longer in the queue.
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
    """Return all jobs of this user in the queue, including jobs that ended recently."""
    user, format_flag = f"--user={os.getuid()}", f"--Format={states.SQUEUE_FORMAT}"
    return states.parse_squeue(call("squeue", "--noheader", "--all", "--array", "--states=all", user, format_flag))


def find_end(job: JobContext) -> float | None:
    """Return the time at which a job reaches its time limit, in seconds since the epoch; None if it is unknown."""
    array = job.variables.get("SLURM_ARRAY_JOB_ID")
    # The id of an array's last task is also that of the whole array, so tasks are named by their index.
    number = job.job_id if array is None else f"{array}_{job.task}"
    with contextlib.suppress(UserError, ValueError):
        end = call("squeue", "--noheader", f"--jobs={number}", "--format=%e")
        return datetime.fromisoformat(end.strip()).timestamp()
    return None


def _read_accounting(names: frozenset[str]) -> Iterable[JobState]:
    """Return the states that sacct reports for jobs with these names. Empty if the site has no accounting, or if the
    accounting does not answer."""
    listed = ",".join(sorted(names))
    by_name = [f"--name={listed}"] if len(listed) < _NAMES_BYTES else []
    flags = ("--noheader", "--parsable2", "--allocations", "--duplicates", f"--user={os.getuid()}")
    try:
        text = call("sacct", *flags, f"--starttime={_ACCOUNTED}", f"--format={states.SACCT_FORMAT}", *by_name)
    except UserError:
        return ()
    return states.parse_sacct(text)


def _read_completion_log() -> Iterable[JobState]:
    """Return the job states in Slurm's completion log; empty if there is no readable log file."""
    known = read_config()
    if known.get("JobCompType") != "jobcomp/filetxt":
        return ()
    try:
        with Path(known["JobCompLoc"]).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return states.parse_completion_log(file.read().decode(errors="surrogateescape"))
    except OSError:
        return ()


def submit(launch: LaunchPlan, options: Options | None = None) -> str:
    """Write a job script and submit it; return the job id.

    Raise UserError with Slurm's message if Slurm rejects the job. Raise SchedulerUnavailable if Slurm does not answer
    for half a minute.
    """
    for path, text in launch.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    script = "".join(launch.files.values())
    # The name identifies the job if sbatch fails after Slurm has accepted the job.
    found = re.search(r"^#SBATCH --job-name=(\S+)$", script, re.MULTILINE)
    assert found, "a script without a name"
    try:
        return _call_sbatch(launch, script, options)
    except SchedulerUnavailable as error:
        unavailable = error
    for pause_s in _PAUSES_S:
        _LOGGER.warning("%s; next try in %g s; stop with Ctrl-C", unavailable, pause_s)
        time.sleep(pause_s)
        try:
            # Look for the job first. The controller may have accepted the job before it failed, or answered too late.
            numbers = (state.handle for state in list_queued() if state.name == found[1])
            return max(numbers, key=int, default=None) or _call_sbatch(launch, script, options)
        except SchedulerUnavailable as error:
            unavailable = error
    raise unavailable


def _call_sbatch(launch: LaunchPlan, script: str, site: Options | None) -> str:
    environment = build_user_environment() | launch.environment
    # Options in the script must take precedence, so variables in the user's shell that set the same options are
    # removed.
    options = (name.replace("-", "_").upper() for name in re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE))
    for variable in (*_NEVER_MEANT, *(f"SBATCH_{_OTHER_NAMES.get(option, option)}" for option in options)):
        environment.pop(variable, None)
    try:
        return call(*launch.command, environment=environment).strip().partition(";")[0]
    except SchedulerUnavailable:
        raise
    except UserError as error:
        raise _explain_refusal(error, script, launch.command[-1], site) from error


def _explain_refusal(error: UserError, script: str, path: str, site: Options | None) -> UserError:
    """Return sbatch's error for the user. If the message shows which option of the script caused the error, the error
    names this option and a remedy; otherwise it names the script."""
    for option, (words, remedy) in _UNKNOWN.items():
        if re.search(words, error.rule, re.IGNORECASE):
            written = re.search(rf"^#SBATCH --{option}=(.*)$", script, re.MULTILINE)
            value = written[1] if written else "null"
            own = getattr(site.autopilot, option, None) if site and "-autopilot-" in path else None
            is_own = own is not None and value == quote_directive(own)
            key = f"launcher.{'autopilot.' * is_own}{_KEYS.get(option, option)}"
            return UserError(f"{key}={value}", error.rule, remedy)
    return UserError(error.value, error.rule, error.remedy or f"the script is {path}")


def cancel_all(handles: Iterable[str], options: Options | None = None) -> None:
    """Cancel jobs by their ids, including all tasks of arrays. A job that has already ended is not an error."""
    numbers = list(dict.fromkeys(handles))
    for begin in range(0, len(numbers), _AT_ONCE):
        try:
            call("scancel", "--quiet", *numbers[begin : begin + _AT_ONCE])
        except SchedulerUnavailable:
            raise
        except UserError as error:
            if not _ENDED.search(error.rule):
                raise
