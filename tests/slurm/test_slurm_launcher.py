"""Tests of the Slurm launcher on a real Slurm: submission of generated scripts, job states, and cancellation."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_testbed import Testbed, wait_for

from bench.core.errors import UserError
from bench.core.scheduling import SchedulerUnavailable, Work
from bench.launchers.slurm import Options, ask, cancel_all, limits, plan, submit
from bench.launchers.slurm.queue import list_queued

NASTY = "x; rm -rf ~ %j $(touch gone) \"a\" 'b' #c é"
_PROBE = """
import json, os, signal, socket, sys, time
from pathlib import Path

number, task = os.environ.get("SLURM_PROCID", "0"), os.environ.get("SLURM_ARRAY_TASK_ID", "")
def tell(kind, **what):
    new = Path(sys.argv[1], f"{kind}{task}.{number}.new")
    new.write_text(json.dumps(what))
    new.rename(new.with_suffix(".json"))  # renamed, so that no reader sees a partial file
def asked_to_end(signum, frame):
    tell("signal", name=signal.Signals(signum).name)
    time.sleep(0.5)
    tell("last_words", said=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, asked_to_end)
tell("began", arguments=sys.argv[2:], environment=dict(os.environ), host=socket.gethostname(), cwd=os.getcwd())
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until and not Path(sys.argv[1], "enough").exists():
    time.sleep(0.1)
"""
_SUBMITTER = """
import sys
from pathlib import Path
from bench.core.scheduling import Work
from bench.launchers.slurm import Options, plan, submit

folder = Path(sys.argv[1])
print(submit(plan(Work(sys.argv[2], folder, "probe", (str(folder), "0"), nodes=2, devices_per_node=2), Options())))
"""
Job = Callable[..., Work]


@pytest.fixture
def slurm(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Testbed:
    monkeypatch.setenv("SLURM_CONF", str(testbed.folder / "slurm.conf"))
    return testbed


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Function that creates a job, which the test then submits. The job writes messages that describe how it was
    started. It runs for some seconds, or until a certain file exists.

    The name of the job's folder contains shell metacharacters.
    """
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a job inherits the environment variables of the sbatch command
    (tmp_path / "probe.py").write_text(_PROBE)

    def make(name: str, seconds: float, *arguments: str, **changes: Any) -> Work:
        folder = tmp_path / NASTY / "jobs" / name
        folder.mkdir(parents=True)
        unique = f"{name}-{time.time_ns()}"
        return Work(unique, folder, "probe", (str(folder), str(seconds), *arguments), **changes)

    return make


def start(job: Work, **options: Any) -> str:
    return submit(plan(job, Options.model_validate({"time_limit_min": 5, **options})))


def read_messages(job: Work, kind: str = "began") -> list[dict[str, Any]]:
    """Return the messages of one kind, such as `began`, that the job's processes have written. They are sorted by file
    name."""
    return [json.loads(path.read_text()) for path in sorted(job.folder.glob(f"{kind}*.json"))]


def has_ended(handle: str) -> bool:
    return not any(state.live for state in list_queued() if state.handle == handle)


def ended(handle: str) -> None:
    wait_for(lambda: has_ended(handle))


def log(job: Work) -> str:
    return "".join(path.read_text() for path in job.folder.glob("slurm-*.log"))


def test_job_runs_once_per_node_and_shell_metacharacters_are_literal(slurm: Testbed, job: Job, tmp_path: Path) -> None:
    work = job("first", 0, NASTY, nodes=2, devices_per_node=2)
    handle = start(work, environment={"NASTY": NASTY, "LINES_": "a\nb"}, setup=['export FROM_SETUP="$NASTY"'])
    ended(handle)
    state = ask([work.name])[work.name, None]
    assert (state.state, state.handle, state.nodes, state.live) == ("COMPLETED", handle, 2, False), log(work)
    assert state.started_at and state.ended_at and 0 <= state.ended_at - state.started_at < 40
    began = read_messages(work)
    assert sorted(process["host"] for process in began) == [slurm.node(1), slurm.node(2)]
    for process in began:
        environment = process["environment"]
        assert process["arguments"] == ["0", NASTY] and process["cwd"] == str(Path.cwd())
        assert environment["NASTY"] == environment["FROM_SETUP"] == NASTY and environment["LINES_"] == "a\nb"
    assert [path.name for path in work.folder.glob("*.log")] == [f"slurm-{handle}.log"]
    assert list(tmp_path.rglob("gone")) == list(Path.cwd().glob("gone")) == []


def test_span_device_starts_one_task_per_device(slurm: Testbed, job: Job) -> None:
    work = job("devices", 0, nodes=2, devices_per_node=2)
    ended(start(work, span="device", cpus_per_device=1))
    local = [(process["host"], process["environment"]["SLURM_LOCALID"]) for process in read_messages(work)]
    assert sorted(local) == [(slurm.node(node), rank) for node in (1, 2) for rank in ("0", "1")], log(work)


def test_every_process_gets_sigterm_before_the_time_limit(slurm: Testbed, job: Job) -> None:
    small = job("small", 90, time_limit_min=1)
    large = job("large", 90, nodes=2, devices_per_node=1, time_limit_min=1)
    # Slurm checks time limits every 30 s, and warns up to 30 s too early. Each job here has at least 5 s before the
    # warning.
    handles = [start(small, warning_s=25, memory_gb=4), start(large, warning_s=25)]
    for handle in handles:
        ended(handle)
    assert read_messages(small, "signal") == [{"name": "SIGTERM"}] and read_messages(small, "last_words"), log(small)
    assert (
        read_messages(large, "signal") == [{"name": "SIGTERM"}] * 2 and len(read_messages(large, "last_words")) == 2
    ), log(large)
    states = ask([small.name, large.name]).values()
    assert {state.state for state in states} == {"COMPLETED"}, "all ended by themselves"
    (began,) = read_messages(small)
    assert "SLURM_STEP_ID" not in began["environment"] and began["environment"]["SLURM_CPUS_ON_NODE"] == "1"


def test_cancelled_job_has_time_to_write_its_last_messages(slurm: Testbed, job: Job) -> None:
    work = job("cancelled", 60, nodes=2, devices_per_node=1)
    handle = start(work)
    wait_for(lambda: len(read_messages(work)) == 2)
    assert not has_ended(handle) and ask([work.name])[work.name, None].running
    cancel_all([handle])
    ended(handle)
    state = ask([work.name])[work.name, None]
    assert state.state == "CANCELLED" and "CANCELLED" in state.words
    assert len(read_messages(work, "last_words")) == 2, log(work)


def test_array_has_a_state_per_task(slurm: Testbed, job: Job) -> None:
    work = job("array", 60, devices_per_node=1, tasks=4)
    handle = start(work, throttle=2)
    wait_for(lambda: len(read_messages(work)) >= 2)
    found = ask([work.name, "nobody"])
    assert set(found) == {(work.name, task) for task in range(4)}
    assert {(state.handle, state.task) for state in found.values()} == {(handle, task) for task in range(4)}
    assert any(state.pending for state in found.values()) and not has_ended(handle)
    (work.folder / "enough").touch()
    ended(handle)
    assert {state.state for state in ask([work.name]).values()} == {"COMPLETED"}, log(work)
    assert [process["environment"]["SLURM_ARRAY_TASK_ID"] for process in read_messages(work)] == ["0", "1", "2", "3"]
    assert sorted(path.name for path in work.folder.glob("*.log")) == [
        f"slurm-{handle}_{task}.log" for task in range(4)
    ]


def test_nice_exclude_begin_and_dependency_reach_the_jobs(slurm: Testbed, job: Job) -> None:
    first, second = (job(name, 0, nodes=2, devices_per_node=1) for name in ("polite", "after"))
    node = slurm.node(2)
    one = start(first._replace(exclude=(node,)), nice=7, begin="now+1hour")
    two = start(second._replace(after=(one,)))
    shown = slurm.slurm("scontrol", "show", "job", "--oneliner", one)
    assert " Nice=7 " in shown and f" ExcNodeList={node} " in shown and " Requeue=1 " in shown
    state = ask([first.name])[first.name, None]
    assert state.pending and state.reason == "BeginTime"
    assert state.started_at is not None and 3500 < state.started_at - time.time() < 3700
    assert ask([second.name])[second.name, None].reason == "Dependency"
    cancel_all([one])
    ended(two)
    assert ask([second.name])[second.name, None].state == "COMPLETED", "a dependency is met by any end of the job"
    cancel_all([one, two])  # cancelling a job that has already ended is no error


def test_requeued_job_has_a_restart_count(slurm: Testbed, job: Job) -> None:
    work = job("again", 60, devices_per_node=1)
    handle = start(work)
    wait_for(lambda: bool(read_messages(work)))
    slurm.slurm("scontrol", "requeue", handle)
    wait_for(lambda: ask([work.name])[work.name, None].pending)
    assert ask([work.name])[work.name, None].restarts == 1 and not has_ended(handle)
    assert read_messages(work, "last_words"), log(work)
    cancel_all([handle])


def test_preempted_job_writes_its_last_messages_and_starts_again(
    other_testbed: Testbed, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    preemption = ("--conf", "PreemptType=preempt/partition_prio", "--conf", "PreemptMode=REQUEUE")
    other_testbed.up("--nodes", "1", "--kill-wait-s", "5", *preemption)
    monkeypatch.setenv("SLURM_CONF", str(other_testbed.folder / "slurm.conf"))
    other_testbed.slurm("scontrol", "create", "partition=urgent", "nodes=ALL", "prioritytier=10", "state=up")
    work, urgent = job("preempted", 60, devices_per_node=1), job("urgent", 0, devices_per_node=1)
    handle = start(work, partition="main", exclusive=True)
    wait_for(lambda: bool(read_messages(work)))
    start(urgent, partition="urgent", exclusive=True)
    wait_for(lambda: bool(read_messages(urgent)))
    state = ask([work.name])[work.name, None]
    assert (state.pending, state.restarts) == (True, 1) and read_messages(work, "last_words"), log(work)
    wait_for(lambda: read_messages(work)[0]["environment"].get("SLURM_RESTART_COUNT") == "1")
    assert ask([work.name])[work.name, None].running and not has_ended(handle)
    assert log(work).count("DUE TO PREEMPTION"), "the log of the first start is still there"


def test_script_can_be_submitted_by_hand_from_any_folder(slurm: Testbed, job: Job, tmp_path: Path) -> None:
    work = job("by_hand", 0, devices_per_node=1)
    made = plan(work, Options(time_limit_min=5))
    (path,) = made.files
    path.write_text(made.files[path])
    ended(slurm.slurm("bash", "-c", 'cd / && sbatch --parsable "$1"', "bash", str(path)).strip())
    assert [process["cwd"] for process in read_messages(work)] == [str(Path.cwd())], log(work)


def test_job_submitted_by_a_job_inherits_no_slurm_variables(slurm: Testbed, job: Job, tmp_path: Path) -> None:
    (tmp_path / "submitter.py").write_text(_SUBMITTER)
    inner, outer = job("inner", 0), job("outer", 0)
    ended(start(outer._replace(module="submitter", arguments=(str(inner.folder), inner.name))))
    ended(log(outer).split()[-1])
    began = read_messages(inner)
    assert len({process["host"] for process in began}) == 2, log(inner)
    assert all("SLURM_MEM_PER_NODE" not in process["environment"] for process in began), "the parent job requested 2 GB"


def test_submission_waits_for_a_controller_that_is_briefly_unavailable(slurm: Testbed, job: Job) -> None:
    work = job("patient", 0, devices_per_node=1)
    slurm("controller", "stop")
    back = threading.Timer(5, lambda: slurm("controller", "start"))
    try:
        with pytest.raises(SchedulerUnavailable):
            ask([work.name])
        back.start()
        handle = start(work)
    finally:
        back.join() if back.ident else slurm("controller", "start")
    ended(handle)
    assert len(read_messages(work)) == 1, log(work)


def test_limits_of_a_cluster_are_read_and_its_refusals_are_reported(
    other_testbed: Testbed, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_testbed.up("--nodes", "1", "--max-array-size", "10", "--max-time", "90", "--min-job-age-s", "3")
    monkeypatch.setenv("SLURM_CONF", str(other_testbed.folder / "slurm.conf"))
    assert limits(Options()) == limits(Options(partition="main")) == (10, None, 90, 1, None, None)
    with pytest.raises(UserError, match="Invalid job array specification"):
        start(job("too_many", 0, devices_per_node=1, tasks=11))
    with pytest.raises(UserError, match="invalid partition specified: nowhere"):
        start(job("nowhere", 0, devices_per_node=1), partition="nowhere")
    work, array = job("forgotten", 0, devices_per_node=1), job("tasks", 0, devices_per_node=1, tasks=2)
    for handle in (start(work), start(array)):
        ended(handle)
    names = (work.name, array.name)
    wait_for(lambda: all(state.source != "squeue" for state in ask(names).values()))
    found = ask([*names, "nobody"])
    assert set(found) == {(work.name, None), (array.name, 0), (array.name, 1)}
    assert {(state.state, state.source) for state in found.values()} == {("COMPLETED", "completion log")}
    assert has_ended(handle)
