"""What Slurm's variables tell a process of the job that it is in, and how a job starts more processes."""

import re
from collections.abc import Mapping, Sequence

from bench.scheduling import JobContext

_KEPT = re.compile(r"SLURM_(JOB_(ID|NAME|PARTITION|NODELIST|NUM_NODES)|ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|RESTART_COUNT)")


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
        variables={name: value for name, value in environment.items() if _KEPT.fullmatch(name)},
    )


def spread(command: Sequence[str], nodes: int) -> list[str]:
    """Return what starts one process per node of this job, each with all that the job has there."""
    options = ["--overlap", "--kill-on-bad-exit=1", "--export=ALL", "--cpu-bind=none"]
    shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *options, *shape, *command]
