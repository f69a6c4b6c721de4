"""Slurm's own programs: called with a clean environment, and quoted when they refuse."""

import os
import re
import subprocess
from collections.abc import Mapping

from bench.errors import UserError
from bench.scheduling import SchedulerAway

_AWAY = re.compile(
    r"unable to (contact|establish)|timed out|connection (refused|reset)|zero bytes were transmitted|not connected"
    r"|standby mode|no route to host",
    re.IGNORECASE,
)
"""Words with which a program says that it got no answer, not that the answer is no."""
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_ANSWER_S = 200.0  # the programs give up before: after seconds in general, sbatch after two minutes at a full queue


def build_user_environment() -> dict[str, str]:
    """Return this process's environment, without what the job that it may be part of is known by: `srun` would take
    that job's number of tasks, or its memory, for the wish of the next."""
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {key: value for key, value in os.environ.items() if not key.startswith("SLURM") or key in _KEPT}


def call(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's programs and return what it prints; SchedulerAway if Slurm does not answer, UserError with its
    own words if it refuses."""
    environment = _build_plain_environment() if environment is None else environment
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="surrogateescape", timeout=_ANSWER_S
        )
    except FileNotFoundError as error:
        remedy = "use a machine of the cluster, or load the module that has it"
        raise UserError(command[0], "Slurm's program is not on this machine", remedy) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerAway(command[0], f"no answer within {_ANSWER_S:.0f} s", "try again later") from error
    if done.returncode == 0:
        return done.stdout
    lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
    words = "; ".join(line for line in lines if line) or f"exit code {done.returncode}"
    if _AWAY.search(words):
        raise SchedulerAway(command[0], words, "try again later")
    raise UserError(command[0], words)


def _build_plain_environment() -> dict[str, str]:
    """Return an environment in which answers look the same for every user."""
    personal = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
    kept = {key: value for key, value in build_user_environment().items() if not key.startswith(personal)}
    return kept | {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
