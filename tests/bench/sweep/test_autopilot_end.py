"""Tests of the report, the summary and the notification that the autopilot makes at the end of a study. If one of them
fails, the others must still be made."""

from pathlib import Path

import pytest
from sweeps import attempt, point, queued, spec, sweep

from bench.cli import resume
from bench.sweep import definition, jobs
from bench.sweep.snapshot import read_snapshot

FOUR, EIGHT = spec(batch__micro=4), spec(batch__micro=8)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a study with one successful and one failed point. Writing a real report would take long.
    Instead, the function that writes it is replaced by one that fails."""
    folder = tmp_path / "my study"
    definition.write(folder, sweep([point(FOUR), point(EIGHT)]))
    attempt(folder, FOUR, "ok")
    attempt(folder, EIGHT, "hang")
    monkeypatch.setattr(resume, "build_module_command", lambda *words: ["sh", "-c", "echo no pandas >&2; exit 1"])
    return folder


def test_summary_has_every_points_outcome_and_the_reason_for_a_missing_report(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume.finish_autopilot(study, None, "sbatch: no nodes")
    summary = (study / "report" / "summary.md").read_text()
    assert summary.startswith("# my study\n\n2 runs: 1 ok, 1 waiting.")
    assert "The autopilot could not continue: sbatch: no nodes." in summary
    assert (
        "- 1 × waiting: to run again; last attempt: it was hang" in summary and "- micro 4  repeat 0: ok: " in summary
    )
    assert "no report: no pandas; to write it: zeroscale report" in summary and "'" in summary, "quoted for a shell"
    output = capsys.readouterr()
    assert "no report: no pandas" in output.err and str(study / "report" / "summary.md") in output.out
    assert "report" not in read_snapshot(study).tried, "a report is no configuration"


def test_summary_of_a_spent_budget_does_not_count_the_autopilot_itself(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job of the autopilot, which writes the summary, is the only job in the queue."""
    made = sweep([point(spec(batch__micro=2))])
    budget = made.rules.budget.model_copy(update={"node_hours": 0.05})
    definition.write(study, made.model_copy(update={"rules": made.rules.model_copy(update={"budget": budget})}))
    job = study / jobs.FOLDER / "s-autopilot-1"
    job.mkdir(parents=True)
    jobs.write_handle(job, "7")
    jobs.begin_allocation(job, jobs.AllocationPeriod("7", None, 0, 1, 100.0, 292.6))
    state = queued()._replace(handle="7", name=job.name)
    monkeypatch.setattr("bench.launchers.slurm.ask", lambda names, options: {(job.name, None): state})
    monkeypatch.setenv("ZEROSCALE_JOB", f'{{"job_id": "7", "name": "{job.name}"}}')
    resume.finish_autopilot(study, None)
    summary = (study / "report" / "summary.md").read_text()
    assert "; 0.05 node-hours spent, 0 jobs in the queue." in summary and "\n- 1 × waiting\n" in summary
    assert (
        "\nThe budget is spent: 0.0535 of 0.05 node-hours; repeat `zeroscale sweep` with a higher budget.node_hours"
        in summary
    )


def test_notify_command_gets_the_path_of_the_summary_as_its_last_argument(study: Path, tmp_path: Path) -> None:
    resume.finish_autopilot(study, f"cp -t '{tmp_path}'")
    assert (tmp_path / "summary.md").read_text() == (study / "report" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("command", "message"),
    [("/no/such/program", "No such file"), ("false", "ended with exit code 1"), ("sh -c 'kill -9 $$'", "exit code -9")],
)
def test_failing_notify_command_is_reported_and_the_summary_is_kept(
    study: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    resume.finish_autopilot(study, command)
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith(f"zeroscale: --notify {command}: ") and message in output
    assert (study / "report" / "summary.md").exists()


def test_notify_command_ends_after_its_timeout(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_NOTIFY_S", 0.2)
    resume.finish_autopilot(study, "sh -c 'exec sleep 60'")
    assert "timed out" in capsys.readouterr().err


def test_unwritable_summary_is_reported(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "report").write_text("in the way")
    resume.finish_autopilot(study, None)
    assert "the summary cannot be written (" in capsys.readouterr().err
