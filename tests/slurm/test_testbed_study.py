"""Tests of the program behind `make testbed-study`. Invalid input is refused with a one-line message. If the program is
stopped, no testbed is left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_testbed import PATIENCE_S, Testbed

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parents[2] / "slurm/testbed_study.py"


def study(bed: Testbed, results: Path, *before: str) -> subprocess.Popen[str]:
    """Start slurm/testbed_study.py with the name and subnet of the testbed `bed`, and with result folders in `results`.
    `before` is a command that starts the program, such as `unshare --user`; by default, it is started directly."""
    own = ["--name", bed.name, "--subnet", bed.subnet, "--results", str(results), "--report", str(results / "report")]
    command = [*before, sys.executable, str(PROGRAM), *own]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_study_requires_root(slurm_possible: None, other_testbed: Testbed, tmp_path: Path) -> None:
    with study(other_testbed, tmp_path / "runs", "unshare", "--user") as process:
        printed, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert errors.splitlines() == [errors.strip()] and "needs root; use sudo" in errors
    assert "zeroscale" not in printed.replace(str(PROGRAM.parent), ""), "nothing was measured"
    assert other_testbed.leftovers() == [] and not (tmp_path / "runs").exists()


def test_interrupted_study_leaves_no_testbed_behind(
    slurm_possible: None, other_testbed: Testbed, tmp_path: Path
) -> None:
    with study(other_testbed, tmp_path / "runs") as process:
        assert process.stdout
        assert any(" status " in line for line in process.stdout), "it submitted, and waits"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert other_testbed.leftovers() == []
    assert list((tmp_path / "runs/400mbit/testbed/sweeps").iterdir()), "it can be gone on with"
