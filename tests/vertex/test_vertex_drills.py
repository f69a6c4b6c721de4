"""Tests of launcher=vertex with real runs and injected faults. The machines of a job share only a bucket, and no file
system. Service and bucket are simulated on this machine."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vertex_server import LOST, QUOTA, STOCKOUT, Fault, VertexServer, grpc
from vertex_study import LONG, QUICK, Study

from tests.bench.storage_emulator import StorageEmulator, emulated_bucket

pytestmark = [pytest.mark.processes, pytest.mark.cold, pytest.mark.timeout(600)]

TWO = ("nodes=2",)


@pytest.fixture
def bucket() -> Iterator[tuple[str, StorageEmulator]]:
    with emulated_bucket() as found:
        yield found


@pytest.fixture
def study(bucket: tuple[str, StorageEmulator], tmp_path: Path) -> Iterator[Study]:
    server = VertexServer(tmp_path / "machines", environment={"OMP_NUM_THREADS": "1"})
    yield Study(server, bucket[0], tmp_path / "results")
    server.close()


def test_a_study_on_two_machines_is_answered_after_a_submission_whose_answer_was_lost(study: Study) -> None:
    study.server.faults["Create"].append(Fault(acts=True))
    study("sweep", *study.words(*QUICK, *TWO, "batch.micro=2,4", "launcher.price_per_node_hour=100"))
    assert len(study.server.find()) == 1, "two points in one job, which was requested once"
    study("status", str(study.folder), "--wait")
    (job,) = study.server.find()
    assert job.state.name == "JOB_STATE_SUCCEEDED", study.describe()
    study.check(points=2)
    for record in study.records():
        job_of_run = record.environment and record.environment.job
        assert job_of_run and (job_of_run.job_id, job_of_run.nodelist) == ("1", "127.0.0.1,127.0.0.2")
        assert record.observations and len(record.observations.memory) == 2, "one rank on each machine"
    cost = re.search(r"(\S+) node-hours spent at a cost of (\S+), 0 jobs", study("status", str(study.folder)))
    assert cost and 0 < float(cost[2]) == pytest.approx(100 * float(cost[1]), abs=0.5)
    assert "repeat 0: ok" in (study.folder / "jobs" / job.display_name / "job.log").read_text()
    assert "nothing to submit" in study("resume", str(study.folder))


@pytest.mark.parametrize(
    ("message", "warns", "outcome"), [(LOST, False, "node_failure"), (STOCKOUT, True, "preempted")],
    ids=["lost", "preempted"],
)  # fmt: skip
def test_the_point_of_a_lost_machine_runs_again(message: str, warns: bool, outcome: str, study: Study) -> None:
    study("sweep", *study.words(*LONG, *TWO))
    study.server.lose_machine(study.wait_for_steps(), 1, message, warns=warns)
    assert "1 waiting" in study("status", str(study.folder), "--wait", code=1)
    assert study.list_outcomes() == [outcome]
    # The second attempt is stopped by `cancel`, because the point itself would run for minutes.
    study("resume", str(study.folder))
    study.wait_for_steps()
    assert "cancelled: projects/my-project/locations/us-central1/customJobs/2" in study("cancel", str(study.folder))
    study.wait_for_jobs()
    study("status", str(study.folder), code=1)
    assert study.list_outcomes() == [outcome, "cancelled"]


def test_a_quota_is_reported_in_one_line_and_the_sweep_can_be_repeated(study: Study) -> None:
    study.server.faults["Create"].append(Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, QUOTA))
    told = study("sweep", *study.words(*QUICK), code=2)
    assert QUOTA in told and told.count("\n") == 1
    study("sweep", *study.words(*QUICK))
    study.wait_for_jobs()
    study.check(points=1)


def test_a_bucket_that_is_away_during_a_run_loses_no_record(study: Study, bucket: tuple[str, StorageEmulator]) -> None:
    study("sweep", *study.words(*QUICK, *TWO, "measure.window_s=15"))
    study.wait_for_steps()
    bucket[1].set_away(away=True)
    back = threading.Timer(25.0, bucket[1].set_away, kwargs={"away": False})
    back.start()
    time.sleep(20.0)
    assert study.server.find("RUNNING"), study.describe()
    back.join()
    study.wait_for_jobs()
    study.check(points=1)


def test_two_submitters_of_one_study_run_no_point_twice(study: Study, tmp_path: Path) -> None:
    other = Study(study.server, study.bucket, tmp_path / "other")
    processes = [one.start("sweep", *one.words(*QUICK, "batch.micro=2,4")) for one in (study, other)]
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
    study.wait_for_jobs()
    for one in (study, other):
        one.check(points=2)
