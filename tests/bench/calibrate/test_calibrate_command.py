"""Tests of `zeroscale calibrate`, which measures the rates of this machine. Some tests run the command with real
processes. Other tests check the errors that the command reports before any process starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from started_runs import PATIENCE_S, SOON_S, alive

from bench.cli import main
from bench.config import compose
from bench.core import plugins
from bench.core.job_environment import read_job


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["batch.micro=2"], "batch.micro=2: a calibration has no other overrides than machine and launcher"),
        (
            ["machine=h200"],
            "machine: the machine has GPUs, but this computer has none that torch can use; ",
        ),
        (["machine=h201"], "machine=h201: no such file in conf/machine; did you mean h200?"),
        (["machine=cpu", "--ranks", "0"], "--ranks 0: is not a positive integer; set 1 or more"),
        (["machine=cpu", "--seconds", "inf"], "--seconds inf: must be above 0; set for example --seconds 90"),
        (["machine=cpu", "--seconds", "0"], "--seconds 0: must be above 0; set for example --seconds 90"),
        (["machine=cpu", "--only", "matmull"], "--only matmull: no such part; did you mean matmul?"),
        (["machine=cpu", "--only", "host_link"], "--only host_link: cannot be measured on a cpu machine"),
        (["machine=cpu", "--name", "a b"], "--name a b: a name is made of letters"),
        (["machine=cpu", "--name", "h200"], "--name h200: a machine of conf/machine has this name"),
        (["machine=cpu", "--out", "x.txt"], "--out x.txt: the file of machine=x must be called x.yaml"),
        (
            ["machine=cpu", "--name", "x", "--out", "y.yaml"],
            "--out y.yaml: the file of machine=x must be called x.yaml",
        ),
    ],
)
def test_invalid_calibration_requests_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"zeroscale: {said}") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_calibration_in_a_job_starts_one_process_per_node_through_srun() -> None:
    job = read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "4"})
    assert job and (job.nodes, job.processes) == (4, 1)
    launcher = plugins.load_queueing(job.system)
    assert launcher
    command = launcher.spread(["python3", "measure"], 4)
    assert command[0] == "srun" and {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--overlap"} <= set(command)
    assert command[-2:] == ["python3", "measure"]


def test_calibration_in_every_task_of_a_step_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "machine=cpu"]) == 2
    assert (
        "job 7: each of its 2 processes would start its own calibration; start the command once"
        in capsys.readouterr().err
    )


def test_calibration_across_rented_nodes_without_a_launcher_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "sky-1"}
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "machine=cpu"]) == 2
    err = capsys.readouterr().err
    assert "job sky-1: each of its 2 processes would start its own calibration; start it in a job of one node" in err


@pytest.mark.processes
def test_calibration_on_several_nodes_of_an_unknown_launcher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSCALE_JOB", '{"job_id": "7", "nodes": 2}')
    words = ["calibrate", "machine=cpu", "--ranks", "1", "--only", "collectives", "--out", str(tmp_path / "mine.yaml")]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert (
        "job 7: has 2 nodes, and no launcher can start a command on each of them; start the command in a job of one"
        in err
    )


SRUN = """#!/bin/sh
for word; do case $word in --nodes=*) nodes=${word#*=} ;; esac; done
while [ "${1#-}" != "$1" ]; do shift; done
number=0
while [ $number -lt $nodes ]; do SLURM_PROCID=$number "$@" & number=$((number + 1)); done
wait
"""
"""Shell script in place of Slurm's srun. It starts the processes of all nodes on this machine."""


@pytest.fixture
def job_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.timed
@pytest.mark.processes
@pytest.mark.usefixtures("job_of_two_nodes")
def test_two_nodes_measure_the_collectives_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine" / "mine.yaml"
    words = ["calibrate", "machine=testbed_1gbit", "--seconds", "1", "--only", "collectives,contention,launches"]
    words += ["launcher=slurm", "launcher.network.rendezvous_host=127.0.0.1", "launcher.network.interface=lo"]
    assert main([*words, "--out", str(path)]) == 0
    assert [file.name for file in path.parent.iterdir()] == ["mine.yaml"], "no folder is left"
    machine = compose.compose_request([("machine", "mine")], tmp_path).machine
    found = machine.calibration
    assert found and found.made["ranks"] == "2 × 1" and found.made["threads"] == "1"
    assert found.kernel_s and found.kernel_s < 1e-3
    assert len(found.slowdown) == 2 and found.slowdown[0] == 1, "both nodes are on one processor"
    measured = {(row.kind, row.nodes, row.ranks) for row in found.collectives}
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    assert measured == {(kind, count, count) for kind in kinds for count in (1, 2)}
    assert machine.inter_node_bytes_per_s and machine.calibrated == {"inter_node_bytes_per_s": "125000000.0"}
    assert found.matmul == () and machine.memory_bytes_per_s is None, "what was not asked for is unknown"
    assert "all-reduce, 2 × 1" in capsys.readouterr().out

    before = path.read_bytes()
    assert main([*words, "--out", str(path)]) == 2
    assert "already exists; add --force to overwrite it" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.processes
def test_rank_on_an_unexpected_device_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", "machine=cpu", "machine.device_names=[Cray-1]", "--ranks", "1", "--only", "launches"]
    assert main([*words, "--out", str(tmp_path / "mine.yaml")]) == 2
    err = capsys.readouterr().err
    assert "the calibration failed (machine=cpu expects Cray-1, but this node has " in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.cold
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.cli", "calibrate", "machine=cpu", "--out", str(tmp_path / "mine.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob(".calibrating-*/doing.txt")) and time.monotonic() < until:
            time.sleep(0.05)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SOON_S) == 130
    finally:
        process.kill()
        process.wait()
    assert len(ranks) == 2 and not alive(list(map(int, ranks)))
    assert list(tmp_path.iterdir()) == []
