"""Tests of `zeroscale logs`. It prints the logs of the attempts at a point (an attempt is one try to measure it) and
the logs of their jobs."""

from pathlib import Path

import pytest

from bench.cli import main
from bench.config import compose
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance
from bench.core.spec import config_id
from bench.sweep import jobs
from bench.sweep.definition import RequestedRun
from bench.sweep.jobs import Job

SPEC = compose.compose_request([("model", "tiny"), ("devices_per_node", 2)]).spec
POINT = config_id(SPEC)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Folder of a study with one point, two attempts at it, and two jobs. Both attempts were in the first job."""
    folder = tmp_path / "runs" / "s"
    circumstance = Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="cpu"), launcher={"name": "slurm"})
    requested = RequestedRun(spec=SPEC, circumstance=circumstance, config_id=POINT)
    for number in (7, 8):
        job = Job(name=f"s-{number}", mode="packed", nodes=1, devices_per_node=2, time_limit_min=9, points=(requested,))
        (jobs.write(folder, job) / f"slurm-{number}.log").write_text(f"of job {number}\n")
    made = circumstance.model_copy(update={"launcher": {"name": "slurm", "job": "s-7"}})
    for number in (0, 1):
        opened = store.open_attempt(folder / POINT, SPEC, made).folder
        lines = [f"[{rank}] attempt {number} line {line}" for line in range(30) for rank in (0, 1)]
        (opened / store.LOG).write_text("\n".join(lines) + "\n")
    return folder


def print_logs(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> list[str]:
    assert main(["logs", *map(str, words)]) == code
    return capsys.readouterr().out.splitlines()


def test_all_logs_of_a_point_are_listed_with_their_ends(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (study, study.parent):
        lines = print_logs(capsys, POINT[:6], folder, "--lines", "2")
        named = [line.removeprefix("── ") for line in lines if line.startswith("── ")]
        assert [Path(name).relative_to(study).as_posix() for name in named] == [
            f"{POINT}/0.0/run.log", "jobs/s-7/slurm-7.log", f"{POINT}/0.1/run.log", "jobs/s-8/slurm-8.log",
        ]  # fmt: skip
        assert lines[1:3] == ["[0] attempt 0 line 29", "[1] attempt 0 line 29"] and lines[-1] == "of job 8"


def test_logs_of_one_attempt_and_one_rank(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = print_logs(capsys, f"{POINT}/0.1", study, "--rank", "1", "--lines", "3")
    assert lines[1:4] == [f"[1] attempt 1 line {line}" for line in (27, 28, 29)]
    assert lines[4:] == [f"── {study}/jobs/s-7/slurm-7.log", "of job 7"]


def test_log_without_lines_is_marked(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty log is usual for a run that ended ok. Without the mark, the output would be only the log's path."""
    (study / POINT / "0.1" / store.LOG).write_text("[0] line\n")
    lines = print_logs(capsys, f"{POINT}/0.1", study, "--rank", "1")
    assert lines[:2] == [f"── {study}/{POINT}/0.1/run.log", "(no lines of rank 1)"]
    (study / POINT / "0.1" / store.LOG).write_text("")
    assert print_logs(capsys, f"{POINT}/0.1", study)[1] == "(empty)"


def test_log_of_the_last_attempt_is_followed_until_its_record(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / POINT / "0.1" / store.RECORD).write_text("{}")
    assert print_logs(capsys, f"{POINT}/0.1", study, "--follow", "--lines", "1")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nothex"], "nothex: is not a config_id; write a config_id"),
        ([f"{POINT}/9"], "is not a config_id"),
        (["0123456789"], "no attempt and no log of this configuration in"),
        ([f"{POINT}/0.9"], "no attempt and no log of this configuration in"),
        ([POINT, "--rank", "x"], "--rank x: is not the number of a rank"),
        ([POINT, "--rank", "7"], "--rank 7: the run has 2 ranks; choose a rank from 0 to 1"),
        ([POINT, "--lines", "0"], "--lines 0: is not a positive integer"),
    ],
)
def test_missing_logs_are_reported_in_one_line(
    study: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["logs", words[0], str(study), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
    assert main(["logs", POINT, str(study / "none")]) == 2
