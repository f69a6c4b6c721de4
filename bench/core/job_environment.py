"""The scheduler's job to which a process belongs, read from the environment variables of the scheduler or launcher.

No other module reads which job a process belongs to, or which position the process has in it. Every system has its own
variables. A variable may mean different things in two systems: on Vertex AI, WORLD_SIZE is the number of nodes, and not
of ranks. The variables RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are never read here, because a run sets them
for its own ranks.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.scheduling import JobContext

OWN = "ZEROSCALE_JOB"
"""Variable that an installed launcher sets for its jobs: a JSON object with fields of JobContext."""
NODES = "ZEROSCALE_NODES"
"""Variable that a Kubernetes pod template sets if the pods of an indexed job are the nodes of a single run. Its value
is the number of pods, which is the field `completions` of the Kubernetes job. Kubernetes has no variable of its own for
this number."""
_SLURM_RECORDED = re.compile(
    r"SLURM_(JOB_(ID|NAME|PARTITION|NODELIST|NUM_NODES)|ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|RESTART_COUNT)"
)
_POOL = re.compile(r"workerpool(\d+)")
_Value = TypeVar("_Value")


def read_job(environment: Mapping[str, str]) -> JobContext | None:
    """Return the job of a process with these environment variables; None outside any job.

    If the variables of several systems are set, the first of these systems in `_SYSTEMS` counts. Raise UserError if a
    variable of that system is invalid.
    """
    for system, variable, read in _SYSTEMS:
        if variable in environment:
            try:
                return read(environment)
            except UserError as error:
                remedy = error.remedy or f"unset {variable} outside a job of {system}"
                raise UserError(error.value, error.rule, remedy) from error
    return None


def _read_own(environment: Mapping[str, str]) -> JobContext:
    """Return the job described by the variable ZEROSCALE_JOB, which launchers from installed plug-ins set."""
    job = _parse(JobContext, OWN, environment)
    if not job.job_id:
        raise UserError(OWN, "has an empty job_id")
    return _check_position(job, OWN)


def _read_slurm(environment: Mapping[str, str]) -> JobContext:
    """Return the Slurm job of a process. The process may be a task of a job step (srun), or the job script itself."""
    cores = environment.get("SLURM_CPUS_PER_TASK", "")
    is_task, ends_at = "SLURM_ARRAY_TASK_ID" in environment, environment.get("SLURM_JOB_END_TIME")
    return JobContext(
        job_id=environment["SLURM_JOB_ID"],
        name=environment.get("SLURM_JOB_NAME", ""),
        number=_read_count(environment, "SLURM_PROCID", 0),
        # SLURM_NTASKS is set in the job script as well, which is a single process.
        processes=_read_count(environment, "SLURM_STEP_NUM_TASKS", 1),
        nodes=_read_count(environment, "SLURM_JOB_NUM_NODES", _read_count(environment, "SLURM_NNODES", 1)),
        cluster=environment.get("SLURM_CLUSTER_NAME", ""),
        nodelist=environment.get("SLURM_JOB_NODELIST", ""),
        task=_read_count(environment, "SLURM_ARRAY_TASK_ID") if is_task else None,
        restart=_read_count(environment, "SLURM_RESTART_COUNT", 0),
        cores=int(cores) if cores.isdigit() else None,
        ends_at=float(_read_count(environment, "SLURM_JOB_END_TIME")) if ends_at else None,
        variables={name: value for name, value in environment.items() if _SLURM_RECORDED.fullmatch(name)},
        system="slurm",
    )


class _Task(BaseModel):
    type: str
    index: int


class _ClusterSpec(BaseModel):
    cluster: dict[str, list[str]]
    task: _Task


def _read_vertex(environment: Mapping[str, str]) -> JobContext:
    """Return the custom job of a Vertex AI replica. Each replica is a node.

    The replicas of all worker pools are numbered consecutively, one pool after the other. The first pool has one
    replica, the leader.
    """
    # https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-spec-format
    spec = _parse(_ClusterSpec, "CLUSTER_SPEC", environment)
    pools = {int(found[1]): hosts for name, hosts in spec.cluster.items() if (found := _POOL.fullmatch(name))}
    pool = int(found[1]) if (found := _POOL.fullmatch(spec.task.type)) else -1
    if len(pools.get(0, ())) != 1:
        raise UserError("CLUSTER_SPEC.cluster.workerpool0", f"has {len(pools.get(0, ()))} replicas instead of one")
    if not 0 <= spec.task.index < len(pools.get(pool, ())):
        task = f"{spec.task.type}, index {spec.task.index}"
        raise UserError("CLUSTER_SPEC.task", f"CLUSTER_SPEC.cluster has no replica {task}")
    hosts = [host.rpartition(":")[0] or host for _, some in sorted(pools.items()) for host in some]
    # The service does not document the variable with the job's id, but its own library reads it:
    # https://github.com/googleapis/python-aiplatform/blob/main/google/cloud/aiplatform/training_utils/environment_variables.py
    # The name of the first replica contains the job's identifier as well, so that it identifies the job.
    job_id = environment.get("CLOUD_ML_JOB_ID") or hosts[0]
    number = sum(len(some) for earlier, some in pools.items() if earlier < pool) + spec.task.index
    return _build_with_hosts("vertex", job_id, number, hosts)


def _read_skypilot(environment: Mapping[str, str]) -> JobContext:
    """Return the SkyPilot task of a process. SkyPilot starts a task's command once on each node."""
    # https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html
    hosts = environment.get("SKYPILOT_NODE_IPS", "").split()
    nodes = _read_count(environment, "SKYPILOT_NUM_NODES", len(hosts))  # missing before SkyPilot 0.6
    if not hosts or len(hosts) != nodes:
        rule = f"lists {format_count(len(hosts), 'host')}, but the task has {format_count(nodes, 'node')}"
        raise UserError("SKYPILOT_NODE_IPS", rule)
    number = _read_count(environment, "SKYPILOT_NODE_RANK")
    job = _build_with_hosts("skypilot", environment.get("SKYPILOT_TASK_ID", ""), number, hosts)
    return _check_position(job, "SKYPILOT_NODE_RANK")


def _read_kubernetes(environment: Mapping[str, str]) -> JobContext:
    """Return the indexed job of a Kubernetes pod.

    If the pod template sets ZEROSCALE_NODES, the pods of the indexed job are the nodes of one job. Otherwise each pod
    counts as a job with one node, like a task of a job array.
    """
    # https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    index = _read_count(environment, "JOB_COMPLETION_INDEX")
    pod = environment.get("HOSTNAME", "")  # the name of the Kubernetes job, a hyphen and the index
    if NODES not in environment:
        return JobContext(job_id=pod, task=index, system="kubernetes")
    nodes = _read_count(environment, NODES)
    job = JobContext(pod.removesuffix(f"-{index}"), number=index, processes=nodes, nodes=nodes, system="kubernetes")
    return _check_position(job, NODES, "set it to the field `completions` of the job in the pod template")


def _read_torchrun(environment: Mapping[str, str]) -> JobContext:
    """Return the job of a process that torchrun started."""
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    # All processes of torchrun have the same role. A run does not overwrite ROLE_RANK and ROLE_WORLD_SIZE, unlike RANK.
    # GROUP_WORLD_SIZE is missing in the documentation:
    # https://github.com/pytorch/pytorch/blob/main/torch/distributed/elastic/agent/server/local_elastic_agent.py
    run_id = environment["TORCHELASTIC_RUN_ID"]
    job = JobContext(
        job_id="" if run_id == "none" else run_id,  # torchrun's default, which is the same for all jobs
        number=_read_count(environment, "ROLE_RANK"),
        processes=_read_count(environment, "ROLE_WORLD_SIZE"),
        nodes=_read_count(environment, "GROUP_WORLD_SIZE"),
        restart=_read_count(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        system="torchrun",
    )
    return _check_position(job, "ROLE_RANK")


# Name of each system, a variable that is set in all of its jobs, and the function that reads its variables.
# A launcher's own variable comes first, because the launcher may itself run in another system's job. A system that owns
# nodes comes before one that starts processes on them. Pods of Vertex AI have Kubernetes' variables as well.
_SYSTEMS: tuple[tuple[str, str, Callable[[Mapping[str, str]], JobContext]], ...] = (
    ("an installed launcher", OWN, _read_own),
    ("Slurm", "SLURM_JOB_ID", _read_slurm),
    ("Vertex AI", "CLUSTER_SPEC", _read_vertex),
    ("SkyPilot", "SKYPILOT_NODE_RANK", _read_skypilot),
    ("Kubernetes", "JOB_COMPLETION_INDEX", _read_kubernetes),
    ("torchrun", "TORCHELASTIC_RUN_ID", _read_torchrun),
)


def _build_with_hosts(system: str, job_id: str, number: int, hosts: list[str]) -> JobContext:
    """Return a job with one process per node. `number` is the index of this process in the job, counted from 0. `hosts`
    are the addresses of the job's nodes, the leader's first."""
    nodes, nodelist = len(hosts), ",".join(hosts)
    return JobContext(
        job_id, number=number, processes=nodes, nodes=nodes, nodelist=nodelist, system=system, hosts=tuple(hosts)
    )


def _check_position(job: JobContext, value: str, remedy: str = "") -> JobContext:
    """Return `job` unchanged. Raise UserError if the job has no nodes, or if this process's number in the job
    (`job.number`, counted from 0) is not below the number of processes. `value` is the environment variable that the
    error names, and `remedy` is the error's advice."""
    if job.nodes < 1 or not 0 <= job.number < job.processes:
        position = f"process {job.number} of {job.processes} on {format_count(job.nodes, 'node')}"
        raise UserError(value, f"impossible position: {position}, counted from 0", remedy)
    return job


def _read_count(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the whole number in a variable, or `default` if the variable is missing. Raise UserError for any other
    value, or for a missing variable without a default."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(name, "is missing")
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text!r}", "must be a whole number, 0 or more")
    return int(text)


def _parse(kind: type[_Value], name: str, environment: Mapping[str, str]) -> _Value:
    """Return the value of type `kind` from the JSON text in the variable `name`. Raise UserError for invalid
    content."""
    try:
        return TypeAdapter(kind).validate_json(environment[name])
    except ValidationError as error:
        # Not the content: CLUSTER_SPEC contains the job's definition, which may have secrets in its variables.
        first: Any = error.errors(include_input=False, include_url=False)[0]
        message = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(".".join(map(str, (name, *first["loc"]))), message) from error
