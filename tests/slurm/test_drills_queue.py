"""Tests of submission to a real Slurm with faults: a killed submission, two submissions at once, a short queue, and
cancellation."""

import json
import os
import shutil
from pathlib import Path

import pytest
from node_processes import ours, stepping
from slurm_testbed import PATIENCE_S, Testbed, wait_for
from sweeping import ENDLESS, QUICK, Study

pytestmark = pytest.mark.processes

_GATE = """#!/bin/sh
: > "$GATE/$$"
until [ -e "$GATE/open" ] || rm "$GATE.admitted" 2>/dev/null; do [ -d "$GATE" ] || exit 1; sleep 0.1; done
exec {sbatch} "$@"
"""
_NO_AUTOPILOT = """#!/bin/sh
case "$2" in *-autopilot-*) echo "sbatch: error: Batch job submission failed: no job without a GPU" >&2; exit 1;; esac
exec {sbatch} "$@"
"""


def replace_sbatch(folder: Path, script: str) -> dict[str, str]:
    """Return environment variables that replace the command `sbatch`. With these variables, a call of `sbatch` runs the
    shell script `script`. The script may call the real sbatch."""
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(script.format(sbatch=shutil.which("sbatch")))
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


class Gate:
    """A replacement of `sbatch` that blocks until the test opens the gate, and then submits the job. When a caller of
    `sbatch` waits at the gate, it has already read the queue. So a test can change the queue between this read and the
    submission of the job."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "gate"
        self._gate.mkdir(parents=True)
        self.environment = replace_sbatch(folder, _GATE) | {"GATE": str(self._gate)}

    def wait_for(self, callers: int) -> None:
        wait_for(lambda: len(list(self._gate.iterdir())) == callers)

    def admit_one(self) -> None:
        """Let one caller pass, and block all others."""
        self._gate.with_suffix(".admitted").touch()

    def open(self) -> None:
        (self._gate / "open").touch()

    def close_forever(self) -> None:
        """Make all waiting callers exit. They submit no job."""
        shutil.rmtree(self._gate)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def queued(bed: Testbed) -> list[str]:
    return bed.slurm("squeue", "--noheader", "--format=%i").split()


@pytest.mark.timeout(200)
def test_sweep_killed_during_submission_continues_without_duplicate_jobs(
    study: Study, drilled: Testbed, gate: Gate, tmp_path: Path
) -> None:
    points = (*QUICK, "launcher.begin=now+1hour", "launcher.mode=array", "batch.micro=1,2,3,4,5,6,7,8")
    # Each of the first three commands submits at most one of the four jobs, however late the test kills it. So a job
    # is left for the last command.
    for moment in ("sweeps/*", "jobs/*/job.json", "jobs/*/handle"):
        before = len(list(study.folder.glob(moment)))
        gate_for_one = Gate(tmp_path / moment.replace("/", "-").replace("*", "any"))
        gate_for_one.admit_one()
        with study.start(*study.asking(*points), **gate_for_one.environment) as command:
            while len(list(study.folder.glob(moment))) == before:
                assert command.poll() is None
            command.kill()
        gate_for_one.close_forever()
        wait_for(lambda: not ours(drilled.name, study.folder))
    before = len(queued(drilled))
    with study.start(*study.asking(*points), **gate.environment) as command:
        gate.wait_for(callers=1)
        command.kill()
    gate.open()  # sbatch continues although its caller was killed
    wait_for(lambda: len(queued(drilled)) == before + 1)
    study.sweep(*points)
    assert study.check() == ["pending"] * 8
    assert len(queued(drilled)) == len(study.status()["jobs"]) == 4, (
        "two tasks each: longer arrays are not allowed here"
    )


@pytest.mark.timeout(200)
@pytest.mark.thorough
def test_cancelling_a_sweep_cancels_only_its_own_jobs(study: Study, drilled: Testbed) -> None:
    foreign = drilled.slurm("sbatch", "--parsable", "--begin=now+1hour", "--job-name=adhoc-foreign", "--wrap=true")
    task_per_device = ("launcher.mode=point", "launcher.span=device", "devices_per_node=2")
    study.sweep(*ENDLESS, *task_per_device, "launcher.time_limit_min=20", "batch.micro=1,2")
    stepping(drilled.node(1))
    study("cancel", str(study.folder))
    study.ended()
    assert queued(drilled) == foreign.split()
    assert study.check() == ["waiting"] * 2
    (begun,) = study.records()
    assert (begun.outcome.kind, begun.outcome.reason) == ("cancelled", "the job was cancelled")


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_requeued_and_held_job_is_tracked_and_can_be_cancelled(study: Study, drilled: Testbed) -> None:
    study.sweep(*ENDLESS, "launcher.mode=point", "launcher.time_limit_min=20", "batch.micro=1")
    (job,) = study.status()["jobs"]
    stepping(drilled.node(1))
    drilled.slurm("scontrol", "requeuehold", job)
    assert study.next_record().outcome.kind == "preempted"
    study.until(lambda status: status["points"][0]["state"] == "pending")
    assert study.status()["jobs"] == [job]
    assert study.resume()["submitted"] == [] and queued(drilled) == [job]
    study("cancel", str(study.folder))
    study.ended()
    assert queued(drilled) == [] and study.check() == ["waiting"]


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_two_concurrent_submissions_and_a_late_third_give_one_answer_per_point(
    study: Study, drilled: Testbed, gate: Gate
) -> None:
    both = [study.start(*study.asking(*QUICK, "batch.micro=1,2"), **gate.environment) for _ in range(2)]
    gate.wait_for(callers=2)
    gate.open()
    assert [process.wait(PATIENCE_S) for process in both] == [0, 0]
    assert len(queued(drilled)) == 2
    study.ended()
    assert study.check() == ["answered"] * 2
    attempts = study.attempts()

    script = next(study.folder.glob("jobs/*/job.sh"))
    late = drilled.slurm("sbatch", "--parsable", str(script)).strip()
    wait_for(lambda: late not in queued(drilled))
    assert study.check() == ["answered"] * 2 and study.attempts() == attempts
    assert (script.parent / f"slurm-{late}.log").read_text().count("already has a final result") == 2


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_job_that_fails_before_its_first_attempt_is_reported_and_given_up(
    study: Study, drilled: Testbed, tmp_path: Path
) -> None:
    without_autopilot = replace_sbatch(tmp_path, _NO_AUTOPILOT)
    broken = ("launcher.modules=[cuda/13]", "batch.micro=1,2")
    submission = json.loads(study(*study.asking(*QUICK, *broken, "--autopilot"), code=1, **without_autopilot))
    (job,) = submission["submitted"]
    assert submission["autopilot"] is None and "no job without a GPU" in submission["autopilot_refused"]
    study.ended()
    (why,) = study.reasons()
    assert f"job {job['job']} FAILED after " in why and "no attempt was started; see jobs/" in why, why
    assert "module: command not found" in why and study.check() == ["waiting"] * 2
    for _ in range(2):
        assert study.resume()["submitted"]
        study.ended()
    assert study.resume()["submitted"] == [] and study.check() == ["given up"] * 2
    point = study.status()["points"][0]["config_id"]
    assert study("logs", point, str(study.folder)).count("module: command not found") == 3
    assert study.sweep(*QUICK, *broken, "launcher.begin=now+1hour")["submitted"], (
        "a new sweep submits given-up points again"
    )


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_jobs_that_can_never_start_are_refused_or_not_waited_for(study: Study, drilled: Testbed) -> None:
    refused = study(*study.asking(*QUICK, "nodes=4"), code=2)
    assert "nodes=4: the partition allows at most 3 nodes per job" in refused
    other = Study(drilled, study.results / "other")
    refused = other(*other.asking(*QUICK, "launcher.cpus_per_device=512"), code=2)
    assert "no node of the partition has as many cores" in refused and queued(drilled) == []
    study.sweep(*QUICK, "launcher.extra=['--nodes=9']", "batch.micro=3")
    shown = study("status", str(study.folder), "--wait", code=1)
    assert "cannot start with the resources that it requests" in shown and "zeroscale cancel" in shown, shown
    (waits,) = study.status()["queue"]
    assert waits["stuck"] and waits["job"] in queued(drilled)


@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_autopilot_finishes_a_sweep_in_a_small_queue_and_notifies(study: Study, tmp_path: Path) -> None:
    points = (*QUICK, "launcher.mode=array", "launcher.throttle=2", "batch.micro=1,2,3,4")
    inbox = tmp_path / "in box"
    inbox.mkdir()
    submission = study.sweep(*points, "--autopilot", "--max-queued=2", "--notify", f"cp --target-directory='{inbox}'")
    assert (
        [job["points"] for job in submission["submitted"]] == [2]
        and submission["left"] == 2
        and submission["autopilot"]
    )
    study.ended(2 * PATIENCE_S)
    assert study.check() == ["answered"] * 4
    summary = (study.folder / "report" / "summary.md").read_text()
    assert (inbox / "summary.md").read_text() == summary and "4 runs: 4 ok" in summary, study.log()
    assert summary.count("s per step") == 4 and (study.folder / "report" / "report.html").exists(), summary
    assert sorted(record.circumstance.launcher["task"] for record in study.records()) == [0, 0, 1, 1]
    assert {record.outcome.kind for record in study.records()} == {"ok"}
