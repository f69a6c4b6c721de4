"""Tests of the states of points, which are read from the study's folder and from the scheduler."""

import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sweeps import attempt, point, queued, spec, sweep

from bench.core import store
from bench.core.spec import config_id
from bench.sweep import definition, jobs
from bench.sweep.definition import RunKey, SweepDefinition
from bench.sweep.jobs import Job
from bench.sweep.lost import finalize_lost, read_left_behind, reconcile_local_outcome, reconcile_outcome
from bench.sweep.snapshot import compute_spent_node_hours, find_rival_attempt, read_snapshot
from bench.sweep.status import JobTask, PointStatus, list_statuses, read_state

FOUR = spec(batch__micro=4)


def list_states(folder: Path, made: SweepDefinition, queue: Mapping[JobTask, Any] | None = None) -> list[PointStatus]:
    folder.mkdir(exist_ok=True)
    return list_statuses(definition.merge_sweeps([made]), read_snapshot(folder), queue or {})


def heartbeat(folder: Path, *, pid: int = os.getpid(), host: str = "elsewhere", step: int = 7) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    beat = {"state": "running", "at": at, "host": host, "supervisor": pid, "ranks": [{"phase": "steps", "step": step}]}
    (folder / store.HEARTBEAT).write_text(json.dumps(beat))


def submit(folder: Path, made: SweepDefinition, mode: str = "packed") -> str:
    requested = tuple(made.requested(p, repeat) for repeat, index in made.order for p in [made.points[index]])
    job = Job(name="s-1", mode=mode, nodes=1, devices_per_node=2, time_limit_min=10, points=requested)  # type: ignore[arg-type]
    jobs.write(folder, job)
    return job.name


def test_point_without_attempts_is_waiting(tmp_path: Path) -> None:
    [found] = list_states(tmp_path, sweep([point(FOUR)]))
    assert (found.state, found.outcome, found.attempts) == ("waiting", "", 0)


def test_final_outcome_answers_a_point_and_a_failure_is_retried_up_to_the_allowed_attempts(tmp_path: Path) -> None:
    made = sweep([point(FOUR)])
    attempt(tmp_path, FOUR, "error")
    [found] = list_states(tmp_path, made)
    assert found.state == "waiting" and "it was error" in found.why
    attempt(tmp_path, FOUR, "hang")
    [found] = list_states(tmp_path, made)
    assert found.state == "given up" and found.attempts == 2
    attempt(tmp_path, FOUR, "ok")
    [found] = list_states(tmp_path, made)
    assert (found.state, found.outcome) == ("answered", "ok")


def test_preemption_does_not_count_as_an_attempt(tmp_path: Path) -> None:
    for _ in range(5):
        attempt(tmp_path, FOUR, "preempted")
    [found] = list_states(tmp_path, sweep([point(FOUR)]))
    assert found.state == "waiting"


def test_every_repeat_on_every_machine_has_its_own_state(tmp_path: Path) -> None:
    attempt(tmp_path, FOUR, "ok", repeat=1, machine="fast")
    made = sweep([point(FOUR, machine="fast"), point(FOUR, machine="slow")], repeats=2)
    found = {(s.key.machine, s.key.repeat): s.state for s in list_states(tmp_path, made)}
    assert found == {("fast", 0): "waiting", ("fast", 1): "answered", ("slow", 0): "waiting", ("slow", 1): "waiting"}


def test_pruned_point_is_waiting_in_a_sweep_without_pruning(tmp_path: Path) -> None:
    attempt(tmp_path, FOUR, "pruned")
    assert list_states(tmp_path, sweep([point(FOUR)]))[0].state == "answered"
    assert list_states(tmp_path, sweep([point(FOUR)], prune=False))[0].state == "waiting"


def test_point_of_a_queued_job_is_pending_with_the_schedulers_reason(tmp_path: Path) -> None:
    made = sweep([point(FOUR)])
    name = submit(tmp_path, made)
    [found] = list_states(tmp_path, made, {(name, None): queued("PENDING", "Priority")})
    assert found.state == "pending" and "Priority" in found.why
    assert list_states(tmp_path, made, {(name, None): queued("FAILED")})[0].state == "waiting"
    assert list_states(tmp_path, made)[0].state == "waiting", "a job that was never submitted does not count"


def test_each_task_of_an_array_has_its_own_state(tmp_path: Path) -> None:
    made = sweep([point(FOUR), point(spec(batch__micro=8))])
    name = submit(tmp_path, made, "array")
    queue = {(name, 0): queued("COMPLETED"), (name, 1): queued("PENDING", "JobArrayTaskLimit")}
    assert [s.state for s in list_states(tmp_path, made, queue)] == ["waiting", "pending"]


def test_running_attempt_shows_its_last_heartbeat_and_step(tmp_path: Path) -> None:
    made = sweep([point(FOUR)])
    name = submit(tmp_path, made)
    heartbeat(attempt(tmp_path, FOUR, None, job=name, restart=0))
    [found] = list_states(tmp_path, made, {(name, None): queued()})
    assert found.state == "running" and "steps step 7" in found.why
    requeued = queued("PENDING", "BeginTime", restarts=1)
    assert list_states(tmp_path, made, {(name, None): requeued})[0].state == "pending"


def test_local_attempt_of_a_dead_supervisor_is_not_running(tmp_path: Path) -> None:
    made = sweep([point(FOUR)])
    folder = attempt(tmp_path, FOUR, None)
    heartbeat(folder, host=os.uname().nodename)
    assert list_states(tmp_path, made)[0].state == "running"
    heartbeat(folder, host=os.uname().nodename, pid=2**22 + 1)  # above the largest process id: no such process
    assert list_states(tmp_path, made)[0].state == "waiting"


def test_local_attempt_without_a_supervisor_gets_a_record_after_a_while(
    tmp_path: Path,
) -> None:
    """The command was killed after it had created the attempt's folder and before the supervisor wrote a heartbeat.

    Once the attempt is so old that it counts as lost, it gets a record. The hidden file that reserved disk space for
    the record is removed.
    """
    definition.write(tmp_path, sweep([point(FOUR)]))
    folder = attempt(tmp_path, FOUR, None)
    assert finalize_lost(read_state(tmp_path)) == 0, "its supervisor may still start"
    os.utime(folder / store.CIRCUMSTANCE, (0, 0))
    assert finalize_lost(read_state(tmp_path)) == 1
    outcome = store.read_record(folder / store.RECORD).outcome
    assert outcome.kind == "cancelled" and "supervisor never began" in outcome.reason
    assert not list(folder.glob(".*")), "reserved disk space"


def test_record_of_a_local_attempt_names_the_dead_supervisor_and_no_scheduler(tmp_path: Path) -> None:
    definition.write(tmp_path, sweep([point(FOUR)]))
    folder = attempt(tmp_path, FOUR, None)
    gone = 2**22 + 1  # above the largest process id: no such process
    heartbeat(folder, host=os.uname().nodename, pid=gone)
    assert finalize_lost(read_state(tmp_path)) == 1
    outcome = store.read_record(folder / store.RECORD).outcome
    assert outcome.kind == "error" and f"process {gone} on {os.uname().nodename}, died" in outcome.reason
    assert "scheduler" not in outcome.reason and outcome.evidence["last_heartbeat"]["ranks"][0]["step"] == 7


def test_interrupted_local_attempt_without_a_record_is_cancelled() -> None:
    outcome = reconcile_local_outcome({"interrupted": {"signal": "SIGTERM"}})
    assert (outcome.kind, outcome.reason) == ("cancelled", "interrupted by SIGTERM, and left no record")


def test_attempt_folder_of_a_killed_command_is_removed_unless_other_files_are_in_it(tmp_path: Path) -> None:
    definition.write(tmp_path, sweep([point(FOUR)]))
    claims = [store.create_attempt(tmp_path / config_id(FOUR), 0).folder for _ in range(3)]
    for folder in claims:
        store.reserve(folder / store.RECORD, 4096)
    (claims[1] / "notes.txt").write_text("a user's own file")
    for folder in claims[:2]:
        os.utime(folder, (0, 0))
    finalize_lost(read_state(tmp_path))
    assert [folder.exists() for folder in claims] == [False, True, True], "the last one was claimed just now"


# -- files that cannot be read


UNREADABLE = (
    b"", b"garbage", b"\xff\xfe", b"[]", b"{}", b"5", b"null", b'"x"', b"[" * 100_000, b'{"ranks": [{}]}',
    b'{"host": "HERE"}', b'{"signal": []}', b'{"left_s": "x", "warning_s": []}', b'{"at": 5}', b'{"at": "never"}',
    b'{"launcher": 5}', b'{"launcher": {"job": []}}', b'{"points": [[]], "mode": "array"}', b'{"nodes": "x"}',
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [store.RECORD, store.HEARTBEAT, store.CIRCUMSTANCE, store.SPEC, store.INTERRUPTED, store.ENVIRONMENT]
)
def test_unreadable_file_of_an_attempt_is_named_and_other_points_keep_their_state(tmp_path: Path, name: str) -> None:
    other = spec(batch__micro=8)
    attempt(tmp_path, other, "ok")
    folder = attempt(tmp_path, FOUR, None)
    made = sweep([point(FOUR), point(other)])
    definition.write(tmp_path, made)
    for content in UNREADABLE:
        (folder / name).write_bytes(content.replace(b"HERE", os.uname().nodename.encode()))
        view = read_state(tmp_path)
        assert view.statuses[1].state == "answered" and view.statuses[0].outcome == "", content
        assert finalize_lost(view) == 0
        if name in (store.RECORD, store.CIRCUMSTANCE, store.SPEC, store.HEARTBEAT):
            assert [error.path for error in view.seen.unreadable] == [folder / name], content
            assert "\n" not in str(view.seen.unreadable[0])


@pytest.mark.parametrize("name", ["job.json", "handle", "allocation.0.json"])
def test_unreadable_file_of_a_job_is_named_and_other_jobs_are_read(tmp_path: Path, name: str) -> None:
    made = sweep([point(FOUR)])
    definition.write(tmp_path, made)
    submit(tmp_path, made)
    for content in UNREADABLE:
        folder = tmp_path / jobs.FOLDER / "s-0"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        view = read_state(tmp_path, ask=False)
        assert [job.points for job in view.seen.jobs if job.name == "s-1"] != [()]
        finalize_lost(view)
        assert compute_spent_node_hours(view.seen.jobs) == 0.0
        if name == "job.json":
            assert [error.path.name for error in view.seen.unreadable] == ["job.json"], content


def test_configuration_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(tmp_path, FOUR, "ok")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refused(path: Path) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)  # simulated: as root, a test could read any folder
    seen = read_snapshot(tmp_path)
    assert [(error.path, error.why) for error in seen.unreadable] == [(tmp_path / "closed", "Permission denied")]
    assert list(seen.tried) == [config_id(FOUR)]


def test_unreadable_files_of_an_attempt_do_not_prevent_its_outcome(tmp_path: Path) -> None:
    folder = attempt(tmp_path, FOUR, None)
    for content in UNREADABLE:
        (folder / store.INTERRUPTED).write_bytes(content)
        (folder / store.HEARTBEAT).write_bytes(content)
        found = reconcile_outcome(read_left_behind(folder), None, restarted=False)
        assert found.kind in ("error", "cancelled"), content
        store.to_json(found)


def test_attempt_folder_claimed_a_moment_ago_is_waited_for_until_its_description_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process first creates the folder of an attempt, and then writes the description of the attempt into it.

    Another process that finds the folder in between must wait for the description. Otherwise both processes would
    measure the same point.
    """
    made, key = spec(), RunKey(config_id(spec()), "cpu", 0)
    attempt(tmp_path, made, None, job="s-1")
    folder = tmp_path / key.config_id / "0.0"
    (folder / store.CIRCUMSTANCE).rename(folder / "later")
    threading.Timer(0.3, lambda: (folder / "later").rename(folder / store.CIRCUMSTANCE)).start()
    rival = find_rival_attempt(folder.parent, key, before=1)
    assert rival and rival.job == "s-1"
    (folder / store.CIRCUMSTANCE).rename(folder / "later")
    os.utime(folder, (0, 0))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits for a folder that was claimed long ago"))
    assert find_rival_attempt(folder.parent, key, before=1) is None
