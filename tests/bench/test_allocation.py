"""Tests of the processes of an allocation (a job that runs many points on its nodes). The test starts these processes
without a scheduler: the leader for the first node, and an agent for a second node."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from started_runs import ENDLESS, PATIENCE_S, QUICK, Command, alive

from bench.config import compose
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance, Limits, Network, Outcome, RunRecord
from bench.core.spec import RunSpec, config_id
from bench.sweep import jobs, snapshot
from bench.sweep.definition import RequestedRun
from bench.sweep.jobs import Job
from bench.sweep.pruning import find_siblings

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def requested(
    *overrides: str, quick: Sequence[str] = QUICK, repeat: int = 0, limit_min: float = 2, control: bool = False
) -> RequestedRun:
    chosen = overrides if any(word.startswith("engine=") for word in overrides) else ("engine=ddp", *overrides)
    spec = compose.compose_request(compose.parse_single([*quick, "machine=cpu", *chosen])).spec
    circumstance = Circumstance(
        study="s",
        repeat=repeat,
        attempt=0,
        machine=Machine(name="cpu", device="cpu"),
        launcher={"name": "slurm"},
        limits=Limits(time_limit_min=limit_min, startup_s=PATIENCE_S),
        network=Network(rendezvous_host="127.0.0.1", interface="lo"),
    )
    return RequestedRun(spec=spec, circumstance=circumstance, config_id=config_id(spec), control=control)


class Allocation:
    """A job whose processes are started as `srun` starts them: one per node, with Slurm's environment variables."""

    def __init__(
        self, study: Path, points: list[RequestedRun], nodes: int = 1, attempts: int | None = None, **environment: str
    ) -> None:
        more: dict[str, Any] = {"control": next((p for p in points if p.control), None), "attempts": attempts}
        job = Job(
            name="s-1", mode="packed", nodes=nodes, devices_per_node=points[0].spec.devices_per_node, time_limit_min=30,
            points=tuple(point for point in points if not point.control), **more,
        )  # fmt: skip
        self.study, self.folder = study, jobs.write(study, job)
        environment = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "1", **environment}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.sweep.allocation", str(self.folder)],
                env=os.environ | environment | {"SLURM_PROCID": str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(nodes)
        ]

    def end(self) -> str:
        """Wait until all processes have ended, and return the output of the leader, which runs on the first node."""
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in self.processes]
        return outputs[0]

    def records(self) -> list[RunRecord]:
        found = [store.read_record(path) for path in store.find_records([self.study])]
        return sorted(found, key=lambda record: (record.circumstance.started_at, record.circumstance.attempt))


def at(folder: Path, point: RequestedRun) -> list[store.RunAttempt]:
    return store.list_attempts(folder / point.config_id)


def test_points_run_in_new_processes_between_two_control_points(tmp_path: Path) -> None:
    """A control point is a reference configuration that a job runs before and after its points, to detect whether the
    nodes became slower. The job's environment variables are larger than a single message to the fork server, which
    starts the ranks."""
    two, four, control = requested("engine=zero2"), requested("engine=ddp"), requested("engine=zero1", control=True)
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(4)}
    allocation = Allocation(tmp_path, [two, four, control], **large)
    allocation.end()
    records = allocation.records()
    assert [record.spec.engine.name for record in records] == ["zero1", "zero2", "ddp", "zero1"]
    assert {record.outcome.kind for record in records} == {"ok"}
    marks = [record.circumstance.launcher["control"] for record in records]
    assert marks == [True, False, False, True]
    assert [a.folder.name for a in at(tmp_path, control)] == ["0.0", "1.0"], "each its own repeat"
    [(_, spent)] = jobs.list_allocations(allocation.folder)
    assert spent.ended_at and spent.ended_at > spent.began_at


def test_forked_rank_measures_the_same_as_a_newly_started_rank(tmp_path: Path) -> None:
    point = requested("engine=zero2", "devices_per_node=2", "data=text")
    cold = Command(tmp_path / "cold", [*QUICK, "machine=cpu", "engine=zero2", "devices_per_node=2", "data=text"])
    fresh = cold.record()
    allocation = Allocation(tmp_path / "packed", [point], OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    allocation.end()
    [forked] = allocation.records()
    assert forked.config_id == fresh.config_id and forked.environment and fresh.environment
    assert forked.environment.environment_id == fresh.environment.environment_id
    a, b = forked.observations, fresh.observations
    assert a and b and a.steps and b.steps
    common = min(len(a.steps.loss), len(b.steps.loss))
    assert a.steps.loss[:common] == b.steps.loss[:common], "bitwise"
    resident = [memory.resident_bytes for memory in b.memory]
    assert [memory.resident_bytes for memory in a.memory] == pytest.approx(resident, rel=1e-4)
    # With overlap_comm, the memory peak depends on the moment when gloo's threads free a bucket of fp32 gradients.
    bucket_bytes = 4 * int(b.engine_config["zero_optimization"]["reduce_bucket_size"])
    peaks = [memory.peak_allocated_bytes for memory in b.memory]
    assert [memory.peak_allocated_bytes for memory in a.memory] == pytest.approx(peaks, abs=bucket_bytes)
    assert a.collectives == b.collectives and a.engine_config == b.engine_config


def test_two_nodes_or_one_task_per_device_run_the_points_together(tmp_path: Path) -> None:
    points = [
        requested("nodes=2", "devices_per_node=1", "batch.micro=2"),
        requested("nodes=2", "devices_per_node=1", "batch.micro=3"),
    ]
    allocation = Allocation(tmp_path, points, nodes=2)
    allocation.end()
    assert [record.outcome.kind for record in allocation.records()] == ["ok", "ok"]
    assert [process.returncode for process in allocation.processes] == [0, 0]


def test_answered_pruned_exhausted_or_too_long_points_are_not_run(tmp_path: Path) -> None:
    """A requeued job starts again and skips four kinds of points: those with a final result, those pruned because a
    smaller micro-batch ran out of memory, those without attempts left, and those that take longer than the rest of the
    job's time. The job's log has a reason for each skipped point."""
    done, used_up = requested("batch.micro=5"), requested("batch.micro=6")
    long, short = requested("batch.micro=7", limit_min=60), requested("batch.micro=8")
    small, large = (requested("engine=fsdp", f"batch.micro={micro}") for micro in (3, 4))
    kin = find_siblings((point.key, point.spec.model_dump(mode="json")) for point in (small, large))
    small, large = (point.model_copy(update={"kin": kin[point.key[:2]]}) for point in (small, large))
    killed = Outcome(kind="error", reason="rank 0 was killed by SIGKILL")
    before = ((done, Outcome(kind="oom"), 1), (used_up, killed, 2), (small, Outcome(kind="oom"), 2))
    for point, outcome, attempts in before:
        for _ in range(attempts):
            opened = store.open_attempt(tmp_path / point.config_id, point.spec, point.circumstance)
            store.finalize(opened.folder, outcome)
    points = [done, long, used_up, small, large, short]
    output = Allocation(tmp_path, points, attempts=2, SLURM_RESTART_COUNT="1").end()
    assert "already has a final result" in output and "waits for another job" in output
    assert "after 2 attempts; the last: rank 0 was killed by SIGKILL" in output
    [pruned] = at(tmp_path, large)
    assert pruned.outcome == "pruned" and f"{small.config_id}/0.1" in pruned.reason and pruned.reason in output
    assert [len(at(tmp_path, point)) for point in (done, long, used_up, small)] == [1, 0, 2, 2]
    assert [attempt.outcome for attempt in at(tmp_path, short)] == ["ok"], "a shorter one fits"


@pytest.mark.thorough
def test_interrupted_allocation_leaves_notes_but_no_record_or_process(tmp_path: Path) -> None:
    point = requested(quick=ENDLESS)
    allocation = Allocation(tmp_path, [point, requested()])
    heartbeat = _stepping(tmp_path / point.config_id / "0.0", point.spec)
    allocation.processes[0].send_signal(signal.SIGTERM)
    allocation.end()
    folder = tmp_path / point.config_id / "0.0"
    interrupted = json.loads((folder / store.INTERRUPTED).read_bytes())
    assert interrupted["signal"] == "SIGTERM" and not (folder / store.RECORD).exists()
    kept = sorted(path.name for path in folder.iterdir())
    assert store.STEPS in kept, f"the steps so far are kept: {kept}, {(folder / store.LOG).read_text()[-2000:]}"
    assert pq.read_table(folder / store.STEPS).num_rows >= 6
    assert alive([rank["pid"] for rank in heartbeat["ranks"]]) == []
    assert allocation.records() == [], "nothing else was begun"


@pytest.mark.thorough
def test_leftover_processes_of_ranks_are_reaped(tmp_path: Path) -> None:
    """Data loader processes run a little longer than the rank that started them. When the rank has ended, the leader of
    the allocation becomes their parent process. The leader must wait for their end, so that they do not stay as
    zombies."""
    last = requested("devices_per_node=1", quick=ENDLESS)
    loading = [requested("devices_per_node=1", "data.workers=2", f"batch.micro={micro}") for micro in (2, 3)]
    allocation = Allocation(tmp_path, [*loading, last])
    [leader] = allocation.processes
    _stepping(tmp_path / last.config_id / "0.0", last.spec)
    stats = [_stat(path) for path in Path("/proc").glob("[0-9]*/stat")]
    assert ["Z", str(leader.pid)] not in stats and leader.poll() is None
    leader.send_signal(signal.SIGTERM)
    allocation.end()
    assert [record.outcome.kind for record in allocation.records()] == ["ok", "ok"]


@pytest.mark.cold
@pytest.mark.thorough
def test_killed_fork_server_is_restarted_for_the_next_point(tmp_path: Path) -> None:
    """A fork server on each node starts the ranks of each point. While a point runs, the test kills the fork servers of
    both nodes. Both nodes must stay in the job, and the next point must run normally."""
    shape = ("nodes=2", "devices_per_node=1")
    first = requested(*shape, quick=ENDLESS)
    allocation = Allocation(tmp_path, [first, requested(*shape)], nodes=2)
    beat = _stepping(tmp_path / first.config_id / "0.0", first.spec)
    supervisors, ranks = {str(process.pid) for process in allocation.processes}, {rank["pid"] for rank in beat["ranks"]}
    servers = {int(path.parent.name) for path in _stats() if supervisors & set(_stat(path)[1:])} - ranks
    assert len(servers) == 2
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    while any(_stat(Path(f"/proc/{pid}/stat"))[:1] not in ([], ["Z"]) for pid in servers):
        time.sleep(0.05)  # a killed process needs a moment to free its memory
    os.kill(beat["ranks"][1]["pid"], signal.SIGKILL)
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in allocation.processes]
    assert [record.outcome.kind for record in allocation.records()] == ["error", "ok"], outputs
    assert [process.returncode for process in allocation.processes] == [0, 0]


def _stats() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*/stat"))


def _stat(path: Path) -> list[str]:
    """Read /proc/<pid>/stat. Return the state letter of the process and the id of its parent, or an empty list if the
    process has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()[:2]
    except OSError:  # the process has ended meanwhile
        return []


def _stepping(folder: Path, spec: RunSpec) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        time.sleep(0.2)
        try:
            beat: dict[str, Any] = json.loads((folder / store.HEARTBEAT).read_bytes())
        except (OSError, ValueError):
            continue
        if len(beat["ranks"]) == spec.world_size and all(rank["step"] >= 6 for rank in beat["ranks"]):
            return beat
    raise AssertionError("the run did not get there in time")


def test_job_with_a_shorter_time_limit_than_planned_starts_no_point_that_does_not_fit(tmp_path: Path) -> None:
    """Slurm 22.05 does not set SLURM_JOB_END_TIME. Its job was submitted by hand, with the option --time=2."""
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\ndate --date='2 minutes' +%FT%T\n")
    squeue.chmod(0o755)
    allocation = Allocation(tmp_path / "study", [requested()], PATH=f"{squeue.parent}:{os.environ['PATH']}")
    assert "the job has 1." in allocation.end() and allocation.records() == []


@pytest.mark.thorough
def test_superseded_start_of_a_job_ends_after_a_requeue(tmp_path: Path) -> None:
    """If Slurm loses contact to a node (its slurmd), it requeues the job, although the processes of the job's first
    start still run on that node. When the job starts a second time, the processes of the first start must notice it and
    end."""
    point = requested("devices_per_node=1", quick=ENDLESS)
    old = Allocation(tmp_path, [point, requested("devices_per_node=1")])
    _stepping(tmp_path / point.config_id / "0.0", point.spec)
    jobs.begin_allocation(old.folder, jobs.AllocationPeriod("1", None, 1, 1, time.time(), None))
    assert "the scheduler has requeued this job, and start 1 of it runs now" in old.end()
    [record] = old.records()
    assert record.outcome.kind == "node_failure" and "has requeued this job" in record.outcome.reason
    assert [process.returncode for process in old.processes] == [1]


def test_attempt_of_an_earlier_start_does_not_block_a_later_start(tmp_path: Path) -> None:
    point = requested()

    def ours(found: snapshot.UnfinishedAttempt) -> bool:
        return found.job == "s-1"

    place = {"name": "slurm", "job": "s-1", "restart": 0}
    circumstance = point.circumstance.model_copy(update={"launcher": place})
    folder = store.open_attempt(tmp_path / point.config_id, point.spec, circumstance).folder.parent
    assert snapshot.find_rival_attempt(folder, point.key)
    assert snapshot.find_rival_attempt(folder, point.key, ours=ours) is None


@pytest.mark.cold
def test_allocation_ended_during_its_start_reports_one_line(tmp_path: Path) -> None:
    points = [requested("nodes=2", "devices_per_node=1")]
    allocation = Allocation(tmp_path, points, nodes=2)
    parents = {str(process.pid) for process in allocation.processes}
    while not parents <= {parent for path in _stats() for parent in _stat(path)[1:]}:
        time.sleep(0.05)  # wait until both have started a fork server, whose imports take seconds
    for process in allocation.processes:
        process.send_signal(signal.SIGTERM)
    output = "".join(process.communicate(timeout=PATIENCE_S)[0] for process in allocation.processes)
    assert "Traceback" not in output and allocation.records() == [], output


def test_missing_job_folder_is_reported_as_not_shared(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.sweep.allocation", str(tmp_path / "runs/s/jobs/s-1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "does not exist on this node: put --results into a folder that all nodes share" in done.stderr
