"""Report, summary and notification that the autopilot writes at its end. A failure of one of them does not affect the
others."""

from pathlib import Path

import pytest
from sweeps import attempt, point, spec, sweep

from bench.cli import resume
from bench.sweep import definition
from bench.sweep.snapshot import read_snapshot

FOUR, EIGHT = spec(batch__micro=4), spec(batch__micro=8)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a study with one successful and one failed point. Writing its report fails, since a real
    report takes long."""
    folder = tmp_path / "my study"
    definition.write(folder, sweep([point(FOUR), point(EIGHT)]))
    attempt(folder, FOUR, "ok")
    attempt(folder, EIGHT, "hang")
    monkeypatch.setattr(resume, "build_module_command", lambda *words: ["sh", "-c", "echo no pandas >&2; exit 1"])
    return folder


def test_the_summary_says_how_every_point_ended_and_why_there_is_no_report(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume.finish_autopilot(study, None, "sbatch: no nodes")
    summary = (study / "report" / "summary.md").read_text()
    assert summary.startswith("# my study\n\n2 points: 1 ok, 1 waiting.")
    assert "It could not go on: sbatch: no nodes." in summary
    assert (
        "- 1 × waiting: to run again; last attempt: it was hang" in summary and "- micro 4  repeat 0: ok: " in summary
    )
    assert "no report: no pandas; to write it: zeroscale report" in summary and "'" in summary, "quoted for a shell"
    said = capsys.readouterr()
    assert "no report: no pandas" in said.err and str(study / "report" / "summary.md") in said.out
    assert "report" not in read_snapshot(study).tried, "it is no configuration"


def test_the_command_gets_the_path_of_the_summary_as_its_last_argument(study: Path, tmp_path: Path) -> None:
    resume.finish_autopilot(study, f"cp -t '{tmp_path}'")
    assert (tmp_path / "summary.md").read_text() == (study / "report" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("command", "told"),
    [("/no/such/program", "No such file"), ("false", "ended with exit code 1"), ("sh -c 'kill -9 $$'", "exit code -9")],
)
def test_a_command_that_fails_is_told_and_harms_nothing(
    study: Path, capsys: pytest.CaptureFixture[str], command: str, told: str
) -> None:
    resume.finish_autopilot(study, command)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"zeroscale: --notify {command}: ") and told in said
    assert (study / "report" / "summary.md").exists()


def test_a_command_that_does_not_return_is_given_up(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_NOTIFY_S", 0.2)
    resume.finish_autopilot(study, "sh -c 'exec sleep 60'")
    assert "timed out" in capsys.readouterr().err


def test_a_folder_that_takes_no_summary_is_told(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "report").write_text("in the way")
    resume.finish_autopilot(study, None)
    assert "the summary cannot be written (" in capsys.readouterr().err
