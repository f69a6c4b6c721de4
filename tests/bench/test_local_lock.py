"""Tests of the lock that allows only one local run at a time, with real processes that compete for it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from started_runs import PATIENCE_S, QUICK

from bench.core import store
from bench.sweep import local_attempt

HOLD = "from bench.sweep.local_attempt import alone\nwith alone(print):\n    print('held', flush=True)\n    input()"


@pytest.fixture(autouse=True)
def own_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def holder() -> "subprocess.Popen[str]":
    """Start a process that holds the lock until it receives a line of input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLD], text=True, **pipes)


def held(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout
    return process.stdout.readline() == "held\n"


@pytest.mark.processes
def test_the_second_waits_for_the_first_and_says_for_whom() -> None:
    with holder() as first:
        assert held(first)
        with holder() as second:
            assert second.stderr and first.stdin
            told = second.stderr.readline()
            begins = f"zeroscale: Another zeroscale run (pid {first.pid}) has been measuring for "
            assert told.startswith(begins) and told.endswith(" s; waiting. To start anyway: launcher.lock=false\n")
            first.stdin.write("\n")
            first.stdin.flush()
            assert any(second.stdout.readline() == "held\n" for _ in range(1000)) if second.stdout else False
            second.kill()


@pytest.mark.processes
def test_the_lock_of_a_process_that_dies_is_free() -> None:
    with holder() as first:
        assert held(first)
        first.send_signal(signal.SIGKILL)
    with local_attempt.alone(lambda text: None):
        assert json.loads(local_attempt.path(os.environ).read_text())["pid"] == os.getpid()
    assert local_attempt.path(os.environ).read_text() == ""


def test_the_lock_lies_in_the_users_session_or_else_beside_the_caches(tmp_path: Path) -> None:
    assert local_attempt.path({"XDG_RUNTIME_DIR": str(tmp_path)}).parent == tmp_path / "zeroscale"
    gone = {"XDG_RUNTIME_DIR": str(tmp_path / "gone"), "XDG_CACHE_HOME": str(tmp_path)}
    assert local_attempt.path(gone).parent == tmp_path / "zeroscale"


def test_where_nothing_can_be_locked_nobody_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zeroscale").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with local_attempt.alone(print):
        pass
    assert "no lock against other local runs" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("waits", ["true", "false"])
def test_two_who_go_through_the_same_sweep_measure_a_point_once(tmp_path: Path, waits: str) -> None:
    """Two sweep commands run one after another, or at the same time. The second must notice that the first has
    started the point."""
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
