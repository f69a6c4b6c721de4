"""Tests of the lock by which only one run measures on this machine at a time. Real processes compete for it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from started_runs import PATIENCE_S, QUICK

from bench.core import store
from bench.core.terminal import LogProgress, Progress
from bench.sweep import local_attempt

HOLD = "from bench.sweep.local_attempt import alone\nwith alone(print):\n    print('held', flush=True)\n    input()"


@pytest.fixture(autouse=True)
def own_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def holder() -> "subprocess.Popen[str]":
    """Start a process that holds the lock until it reads a line from its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLD], text=True, **pipes)


def held(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout
    return process.stdout.readline() == "held\n"


@pytest.mark.processes
def test_second_command_waits_for_the_first_and_names_it() -> None:
    with holder() as first:
        assert held(first)
        with holder() as second:
            assert second.stderr and first.stdin
            waiting = second.stderr.readline()
            begins = f"zeroscale: waiting: another command is measuring: python (pid {first.pid}, since "
            assert waiting.startswith(begins) and waiting.endswith(
                "). To run at the same time, set launcher.lock=false\n"
            )
            first.stdin.write("\n")
            first.stdin.flush()
            assert any(second.stdout.readline() == "held\n" for _ in range(1000)) if second.stdout else False
            assert re.fullmatch(r"zeroscale: waited \d+ s for other commands; starting\n", second.stderr.readline())
            second.kill()


def test_waiting_command_shows_the_maximum_time_left_of_the_holder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waited(Exception):
        pass

    def stop(shown: Progress) -> None:
        LogProgress().show(shown._replace(subject="[1/2] a point"))
        raise Waited

    monkeypatch.setattr("sys.argv", ["/opt/bin/zeroscale", "sweep", "study=smoke", "seed=1, 2"])
    with local_attempt.alone(lambda shown: None) as note:
        note(Progress("steps 7", 0.5, "at most 40 s left"))
        with pytest.raises(Waited), local_attempt.alone(stop):
            pytest.fail("two processes measure at the same time")
    printed, followed = capsys.readouterr().err.splitlines()
    waiting = rf"waiting: another command is measuring: zeroscale sweep study=smoke 'seed=1, 2' \(pid {os.getpid()}, "
    assert re.match(rf"zeroscale: {waiting}since \d\d:\d\d:\d\d; at most 40 s left\)", printed)
    assert followed == "[1/2] a point  waiting for another command  at most 40 s left", "the command is named once"


def test_long_command_of_the_holder_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/bin/zeroscale", "sweep", *(f"key_{number}=value" for number in range(30))])

    def stop(shown: Progress) -> None:
        raise TimeoutError

    with local_attempt.alone(lambda shown: None), pytest.raises(TimeoutError), local_attempt.alone(stop):
        pytest.fail("two processes measure at the same time")
    assert len(capsys.readouterr().err) < 200


TAKES_TURNS = """
import sys, time
from bench.sweep.local_attempt import alone
name, turns, log = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a", buffering=1)
waits = set()
def follow(shown):
    if name not in waits:
        waits.add(name)
        print(f"{name} waits", file=log)
for turn in range(turns):
    with alone(follow):
        print(name, file=log)
        time.sleep(0.2)
"""
"""Program that takes the lock again right after it has released the lock, as a sweep does between two points."""


@pytest.mark.processes
def test_lock_is_granted_in_the_order_of_waiting(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def start(name: str, turns: int, after: str) -> "subprocess.Popen[bytes]":
        until = time.monotonic() + PATIENCE_S
        while after and after not in log.read_text().splitlines():
            assert time.monotonic() < until
            time.sleep(0.01)
        log.touch()
        return subprocess.Popen([sys.executable, "-c", TAKES_TURNS, name, str(turns), str(log)])

    sweep = start("sweep", 10_000, "")
    others = [start("first", 1, "sweep"), start("second", 1, "first waits"), start("third", 1, "second waits")]
    try:
        assert [process.wait(PATIENCE_S) for process in others] == [0, 0, 0]
    finally:
        sweep.kill()
        sweep.wait()
    order = log.read_text().splitlines()
    assert [name for name in order if name in ("first", "second", "third")] == ["first", "second", "third"]
    # At most one point of the sweep: the sweep may have read the queue just before the first command joined the queue.
    assert order[order.index("first waits") : order.index("first")].count("sweep") <= 1
    assert order[order.index("third waits") : order.index("third")].count("sweep") <= 1


@pytest.mark.processes
def test_dead_waiting_command_is_skipped() -> None:
    with holder() as first:
        assert held(first)
        with holder() as second:
            assert second.stderr and second.stderr.readline().startswith("zeroscale: waiting")
            second.kill()
        first.kill()
    with local_attempt.alone(lambda shown: pytest.fail(f"waits: {shown}")):
        assert list(local_attempt.path(os.environ).parent.glob("*.lock.*")) == []


@pytest.mark.processes
def test_lock_of_a_dead_process_is_released() -> None:
    with holder() as first:
        assert held(first)
        first.send_signal(signal.SIGKILL)
    with local_attempt.alone(lambda text: None):
        assert json.loads(local_attempt.path(os.environ).read_text())["pid"] == os.getpid()
    assert local_attempt.path(os.environ).read_text() == ""


def test_lock_file_is_in_the_session_folder_or_next_to_the_caches(tmp_path: Path) -> None:
    assert local_attempt.path({"XDG_RUNTIME_DIR": str(tmp_path)}).parent == tmp_path / "zeroscale"
    gone = {"XDG_RUNTIME_DIR": str(tmp_path / "gone"), "XDG_CACHE_HOME": str(tmp_path)}
    assert local_attempt.path(gone).parent == tmp_path / "zeroscale"


def test_commands_do_not_wait_if_locking_is_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zeroscale").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with local_attempt.alone(print):
        pass
    assert "no lock against other local runs" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("waits", ["true", "false"])
def test_two_commands_on_one_sweep_measure_each_point_once(tmp_path: Path, waits: str) -> None:
    """Two commands run the same sweep, one after the other or at the same time. Before the second command begins a
    point, it must notice that the first has measured this point or is measuring it now."""
    words = [sys.executable, "-m", "bench.cli", "sweep", *QUICK, "devices_per_node=1", "seed=0"]
    both = [
        subprocess.Popen(
            [*words, f"launcher.lock={waits}", "--results", str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    printed = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    records = [store.read_record(path) for path in store.find_records([tmp_path])]
    outcomes = sorted(record.outcome.kind for record in records)
    assert outcomes in (["ok"], ["cancelled", "ok"]), printed
