"""Handing a job to Slurm, and taking it back."""

import re
import time
from collections.abc import Iterable

from bench import store
from bench.errors import UserError
from bench.launchers.slurm import queue
from bench.launchers.slurm.programs import build_user_environment, call
from bench.launching import LaunchPlan
from bench.scheduling import SchedulerAway

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


def submit(launch: LaunchPlan) -> str:
    """Write the script and submit it; return the job's number. Raise UserError with Slurm's words if it refuses, and
    SchedulerAway if it does not answer for half a minute."""
    for path, text in launch.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    script = "".join(launch.files.values())
    try:
        return _call_sbatch(launch, script)
    except SchedulerAway as error:
        away = error
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        try:
            # It may have taken the job and died, or been too slow, before it could say so.
            return queue.find_number(_find_name(script)) or _call_sbatch(launch, script)
        except SchedulerAway as error:
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
    except SchedulerAway:
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
        except SchedulerAway:
            raise
        except UserError as error:
            if not _ENDED.search(error.rule):
                raise
