"""Slurm's own programs, called with a clean environment and quoted when they refuse; what Slurm's variables tell a
process of the job that it is in, and how a job starts more processes.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from bench.core.errors import UserError
from bench.core.scheduling import JobContext, SchedulerUnavailable

_AWAY = re.compile(
    r"unable to (contact|establish)|timed out|connection (refused|reset)|zero bytes were transmitted|not connected"
    r"|standby mode|no route to host",
    re.IGNORECASE,
)
"""Words with which a program says that it got no answer, not that the answer is no."""
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_ANSWER_S = 200.0  # the programs give up before: after seconds in general, sbatch after two minutes at a full queue
_JOB_VARIABLES = re.compile(
    r"SLURM_(JOB_(ID|NAME|PARTITION|NODELIST|NUM_NODES)|ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|RESTART_COUNT)"
)


def build_user_environment() -> dict[str, str]:
    """Return this process's environment, without what the job that it may be part of is known by: `srun` would take
    that job's number of tasks, or its memory, for the wish of the next."""
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {key: value for key, value in os.environ.items() if not key.startswith("SLURM") or key in _KEPT}


def call(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a program of Slurm and return its output; SchedulerUnavailable if Slurm does not answer, UserError with its
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
        raise SchedulerUnavailable(command[0], f"no answer within {_ANSWER_S:.0f} s", "try again later") from error
    if done.returncode == 0:
        return done.stdout
    lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
    words = "; ".join(line for line in lines if line) or f"exit code {done.returncode}"
    if _AWAY.search(words):
        raise SchedulerUnavailable(command[0], words, "try again later")
    raise UserError(command[0], words)


def _build_plain_environment() -> dict[str, str]:
    """Return an environment in which answers look the same for every user."""
    personal = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
    kept = {key: value for key, value in build_user_environment().items() if not key.startswith(personal)}
    return kept | {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}


def context(environment: Mapping[str, str]) -> JobContext | None:
    """Return where in a job of Slurm the process is that `srun`, or a job's script, started with this environment."""
    if "SLURM_JOB_ID" not in environment:
        return None
    cores = environment.get("SLURM_CPUS_PER_TASK", "")
    task, ends_at = environment.get("SLURM_ARRAY_TASK_ID"), environment.get("SLURM_JOB_END_TIME")
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return JobContext(
        job_id=environment["SLURM_JOB_ID"],
        name=environment.get("SLURM_JOB_NAME", ""),
        number=int(environment.get("SLURM_PROCID", 0)),
        processes=int(environment.get("SLURM_STEP_NUM_TASKS", 1)),
        nodes=int(nodes),
        cluster=environment.get("SLURM_CLUSTER_NAME", ""),
        nodelist=environment.get("SLURM_JOB_NODELIST", ""),
        task=None if task is None else int(task),
        restart=int(environment.get("SLURM_RESTART_COUNT", 0)),
        cores=int(cores) if cores.isdigit() else None,
        ends_at=float(ends_at) if ends_at else None,
        variables={name: value for name, value in environment.items() if _JOB_VARIABLES.fullmatch(name)},
    )


def spread(command: Sequence[str], nodes: int) -> list[str]:
    """Return what starts one process per node of this job, each with all that the job has there."""
    options = ["--overlap", "--kill-on-bad-exit=1", "--export=ALL", "--cpu-bind=none"]
    shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *options, *shape, *command]
