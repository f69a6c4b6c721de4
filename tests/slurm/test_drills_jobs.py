"""Tests on a real Slurm in which a fault affects a whole job: it is requeued, loses a node, reaches its time limit, or
fills the disk."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import on_node, stepping
from slurm_testbed import Testbed, wait_for
from sweeping import ENDLESS, QUICK, Study

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


def set_slurmd_timeout(bed: Testbed, seconds: int) -> None:
    """Set SlurmdTimeout, the seconds after which Slurm declares a silent node down."""
    conf = bed.folder / "slurm.conf"
    conf.write_text(re.sub("SlurmdTimeout=.*", f"SlurmdTimeout={seconds}", conf.read_text()))
    bed.slurm("scontrol", "reconfigure")


@contextlib.contextmanager
def killed_slurmd(bed: Testbed, node: str) -> Iterator[None]:
    """Kill only the slurmd of a node. Start it again after Slurm has declared the node down."""
    set_slurmd_timeout(bed, 3)
    bed("slurmd", node, "stop")
    try:
        yield
    finally:
        wait_for(lambda: bed.state(node) == "down*")
        bed("slurmd", node, "start")
        wait_for(lambda: bed.state(node) == "idle")
        set_slurmd_timeout(bed, 60)


def find_nodes(bed: Testbed, job: str) -> list[str]:
    """Return the nodes of a running job; empty for a pending job, including a job that was just requeued."""
    running = bed.slurm("squeue", "--noheader", "--jobs", job, "--states=RUNNING", "--format=%N").strip()
    return bed.slurm("scontrol", "show", "hostnames", running).split() if running else []


def last_node(bed: Testbed, job: str, other_than: str = "") -> str:
    """Wait until the job `job` runs and its last node is not the node `other_than`. Return this last node."""
    seen: list[str] = []

    def runs() -> bool:
        seen.extend(find_nodes(bed, job)[-1:])
        return bool(seen) and seen[-1] != other_than

    wait_for(runs)
    return seen[-1]


def fill(disk: Path) -> None:
    """Fill a disk until it accepts no more bytes."""
    with (disk / "ballast").open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


@pytest.mark.timeout(500)
def test_requeued_job_records_its_interrupted_attempt_and_starts_again(study: Study, drilled: Testbed) -> None:
    study.sweep(*ENDLESS, "nodes=2", "launcher.time_limit_min=20")
    (job,) = study.status()["jobs"]

    stepping(drilled.node(2))
    drilled.slurm("scontrol", "requeue", job)
    preempted = study.next_record().outcome
    assert (preempted.kind, preempted.reason) == ("preempted", "the scheduler ended the job and requeued it")

    node = last_node(drilled, job)
    stepping(node)
    with killed_slurmd(drilled, node):
        preempted = study.next_record().outcome
        assert preempted.kind == "preempted" and preempted.evidence["interrupted"]["signal"] == "SIGTERM", preempted
        other = last_node(drilled, job)
        assert other != node

    stepping(other)
    drilled.slurm("scontrol", "update", f"JobId={job}", "EndTime=now+1")
    study.ended()
    timed_out = study.next_record().outcome
    assert (timed_out.kind, timed_out.reason) == ("timeout", "the job reached its time limit")
    assert (
        timed_out.evidence["scheduler"]["state"] == "TIMEOUT"
        and " TIMEOUT " in timed_out.evidence["scheduler"]["words"]
    )
    assert study.check() == ["waiting"]
    assert {record.circumstance.launcher["restart"] for record in study.records()} == {0, 1, 2}


@pytest.mark.timeout(400)
def test_abandoned_start_of_a_job_ends_after_its_next_start(study: Study, drilled: Testbed) -> None:
    """A node's slurmd is killed while a rank runs there. Slurm then cannot end this rank, neither by a signal nor at a
    time limit, and starts the job again. The rank of the first start must end by itself."""
    study.sweep(*ENDLESS, "nodes=1", "launcher.time_limit_min=20")
    (job,) = study.status()["jobs"]
    node = last_node(drilled, job)
    abandoned = stepping(node)
    with killed_slurmd(drilled, node):
        other = last_node(drilled, job, other_than=node)
        again = stepping(other)
        wait_for(lambda: not Path(f"/proc/{abandoned.pid}").exists())
        wait_for(lambda: not on_node(node))
        lost = study.next_record()
        assert (lost.outcome.kind, lost.circumstance.launcher["restart"]) == ("node_failure", 0), lost.outcome
        assert Path(f"/proc/{again.pid}").exists(), "the start that counts goes on"
    drilled.slurm("scancel", job)
    study.ended()
    ended = study.next_record()
    assert (ended.outcome.kind, ended.circumstance.launcher["restart"]) == ("cancelled", 1)
    assert study.check() == ["waiting"] and "runs in job" not in study.log()


@pytest.mark.timeout(400)
def test_full_disk_loses_no_record_and_the_sweep_can_be_resumed(
    study: Study, drilled: Testbed, small_disk: Path
) -> None:
    study = Study(drilled, small_disk / "runs")
    study.sweep(*QUICK, "nodes=2", "batch.micro=1,2", "measure.window_s=4", "measure.max_s=4")
    stepping(drilled.node(1))
    fill(small_disk)
    study.ended()
    assert study.next_record().outcome.kind == "ok" and len(study.records()) == 1
    assert study.check() == ["answered", "waiting"]
    [why] = study.reasons() - {""}
    # srun returns the highest exit code: 75 of the node without space, or 143 of the other node, if srun ended it first
    assert "FAILED after" in why and "), before this point was started" in why, study.log()
    assert "No space left on device" in why, why
    fill(small_disk)
    for words in (("resume", str(study.folder)), study.asking(*QUICK)):
        assert "cannot be written to (No space left on device)" in study(*words, code=2)

    (small_disk / "ballast").unlink()
    study.resume()
    study.ended()
    assert study.check() == ["answered"] * 2
