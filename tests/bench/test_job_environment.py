"""Tests of how a process finds its rank and its job in environment variables. The variables of each system (such as
Slurm) are the examples from its documentation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.config.compose import compose_request, parse_single
from bench.core.errors import UserError
from bench.core.job_environment import read_job
from bench.core.scheduling import JobContext
from bench.measure.environment import classify, probe

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "paper-1",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
}


# The example of https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-spec-format, except for
# the elided job. RANK and WORLD_SIZE count nodes, as in
# https://cloud.google.com/ai-platform/training/docs/distributed-pytorch#environment_variables
def replica(pool: int, index: int, rank: int) -> dict[str, str]:
    """Environment variables of one replica in the example of CLUSTER_SPEC in Vertex AI's documentation. The example has
    eight replicas in four worker pools."""
    pools = {
        "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
        "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
        "workerpool2": ["cmle-training-workerpool2-ab-0:2222", "cmle-training-workerpool2-ab-1:2222"],
        "workerpool3": [
            "cmle-training-workerpool3-ab-0:2222",
            "cmle-training-workerpool3-ab-1:2222",
            "cmle-training-workerpool3-ab-2:2222",
        ],
    }
    task = {"type": f"workerpool{pool}", "index": index, "trial": "TRIAL_ID"}
    spec = {"cluster": pools, "environment": "cloud", "task": task, "job": {"worker_pool_specs": []}}
    rendezvous = {"MASTER_ADDR": "cmle-training-workerpool0-ab-0", "MASTER_PORT": "2222"}
    job = {"CLOUD_ML_JOB_ID": "8150763284412301312", "CLUSTER_SPEC": json.dumps(spec)}
    return {**job, **rendezvous, "RANK": str(rank), "WORLD_SIZE": "8"}


# The table and examples of https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "1.2.3.4\n1.2.3.5\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2023-07-06-21-18-31-563597_myclus_1",
}
# The third of three pods in
# https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "example-job-2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
# Names: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
# The fourth process of `torchrun --nnodes=2 --nproc-per-node=2 --rdzv-id=paper --max-restarts=3`, after one restart.
TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1.example.com",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "paper",
}
OWN = {"ZEROSCALE_JOB": '{"system": "spool", "job_id": "s-1", "name": "s-1", "ends_at": 1.7e9}'}


def read(environment: dict[str, str]) -> JobContext:
    job = read_job({"PATH": "/bin", **environment})
    assert job
    return job


def test_process_outside_a_job_has_none() -> None:
    assert read_job({"PATH": "/bin", "RANK": "1", "WORLD_SIZE": "2", "HOSTNAME": "gpu-1"}) is None


def test_recorded_job_has_scheduler_neutral_fields_and_slurms_variables() -> None:
    spec = compose_request(parse_single(["model=tiny"]), None).spec
    environment = probe(classify("cpu", 1), ("gpu1", "gpu2"), {}, read(SLURM), spec)
    assert environment.job and (environment.job.allocation, environment.job.nodelist) == ("c.7.1", "gpu[1-2]")
    assert environment.slurm == {name: SLURM[name] for name in SLURM if name not in ("SLURM_PROCID", "SLURM_CONF")}


def test_slurm_job_script_is_one_process_and_a_step_has_its_tasks() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NTASKS": "4"}
    assert read(script) == JobContext(job_id="7", nodes=4, variables={"SLURM_JOB_ID": "7"}, system="slurm")
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_END_TIME": "1700000000"}
    job = read(script | task | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"})
    assert (job.number, job.processes, job.task, job.cores, job.ends_at) == (3, 4, 3, 8, 1.7e9)


@pytest.mark.parametrize(("pool", "index", "number"), [(0, 0, 0), (1, 0, 1), (1, 1, 2), (2, 0, 3), (3, 2, 7)])
def test_vertex_replicas_are_numbered_pool_by_pool(pool: int, index: int, number: int) -> None:
    job = read(replica(pool, index, number))
    assert (job.system, job.job_id, job.number) == ("vertex", "8150763284412301312", number)
    assert (job.processes, job.nodes, len(job.hosts)) == (8, 8, 8), "WORLD_SIZE is the number of nodes"
    assert job.hosts[0] == "cmle-training-workerpool0-ab-0"
    assert job.hosts[number] == f"cmle-training-workerpool{pool}-ab-{index}"


def test_ranks_that_a_run_starts_on_vertex_read_the_job_of_their_node() -> None:
    node = replica(1, 0, 1)
    rank = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}
    assert read(node | rank) == read(node)


def test_vertex_job_without_an_id_is_identified_by_its_first_replica() -> None:
    environments = [replica(0, 0, 0), replica(1, 1, 2)]
    for environment in environments:
        del environment["CLOUD_ML_JOB_ID"]
    assert {read(environment).job_id for environment in environments} == {"cmle-training-workerpool0-ab-0"}


def test_skypilot_task_runs_once_per_node() -> None:
    job = read(SKYPILOT)
    assert (job.system, job.job_id) == ("skypilot", "sky-2023-07-06-21-18-31-563597_myclus_1")
    assert (job.number, job.processes, job.nodes, job.hosts) == (1, 2, 2, ("1.2.3.4", "1.2.3.5"))
    before_0_6 = {name: value for name, value in SKYPILOT.items() if name != "SKYPILOT_NUM_NODES"}
    assert read(before_0_6) == job


def test_kubernetes_pods_are_nodes_of_one_job_only_if_the_template_gives_their_number() -> None:
    assert read(KUBERNETES) == JobContext(job_id="example-job-2", task=2, system="kubernetes")
    together = JobContext(job_id="example-job", number=2, processes=3, nodes=3, system="kubernetes")
    assert read(KUBERNETES | {"ZEROSCALE_NODES": "3"}) == together


def test_torchrun_processes_are_numbered_over_all_nodes() -> None:
    job = JobContext(job_id="paper", number=3, processes=4, nodes=2, restart=1, system="torchrun")
    assert read(TORCHRUN) == job
    assert read(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}) == job, "in a rank of a run"
    assert read(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job_id == "", "the default of --rdzv-id identifies no job"


def test_launchers_own_variable_has_the_fields_of_a_job() -> None:
    assert read(OWN) == JobContext(job_id="s-1", name="s-1", ends_at=1.7e9, system="spool")
    fields = {"job_id": "9", "number": 1, "processes": 2, "nodes": 2, "hosts": ["a", "b"], "variables": {"ID": "9"}}
    job = read({"ZEROSCALE_JOB": json.dumps(fields)})
    assert job == JobContext("9", number=1, processes=2, nodes=2, hosts=("a", "b"), variables={"ID": "9"})


def test_job_that_owns_the_nodes_comes_before_one_that_starts_processes_on_them() -> None:
    systems = ["spool", "slurm", "vertex", "skypilot", "kubernetes", "torchrun"]
    variables = [OWN, SLURM, replica(1, 0, 1), SKYPILOT, KUBERNETES, TORCHRUN]
    for first, system in enumerate(systems):
        inside = {name: value for some in variables[first:] for name, value in some.items()}
        assert read(inside).system == system


def test_no_other_module_reads_a_position_in_a_job() -> None:
    names = re.compile(
        r'"(SLURM_(PROCID|STEP_NUM_TASKS|JOB_NUM_NODES|NNODES|ARRAY_TASK_ID|RESTART_COUNT)|CLUSTER_SPEC|SKYPILOT_\w+'
        r'|JOB_COMPLETION_INDEX|TORCHELASTIC_\w+|(GROUP|ROLE)_RANK|(GROUP|ROLE)_WORLD_SIZE)"'
    )
    files = (Path(__file__).parents[2] / "bench").rglob("*.py")
    assert [path.name for path in files if names.search(path.read_text())] == ["job_environment.py"]


def spec(**fields: Any) -> dict[str, str]:
    """Environment variables with a CLUSTER_SPEC of two replicas, of which this process is the first. `fields` replace
    fields of the CLUSTER_SPEC."""
    cluster = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}
    return {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": {"type": "workerpool0", "index": 0}, **fields})}


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (
            SLURM | {"SLURM_PROCID": "first"},
            "SLURM_PROCID='first': must be a whole number, 0 or more; unset SLURM_JOB_ID outside a job of Slurm",
        ),
        (
            {"CLUSTER_SPEC": "hf_secret"},
            "CLUSTER_SPEC: invalid JSON: expected value at line 1 column 1; "
            "unset CLUSTER_SPEC outside a job of Vertex AI",
        ),
        (spec(task={"type": "workerpool0"}), "CLUSTER_SPEC.task.index: field required; unset CLUSTER_SPEC outside"),
        (
            spec(task={"type": "workerpool1", "index": 1}),
            "CLUSTER_SPEC.task: CLUSTER_SPEC.cluster has no replica workerpool1, index 1; unset CLUSTER_SPEC outside",
        ),
        (
            spec(task={"type": "chief", "index": 0}),
            "CLUSTER_SPEC.task: CLUSTER_SPEC.cluster has no replica chief, index",
        ),
        (
            spec(cluster={"workerpool0": ["a:2222", "b:2222"]}),
            "CLUSTER_SPEC.cluster.workerpool0: has 2 replicas instead of one; unset CLUSTER_SPEC outside",
        ),
        (
            SKYPILOT | {"SKYPILOT_NODE_IPS": "1.2.3.4"},
            "SKYPILOT_NODE_IPS: lists 1 host, but the task has 2 nodes; unset SKYPILOT_NODE_RANK outside",
        ),
        (
            SKYPILOT | {"SKYPILOT_NODE_RANK": "2"},
            "SKYPILOT_NODE_RANK: impossible position: process 2 of 2 on 2 nodes, counted from 0; unset SKYPILOT_NODE",
        ),
        (
            KUBERNETES | {"ZEROSCALE_NODES": "2"},
            "ZEROSCALE_NODES: impossible position: process 2 of 2 on 2 nodes, counted from 0; "
            "set it to the field `completions` of the job in the pod template",
        ),
        (
            {name: value for name, value in TORCHRUN.items() if name != "ROLE_RANK"},
            "ROLE_RANK: is missing; unset TORCHELASTIC_RUN_ID outside a job of torchrun",
        ),
        (
            {"ZEROSCALE_JOB": '{"job_id": "7", "node": 2}'},
            "ZEROSCALE_JOB.node: extra inputs are not permitted; unset ZEROSCALE_JOB outside a job of an",
        ),
        ({"ZEROSCALE_JOB": '{"nodes": 2}'}, "ZEROSCALE_JOB: has an empty job_id; unset ZEROSCALE_JOB outside"),
        (
            {"ZEROSCALE_JOB": '{"job_id": "7", "number": 1}'},
            "ZEROSCALE_JOB: impossible position: process 1 of 1 on 1 node, counted from 0; unset ZEROSCALE_JOB outside",
        ),
    ],
)
def test_invalid_variables_are_refused_in_one_line(environment: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as error:
        read(environment)
    message = str(error.value)
    assert message.startswith(line) and "\n" not in message and "hf_secret" not in message
