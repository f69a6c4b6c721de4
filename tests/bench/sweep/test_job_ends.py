"""Tests of jobs that end before they begin any run. `status` shows such jobs, and files record them. The number of
times that such a job is submitted again is limited."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sweeps import attempt, point, spec, sweep

from bench.core.record import OutcomeKind
from bench.core.scheduling import JobState
from bench.launchers.slurm.states import find_phase
from bench.sweep import definition, jobs
from bench.sweep.definition import SweepDefinition
from bench.sweep.jobs import Job
from bench.sweep.lost import keep_ends
from bench.sweep.snapshot import read_snapshot
from bench.sweep.status import JobTask, PointStatus, StudyState, list_statuses

FOUR, EIGHT = spec(batch__micro=4), spec(batch__micro=8)
NOW = datetime.now(UTC).timestamp()


def submitted(folder: Path, made: SweepDefinition, number: int, log: str = "") -> JobTask:
    """Write the files of a submitted job into the study's `folder`. The job runs all points of the sweep `made`.
    `number` is the job's id in the scheduler, and `log` is the job's output. Return the job's name, and None in place
    of the index of an array task."""
    points = tuple(made.requested(one, 0) for one in made.points)
    job = Job(name=f"s-{number:03}", mode="packed", nodes=1, devices_per_node=2, time_limit_min=9, points=points)
    jobs.write_handle(jobs.write(folder, job), str(number))
    if log:
        (folder / jobs.FOLDER / job.name / f"slurm-{number}.log").write_text(log)
    return job.name, None


def ended(place: JobTask, state: str = "FAILED", outcome: OutcomeKind | None = "error", exit_code: int = 1) -> JobState:
    name, task = place
    job = JobState(str(int(name[2:])), name, task, find_phase(state), state, outcome=outcome)
    return job._replace(started_at=NOW, ended_at=NOW + 1, exit=f"exit code {exit_code}", exit_code=exit_code)


def read_view(
    folder: Path, made: SweepDefinition, queue: Mapping[JobTask, JobState], *, asked: bool = True
) -> StudyState:
    seen, wanted = read_snapshot(folder), definition.merge_sweeps([made])
    return StudyState(folder, [made], seen, queue, list_statuses(wanted, seen, queue, is_reached=asked), asked)


def list_later_statuses(folder: Path, made: SweepDefinition) -> list[PointStatus]:
    """Return the states of all points at a later time, when the scheduler no longer lists any job."""
    return read_view(folder, made, {}).statuses


def test_job_that_died_before_its_first_attempt_is_shown_with_its_last_log_line(tmp_path: Path) -> None:
    made = sweep([point(FOUR), point(EIGHT)])
    place = submitted(
        tmp_path, made, 12, "loading\n/var/spool/job12/slurm_script: line 22: module: command not found\n"
    )
    assert keep_ends(read_view(tmp_path, made, {place: ended(place)}))
    assert not keep_ends(read_view(tmp_path, made, {place: ended(place)})), "its end is already on file"
    reason = "job 12 FAILED after 1 s (exit code 1), no attempt was started; see jobs/s-012/slurm-12.log: "
    for found in list_later_statuses(tmp_path, made):
        assert found.state == "waiting"
        assert found.why == reason + "/var/spool/job12/slurm_script: line 22: module: command not found"


def test_point_is_given_up_once_its_jobs_that_died_reach_the_allowed_attempts(tmp_path: Path) -> None:
    made = sweep([point(FOUR)])  # two attempts are allowed
    for number in (12, 13):
        assert list_later_statuses(tmp_path, made)[0].state == "waiting"
        place = submitted(tmp_path, made, number)
        keep_ends(read_view(tmp_path, made, {place: ended(place)}))
    [found] = list_later_statuses(tmp_path, made)
    assert found.state == "given up" and "2 jobs failed before an attempt; the last: job 13 FAILED" in found.why
    asked_again = made.model_copy(update={"asked_at": datetime.fromtimestamp(NOW + 60, UTC).isoformat()})
    assert list_later_statuses(tmp_path, asked_again)[0].state == "waiting"


@pytest.mark.parametrize(
    ("state", "outcome", "exit_code"),
    [("CANCELLED", "cancelled", 0), ("PREEMPTED", "preempted", 0), ("NODE_FAIL", "node_failure", 0),
     ("COMPLETED", None, 0), ("FAILED", "error", jobs.EXIT_LATER)],
)  # fmt: skip
def test_jobs_that_ended_for_external_causes_cost_no_attempt(
    tmp_path: Path, state: str, outcome: OutcomeKind | None, exit_code: int
) -> None:
    made = sweep([point(FOUR)])
    for number in (12, 13, 14):
        place = submitted(tmp_path, made, number)
        keep_ends(read_view(tmp_path, made, {place: ended(place, state, outcome, exit_code)}))
    [found] = list_later_statuses(tmp_path, made)
    assert found.state == "waiting" and f"job 14 {state}" in found.why


def test_job_that_died_between_points_is_shown_for_the_points_without_an_attempt(tmp_path: Path) -> None:
    made = sweep([point(FOUR), point(EIGHT)])
    for number in (12, 13, 14):
        place = submitted(tmp_path, made, number)
        attempt(tmp_path, FOUR, "preempted", job=place[0])
        keep_ends(read_view(tmp_path, made, {place: ended(place)}))
    four, eight = list_later_statuses(tmp_path, made)
    assert four.why == "to run again; last attempt: it was preempted"
    assert eight.state == "waiting" and "job 14 FAILED" in eight.why and "before this point was started" in eight.why


def test_job_forgotten_by_the_scheduler_is_named(tmp_path: Path) -> None:
    made = sweep([point(FOUR)])
    submitted(tmp_path, made, 12)
    [found] = list_later_statuses(tmp_path, made)
    assert found.why == "job 12 started no attempt, and the scheduler no longer lists it; see jobs/s-012"


def test_submitted_point_is_unknown_without_a_query_of_the_scheduler(tmp_path: Path) -> None:
    made = sweep([point(FOUR), point(EIGHT)])
    place = submitted(tmp_path, made, 12)
    for found in read_view(tmp_path, made, {}, asked=False).statuses:
        assert (found.state, found.why) == ("unknown", "in job 12, by the last known state of the queue")
    keep_ends(read_view(tmp_path, made, {place: ended(place)}))
    assert {found.state for found in read_view(tmp_path, made, {}, asked=False).statuses} == {"waiting"}


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("a\n\n", "a"),
        ("execve(): /no/python: No such file\nsrun: error: n1: task 0: Exited with exit code 2\n",
         "execve(): /no/python: No such file"),
        ("why\nsrun: error: n1: task 0: Killed\nsrun: Force Terminated StepId=26.0\n", "why"),
        ("srun: error: n1: task 0: Killed\n", "srun: error: n1: task 0: Killed"),
        ("\x1b[31mred\x1b[0m\n", "red"),
        (("x" * 70 + "\n") * 1000, "x" * 70),
    ],
)  # fmt: skip
def test_last_line_of_a_log_skips_sruns_messages_of_the_end(tmp_path: Path, log: str, line: str) -> None:
    path = tmp_path / "slurm-1.log"
    path.write_text(log)
    assert jobs.find_last_line(path) == line
    assert jobs.find_last_line(tmp_path / "none.log") == jobs.find_last_line(None) == ""


def test_log_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slurm-1.log")
    assert jobs.find_last_line(tmp_path / "slurm-1.log") == ""
