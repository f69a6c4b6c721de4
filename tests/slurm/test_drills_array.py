"""Tests on a real Slurm with tasks of a job array that run at the same time. Each task has its own nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import ours
from slurm_testbed import PATIENCE_S, Testbed, wait_for
from sweeping import QUICK, Study

from bench.core.record import RunRecord
from bench.sweep import jobs

pytestmark = [pytest.mark.thorough, pytest.mark.processes]

_QUICK_TO_SCHEDULE = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"


@pytest.fixture
def wide(other_testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    """Study on a testbed with four nodes. Two array tasks run at the same time, on two nodes each."""
    other_testbed.up("--nodes", "4", "--rate", "1gbit", "--slurmd-timeout-s", "60", "--conf", _QUICK_TO_SCHEDULE)
    monkeypatch.setenv("SLURM_CONF", str(other_testbed.folder / "slurm.conf"))
    study = Study(other_testbed, tmp_path)
    yield study
    other_testbed.slurm("scancel", "--user=root")
    wait_for(lambda: not ours(other_testbed.name, study.folder))


def allocated(bed: Testbed, record: RunRecord) -> list[str]:
    """Return the hosts that Slurm lists for the allocation of a record."""
    assert record.environment
    return bed.slurm("scontrol", "show", "hostnames", record.environment.slurm["SLURM_JOB_NODELIST"]).split()


@pytest.mark.timeout(600)
def test_concurrent_array_tasks_run_on_separate_nodes(wide: Study) -> None:
    points = ("nodes=2", "batch.micro=1,2,3,4")
    submission = wide.sweep(*QUICK, *points, "launcher.mode=array", "launcher.throttle=null", "launcher.exclusive=true")
    assert [job["points"] for job in submission["submitted"]] == [4]
    wide.ended(3 * PATIENCE_S)
    records = wide.records()
    outcomes = [(record.outcome.kind, record.outcome.reason) for record in records]
    assert wide.check() == ["answered"] * 4 and outcomes == [("ok", "")] * 4, f"{outcomes}\n{wide.log()}"
    for record in records:
        assert record.environment and list(record.environment.hosts) == allocated(wide.bed, record)
    assert {tuple(allocated(wide.bed, record)) for record in records} > {(wide.bed.node(1), wide.bed.node(2))}
    spans = [spent for job in wide.folder.glob("jobs/*") for _, spent in jobs.list_allocations(job)]
    assert any(one.began_at < other.began_at < (one.ended_at or 0) for one in spans for other in spans), "one by one"
