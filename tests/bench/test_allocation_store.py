"""Tests of an allocation (a job that runs many points) whose nodes share an object store instead of a file system. In
most tests, a folder of this machine simulates the store. Each node has its own work folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from started_runs import ENDLESS, PATIENCE_S
from storage_emulator import emulated_bucket
from test_allocation import requested

from bench.core import store
from bench.core.object_store import ObjectStore
from bench.core.study_store import CLAIM, StudyStore, sync
from bench.sweep import jobs
from bench.sweep.definition import RequestedRun
from bench.sweep.jobs import Job

pytestmark = [pytest.mark.timeout(300)]
processes = pytest.mark.processes

TWO_NODES = ("nodes=2", "devices_per_node=1")
ONE = ("devices_per_node=1",)


class StoredJob:
    """A job whose processes read its definition from an object store."""

    def __init__(
        self, folder: Path, name: str, points: list[RequestedRun], nodes: int = 1, url: str = "", **environment: str
    ) -> None:
        """Submit the job to the store at `url`, and start one process for each node. Their work folders are in
        `folder`. By default, the store is the subfolder `bucket` of `folder`."""
        self.url, self.work = url or f"file://{folder}/bucket/s", folder / f"work-{name}"
        job = Job(
            name=name, mode="packed", nodes=nodes, devices_per_node=points[0].spec.devices_per_node, time_limit_min=30,
            points=tuple(points),
        )  # fmt: skip
        submitter = StudyStore(ObjectStore(self.url), folder / "study")
        submitter.push_job(jobs.write(submitter.folder, job))
        more = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": name.rpartition("-")[2], **environment}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.sweep.allocation", "--store", self.url,
                 "--work", str(self.work / str(number)), name],
                env=os.environ | more | {"SLURM_PROCID": str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(nodes)
        ]  # fmt: skip

    def end(self) -> str:
        """Wait until all processes have ended, and return the output of the leader, which runs on the first node."""
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in self.processes]
        return outputs[0]

    def list(self) -> list[str]:
        """Return the names of all objects that the study has in the store."""
        return sorted(ObjectStore(self.url).list())


def wait_for(is_reached: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < until, "not reached in time"
        time.sleep(0.1)


@processes
def test_two_nodes_run_points_together_without_a_shared_folder(tmp_path: Path) -> None:
    points = [requested(*TWO_NODES, f"batch.micro={micro}") for micro in (2, 3)]
    job = StoredJob(tmp_path, "s-1", points, nodes=2)
    outputs = job.end()
    assert [process.returncode for process in job.processes] == [0, 0], outputs
    assert outputs.count("repeat 0: ok") == 2
    names = job.list()
    for point in points:
        attempt = [name.rpartition("/")[2] for name in names if name.startswith(f"{point.config_id}/0.0/")]
        expected = {CLAIM, store.SPEC, store.CIRCUMSTANCE, store.ENVIRONMENT, store.RECORD, store.STEPS, store.LOG}
        assert expected <= set(attempt)
    in_job = [name for name in names if name.startswith("jobs/")]
    assert in_job == [f"jobs/s-1/{name}" for name in ("allocation.0.1.json", "job.json", "job.log", "node1.log")]
    assert not list((job.work / "1").rglob(store.RECORD)), "the second node has its own folder"
    submitter = tmp_path / "study"
    sync(submitter, job.url)
    assert (submitter / "jobs/s-1/job.log").read_text() == outputs
    [(_, period)] = jobs.list_allocations(submitter / "jobs/s-1")
    assert period.ended_at and period.ended_at > period.began_at
    for point in points:
        [attempt_read] = store.list_attempts(submitter / point.config_id)
        assert (attempt_read.outcome, attempt_read.job) == ("ok", "s-1")
        record = store.read_record(attempt_read.folder / store.RECORD)
        assert record.observations and len(record.observations.memory) == 2
        assert [path.name for path in (submitter / point.config_id / "0.0").glob(".*")] == []


@processes
def test_two_nodes_meet_through_a_bucket_that_is_away_in_the_middle_of_the_run(tmp_path: Path) -> None:
    """The client is the real gcsfs, and the bucket is emulated. When the attempt (one try at the run) is reserved, the
    bucket begins to respond with errors. It recovers after the run's record was written to a local folder of the node.
    """
    point = requested(*TWO_NODES)
    with emulated_bucket() as (bucket, emulator):
        job = StoredJob(tmp_path, "s-1", [point], nodes=2, url=f"{bucket}/s")
        wait_for(lambda: (job.work / "1/s" / point.config_id / "0.0" / store.CIRCUMSTANCE).exists())
        emulator.set_away(away=True)
        wait_for(lambda: (job.work / "0/s" / point.config_id / "0.0" / store.RECORD).exists())
        time.sleep(1)
        assert job.processes[0].poll() is None, "the job waits for the bucket"
        emulator.set_away(away=False)
        outputs = job.end()
        assert [process.returncode for process in job.processes] == [0, 0], outputs
        assert f"{point.config_id}/0.0/{store.RECORD}" in job.list()
        assert not [name for name in job.list() if "meeting" in name]
        sync(tmp_path / "study", job.url)
    [attempt] = store.list_attempts(tmp_path / "study" / point.config_id)
    assert attempt.outcome == "ok"


@processes
def test_two_jobs_run_no_point_twice(tmp_path: Path) -> None:
    points = [requested(*ONE, f"batch.micro={micro}") for micro in (2, 3)]
    pair = [StoredJob(tmp_path, name, points) for name in ("s-1", "s-2")]
    outputs = [job.end() for job in pair]
    sync(tmp_path / "study", pair[0].url)
    for point in points:
        outcomes = [attempt.outcome for attempt in store.list_attempts(tmp_path / "study" / point.config_id)]
        assert outcomes.count("ok") == 1 and set(outcomes) <= {"ok", "cancelled"}, outputs


@processes
def test_a_record_survives_a_bucket_that_is_away_when_the_run_ends(tmp_path: Path) -> None:
    """A file takes the place of the bucket's folder, so that every access fails, as it does without a network. The job
    must wait until the test has restored the folder, and then store the record."""
    bucket, aside = tmp_path / "bucket", tmp_path / "aside"
    point = requested(*ONE)
    job = StoredJob(tmp_path, "s-1", [point])
    wait_for(lambda: (bucket / "s" / point.config_id / "0.0" / CLAIM).exists())
    bucket.rename(aside)
    bucket.write_bytes(b"")
    wait_for(lambda: (job.work / "0/s" / point.config_id / "0.0" / store.RECORD).exists())
    time.sleep(2)
    assert job.processes[0].poll() is None, "the job waits for the bucket"
    bucket.unlink()
    aside.rename(bucket)
    outputs = job.end()
    assert job.processes[0].returncode == 0, outputs
    assert store.read_record(bucket / "s" / point.config_id / "0.0" / store.RECORD).outcome.kind == "ok"


@processes
@pytest.mark.thorough
def test_a_bucket_that_stays_away_until_the_jobs_end_fails_the_job_and_leaves_the_files(tmp_path: Path) -> None:
    bucket, point = tmp_path / "bucket", requested(*ONE, limit_min=0.2)
    job = StoredJob(tmp_path, "s-1", [point], SLURM_JOB_END_TIME=str(int(time.time()) + 75))
    wait_for(lambda: (bucket / "s" / point.config_id / "0.0" / CLAIM).exists())
    bucket.rename(tmp_path / "aside")
    bucket.write_bytes(b"")
    outputs = job.end()
    assert job.processes[0].returncode == 1
    assert "does not respond" in outputs and "Traceback" not in outputs
    assert store.read_record(job.work / "0/s" / point.config_id / "0.0" / store.RECORD).outcome.kind == "ok"


@processes
def test_an_interrupted_job_uploads_its_traces(tmp_path: Path) -> None:
    point = requested(*ONE, quick=ENDLESS)
    job = StoredJob(tmp_path, "s-1", [point])
    folder = tmp_path / "bucket/s" / point.config_id / "0.0"
    wait_for(lambda: (folder / store.HEARTBEAT).exists() and b'"step"' in (folder / store.HEARTBEAT).read_bytes())
    job.processes[0].send_signal(signal.SIGTERM)
    job.end()
    assert job.processes[0].returncode == 1
    assert json.loads((folder / store.INTERRUPTED).read_bytes())["signal"] == "SIGTERM"
    assert not (folder / store.RECORD).exists(), "the scheduler knows the reason"


@processes
def test_a_restarted_job_on_a_new_machine_concludes_its_earlier_attempt(tmp_path: Path) -> None:
    point = requested(*ONE)
    lost = StudyStore(ObjectStore(f"file://{tmp_path}/bucket/s"), tmp_path / "lost machine")
    launcher = {"name": "slurm", "job": "s-1", "task": None, "restart": 0}
    circumstance = point.circumstance.model_copy(update={"launcher": launcher})
    lost.open_attempt(lost.folder / point.config_id, point.spec, circumstance)
    job = StoredJob(tmp_path, "s-1", [point], SLURM_RESTART_COUNT="1")
    outputs = job.end()
    assert job.processes[0].returncode == 0, outputs
    sync(tmp_path / "study", job.url)
    attempts = store.list_attempts(tmp_path / "study" / point.config_id)
    assert [(attempt.attempt, attempt.outcome) for attempt in attempts] == [(0, "node_failure"), (1, "ok")]


def test_a_job_that_the_store_does_not_have_is_one_line(tmp_path: Path) -> None:
    words = ["--store", f"file://{tmp_path}/bucket/s", "--work", str(tmp_path / "work"), "s-1"]
    command = [sys.executable, "-m", "bench.sweep.allocation", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"file://{tmp_path}/bucket/s: the study has no job s-1" in done.stderr


def test_job_that_cannot_start_reports_the_reason_in_its_log(tmp_path: Path) -> None:
    point = requested(*ONE, "data=text", "learning.tokens=4096", "learning.stop_after=2048")
    job = StoredJob(tmp_path, "s-1", [point])
    outputs = job.end()
    assert job.processes[0].returncode == 1 and outputs.count("\n") == 1
    assert "cannot start the job: learning.stop_after=2048: checkpoints are not copied to the object store" in outputs
    assert (tmp_path / "bucket/s/jobs/s-1/job.log").read_text() == outputs
