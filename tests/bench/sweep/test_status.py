"""Tests of `zeroscale status`, `resume` and `cancel`, without a real scheduler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import attempt, point, queued, spec, sweep

from bench import api
from bench.cli import main
from bench.cli.status import format_progress
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance, OutcomeKind
from bench.core.spec import RunSpec
from bench.launchers.slurm.states import SQUEUE_FORMAT
from bench.runtime.outcome import build_heartbeat
from bench.sweep import definition, jobs
from bench.sweep.jobs import Job
from bench.sweep.local_attempt import MeasuredRun
from bench.sweep.lost import finalize_lost
from bench.sweep.status import read_state


def zeroscale(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench.cli", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_status_lists_points_without_success_and_exits_0_once_all_are_answered(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    definition.write(tmp_path, sweep([point(four), point(eight)]))
    attempt(tmp_path, four, "ok")
    told = zeroscale("status", str(tmp_path))
    assert told.returncode == 1
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["waiting", "nothing", "2"]
    told = zeroscale("status", str(tmp_path), "--all")
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["ok", "waiting", "nothing", "2"]
    assert "  flags: short\n" in told.stdout and "2 runs: 1 ok (1 short), 1 waiting" in told.stdout
    attempt(tmp_path, eight, "oom")
    told = zeroscale("status", str(tmp_path), "--json")
    assert told.returncode == 0
    states = [(found["state"], found["outcome"], found["flags"]) for found in json.loads(told.stdout)["points"]]
    assert states == [("answered", "ok", ["short"]), ("answered", "oom", None)]


@pytest.mark.processes
def test_unreadable_record_is_named_and_does_not_answer_its_point(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    definition.write(tmp_path, sweep([point(four), point(eight)]))
    attempt(tmp_path, four, "ok")
    torn = attempt(tmp_path, eight, "ok") / "record.json"
    torn.write_bytes(torn.read_bytes()[:-200])
    told = zeroscale("status", str(tmp_path))
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["waiting", "nothing", "2"]
    assert told.returncode == 1 and told.stderr.splitlines() == [
        "zeroscale: 1 unreadable file ignored:",
        f"  {torn}: not a zeroscale record",
    ]


_COLUMNS = [column.split(":") for column in SQUEUE_FORMAT.split(",")]


def put_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str = "PENDING", **columns: object
) -> Path:
    """Replace `squeue` by a script that reports a requeued job, and `scancel` by a script that writes its arguments to
    a file. Return the path of this file. `columns` replace values in squeue's output."""
    values = {"ArrayJobID": 7, "State": state, "RestartCnt": 1, "NumNodes": 1, "Name": name, **columns}
    row = "".join(f"{values.get(field, 'N/A')!s:<{width}}" for field, width in _COLUMNS)
    cancelled = folder / "cancelled"
    for program, does in {"squeue": f"echo '{row}'", "scancel": f'echo "$@" >> {cancelled}'}.items():
        (folder / program).write_text(f"#!/bin/sh\n{does}\n")
        (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return cancelled


@pytest.mark.processes
@pytest.mark.parametrize("outcome", ["preempted", "ok"])
def test_requeued_job_is_shown_until_its_points_are_answered_and_is_always_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: OutcomeKind
) -> None:
    study, made = tmp_path / "study", sweep([point(spec())])
    definition.write(study, made)
    points = (made.requested(made.points[0], 0),)
    job = Job(name="s-1", mode="point", nodes=1, devices_per_node=1, time_limit_min=9, points=points)
    folder = jobs.write(study, job)
    jobs.write_handle(folder, "7")
    jobs.end_allocation(jobs.begin_allocation(folder, jobs.AllocationPeriod("7", None, 0, 1, 100.0, None)), 200.0)
    attempt(study, spec(), outcome, job="s-1", restart=0)
    cancelled = put_back(tmp_path, monkeypatch, "s-1")
    told = json.loads(zeroscale("status", str(study), "--json").stdout)
    [found] = told["points"]
    assert (found["state"], told["jobs"]) == (("pending", ["7"]) if outcome == "preempted" else ("answered", []))
    assert zeroscale("cancel", str(study)).returncode == 0 and cancelled.read_text().split()[-1] == "7"


def test_job_resubmitted_by_hand_keeps_the_node_hours_of_every_start(tmp_path: Path) -> None:
    """Job 7 was requeued once and then killed, so the end of its second start is the last change of its log. The file
    of its first start has the name that older versions used. Job 9 runs."""
    study = waiting(tmp_path)
    folder = study / jobs.FOLDER / "s-1"
    starts = (("7", 0, 100.0, 200.0), ("7", 1, 300.0, None), ("9", 0, 900.0, None))
    first, *_ = [
        jobs.begin_allocation(folder, jobs.AllocationPeriod(job_id, None, restart, 1, began_at, ended_at))
        for job_id, restart, began_at, ended_at in starts
    ]
    first.rename(folder / "allocation.0.json")
    assert [jobs.find_latest_restart(folder, None, job_id) for job_id in ("7", "9", "10")] == [1, 0, -1]
    (folder / "slurm-7.log").touch()
    os.utime(folder / "slurm-7.log", (500, 500))
    finalize_lost(read_state(study, ask=False)._replace(queue={("s-1", None): queued()._replace(handle="9")}))
    ends = {(spent.job_id, spent.restart): spent.ended_at for _, spent in jobs.list_allocations(folder)}
    assert ends == {("7", 0): 200.0, ("7", 1): 500.0, ("9", 0): None}


@pytest.mark.processes
@pytest.mark.parametrize(("begun_in", "outcome"), [(0, "node_failure"), (1, "error")])
def test_attempt_before_a_restart_of_its_job_is_not_judged_by_the_jobs_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_in: int, outcome: OutcomeKind
) -> None:
    study, made = tmp_path / "study", sweep([point(spec())])
    definition.write(study, made)
    points = (made.requested(made.points[0], 0),)
    job = Job(name="s-1", mode="point", nodes=1, devices_per_node=1, time_limit_min=9, points=points)
    jobs.write(study, job)
    folder = attempt(study, spec(), None, job="s-1", restart=begun_in)
    put_back(tmp_path, monkeypatch, "s-1", state="COMPLETED")
    zeroscale("status", str(study))
    assert store.read_record(folder / store.RECORD).outcome.kind == outcome


def waiting(folder: Path) -> Path:
    """Return the folder of a study with one point. The point's job was submitted, and has not run yet."""
    study, made = folder / "study", sweep([point(spec())])
    definition.write(study, made)
    points = (made.requested(made.points[0], 0),)
    job = Job(name="s-1", mode="point", nodes=1, devices_per_node=1, time_limit_min=9, points=points)
    jobs.write_handle(jobs.write(study, job), "7")
    return study


@pytest.mark.processes
def test_queued_job_is_shown_with_its_number_reason_and_expected_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = waiting(tmp_path)
    put_back(tmp_path, monkeypatch, "s-1", Reason="Priority", StartTime="2026-11-23T08:30:00")
    told = json.loads(zeroscale("status", str(study), "--json").stdout)
    [queued], [found] = told["queue"], told["points"]
    assert (queued["job"], queued["reason"], queued["stuck"], queued["points"]) == ("7", "Priority", None, 1)
    assert queued["starts_at"].startswith("2026-11-23T") and queued["log"] is None and found["job"] == "7"
    text = zeroscale("status", str(study)).stdout
    assert "in job 7: pending (Priority), expected to start 2026-11-23 08:30" in text
    assert f"job 7  pending (Priority), expected to start 2026-11-23 08:30  {study}/jobs/s-1" in text
    attempt(study, spec(), "ok")
    text = zeroscale("status", str(study)).stdout
    assert (
        f"every point has a final result, but jobs are still in the queue; to cancel them: zeroscale cancel {study}"
        in text
    )


@pytest.mark.processes
@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_status_has_the_log_and_the_id_of_a_job_that_was_resubmitted_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    study = waiting(tmp_path)
    logs = [study / f"jobs/s-1/slurm-{number}.log" for number in (7, 9)]
    for log in logs:
        log.touch()
    put_back(tmp_path, monkeypatch, "s-1", state=state, ArrayJobID=9)
    told = json.loads(zeroscale("status", str(study), "--json").stdout)
    assert (told["jobs"], told["queue"][0]["log"]) == (["9"], str(logs[1]))
    assert f"job 9  {state.lower()}  {logs[1]}\n" in zeroscale("status", str(study)).stdout


@pytest.mark.processes
def test_unavailable_scheduler_is_reported_and_its_points_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = waiting(tmp_path)
    put_back(tmp_path, monkeypatch, "s-1")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    asked = zeroscale("status", str(study), "--json")
    told = json.loads(asked.stdout)
    assert asked.returncode == 1 and "Unable to contact" in told["scheduler_away"]
    assert told["jobs"] is told["queue"] is None and told["points"][0]["state"] == "unknown"
    assert zeroscale("status", str(study)).stdout.endswith("the queue is unknown\n")


@pytest.mark.parametrize(
    ("autopilot", "node_hours", "outcome", "told"),
    [
        (False, None, None, "nothing is queued; continue with: zeroscale resume {}"),
        (True, None, None, "the autopilot has ended; continue with: zeroscale resume {} --autopilot"),
        (
            True,
            0.05,
            None,
            "the budget is spent: 0.0535 of 0.05 node-hours; repeat `zeroscale sweep` with a higher budget.node_hours",
        ),
        (
            False,
            None,
            "hang",
            "given up: 1 run; remove the cause, and repeat `zeroscale sweep`, with a higher budget.attempts",
        ),
    ],
)
def test_status_of_a_stopped_sweep_names_the_next_command_and_no_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    autopilot: bool, node_hours: float | None, outcome: OutcomeKind | None, told: str,
) -> None:  # fmt: skip
    """The only job ended before it attempted its point, and the scheduler no longer lists it."""
    study = waiting(tmp_path)
    [made] = definition.read(study)
    budget = made.rules.budget.model_copy(update={"node_hours": node_hours})
    definition.write(study, made.model_copy(update={"rules": made.rules.model_copy(update={"budget": budget})}))
    job = study / jobs.FOLDER / "s-1"
    jobs.end_allocation(jobs.begin_allocation(job, jobs.AllocationPeriod("7", None, 0, 1, 100.0, None)), 292.6)
    if autopilot:
        (study / jobs.FOLDER / "s-autopilot-1").mkdir()
        jobs.write_handle(study / jobs.FOLDER / "s-autopilot-1", "8")
    for _ in range(made.rules.budget.attempts if outcome else 0):
        attempt(study, spec(), outcome)
    put_back(tmp_path, monkeypatch, "another job")
    for program in ("sacct", "scontrol"):
        (tmp_path / program).symlink_to("/bin/true")
    assert main(["status", str(study)]) == 1
    printed = capsys.readouterr().out
    assert told.format(study) in " ".join(printed.split()) and " left" not in printed


def summarise(folder: Path) -> str:
    return format_progress(read_state(folder, ask=False))


def test_time_left_is_estimated_from_time_limits_before_a_point_has_finished(tmp_path: Path) -> None:
    points = [point(spec(batch__micro=micro), limit_min=10) for micro in (1, 2, 4)]
    definition.write(tmp_path, sweep(points))
    assert summarise(tmp_path) == "3 runs: 3 waiting; at most 30 min left, from the time limits of the plan"


def test_time_left_is_estimated_from_the_median_of_finished_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [spec(batch__micro=micro) for micro in (1, 2, 4, 8, 16)]
    definition.write(tmp_path, sweep([point(one, limit_min=100) for one in made]))
    for one in made[:3]:
        attempt(tmp_path, one, "ok")
    hours = iter([0.1, 0.2, 9.0])
    monkeypatch.setattr("bench.cli.status.compute_node_hours", lambda record: next(hours))
    assert summarise(tmp_path).endswith("; about 24 min left, from the median of 3 finished runs")


def test_sweep_without_open_points_has_no_time_left(tmp_path: Path) -> None:
    definition.write(tmp_path, sweep([point(spec())]))
    attempt(tmp_path, spec(), "ok")
    assert summarise(tmp_path) == "1 run: 1 ok"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--notify", "mail"], "--notify: needs --autopilot, which runs this command at its end; add --autopilot"),
        (["--autopilot", "--notify", "mail 'x"], "no closing quotation; quote the command as for a shell"),
        (["--notify", ""], "--notify: is followed by an empty argument"),
    ],
)
def test_notify_command_without_autopilot_or_with_bad_quotes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    for verb in ("sweep", "resume"):
        assert main([verb, str(tmp_path), *words] if verb == "resume" else [verb, *words]) == 2
        said = capsys.readouterr().err
        assert why in said and said.count("\n") == 1


def test_two_sweeps_requested_at_the_same_moment_are_both_kept(tmp_path: Path) -> None:
    made = sweep([point(spec())])
    assert definition.write(tmp_path, made) != definition.write(tmp_path, made)
    assert len(definition.read(tmp_path)) == 2


@pytest.mark.processes
def test_a_folder_without_a_sweep_is_refused_in_one_line(tmp_path: Path) -> None:
    for verb in ("status", "resume", "cancel"):
        told = zeroscale(verb, str(tmp_path))
        assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "no sweep was started" in told.stderr


def test_folder_with_single_runs_alone_has_a_remedy_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path, spec(), "cancelled")
    for verb in ("status", "resume"):
        assert main([verb, str(tmp_path)]) == 2
        assert "only single runs; to repeat a run, use its `zeroscale run` command again" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.thorough
def test_ten_thousand_answered_points_are_shown(tmp_path: Path) -> None:
    """The test checks only the output of `status`. A benchmark measures its time."""
    made = spec()
    points = [point(made).model_copy(update={"config_id": f"{number:010x}"}) for number in range(10_000)]
    definition.write(tmp_path, sweep(points))
    record = (attempt(tmp_path / "one", made, "ok") / "record.json").read_bytes()
    for one in points:
        folder = tmp_path / one.config_id / "0.0"
        folder.mkdir(parents=True)
        (folder / "record.json").write_bytes(record)
    told = zeroscale("status", str(tmp_path))
    assert (told.returncode, told.stdout) == (0, "10000 runs: 10000 ok\n"), told.stderr
    assert len(zeroscale("status", str(tmp_path), "--all").stdout.splitlines()) == 10_001


@pytest.mark.processes
def test_unreadable_sweep_is_named_and_other_sweeps_count(tmp_path: Path) -> None:
    """Three files are unreadable. One of these files is from an earlier version of zeroscale, which wrote an infinite
    limit as null."""
    definition.write(tmp_path, sweep([point(spec())]))
    attempt(tmp_path, spec(), "ok")
    [good] = (tmp_path / "sweeps").glob("*.json")
    plain = json.loads(good.read_bytes())
    for name, text in {
        "older": json.dumps(plain | {"limits": {"hang_s": None}}),
        "torn": good.read_text()[:-20],
        "deep": "[" * 100_000,
    }.items():
        (tmp_path / "sweeps" / f"{name}.json").write_text(text)
    told = zeroscale("status", str(tmp_path))
    assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "1 run: 1 ok (1 short)")
    lines = told.stderr.splitlines()
    assert len(lines) == 3 and all("this version of zeroscale cannot read this sweep" in line for line in lines)
    assert "limits.hang_s=null: must be a number > 0" in told.stderr
    good.unlink()
    told = zeroscale("status", str(tmp_path))
    assert told.returncode == 2 and "this version of zeroscale cannot read this sweep" in told.stderr


def test_a_notebook_shows_each_result_in_a_few_lines_with_its_main_numbers(tmp_path: Path) -> None:
    study = api.Study(name="mine", axes={"engine": ["ddp", "zero1"], "batch.micro": [1, 2, 3, 4, 5, 6]}, repeats=3)
    on_cpu = {"machine": "cpu", "devices_per_node": 2}
    plan, (first, *_) = api.plan(study, on_cpu), api.predict(study, on_cpu)
    attempt(tmp_path / "mine", RunSpec.model_validate(plan.sweep.points[0].spec), "ok", busy=True)
    definition.write(tmp_path / "mine", plan.sweep)
    (record,) = (tmp_path / "mine").glob(f"*/*/{store.RECORD}")
    shown = {
        "36 runs of 12 points": plan,
        "ddp micro 1: ": first,
        "36 runs: 35 waiting, 1 ok": api.status(tmp_path / "mine"),
        "ok: 0.1 s per step, n = 3; busy machine": MeasuredRun(record.parent, store.read_record(record)),
        "ddp    fp32": api.point(on_cpu | {"engine": "ddp"}),
        "zero1, 1 node": api.advise(
            {"machine": "h100", "devices_per_node": 8, "model": "mt5_xl", "nodes": 1, "engine": "zero1"}
        ),
        "samples_per_s over engine, ": api.plan_search("search_smoke"),
    }
    for words, result in shown.items():
        text = repr(result)
        assert words in text and text.startswith(f"<{type(result).__name__}") and text.endswith(">")
        assert len(text) < 1500 and text.count("\n") < 12, "a dozen lines"
    assert "4 more" in repr(plan)


def test_cancel_of_a_local_sweep_depends_on_whether_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    asked = sweep([point(four), point(eight)])
    definition.write(tmp_path, asked.model_copy(update={"launcher": {"name": "local"}}))
    attempt(tmp_path, four, "ok")
    assert main(["cancel", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("nothing to cancel: ")
    place = Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="cpu"), launcher={})
    store.open_attempt(tmp_path / point(eight).config_id, eight, place, claim=build_heartbeat("claimed"))
    assert main(["cancel", str(tmp_path)]) == 2
    assert "this sweep runs in the command that started it; press Ctrl-C in its terminal" in capsys.readouterr().err


def test_given_up_point_waits_again_after_a_sweep_with_more_attempts(tmp_path: Path) -> None:
    """Three failed attempts use up the default budget. The sweep is then repeated with `budget.attempts=4`, and after
    one more failure the point is given up again."""
    made = sweep([point(spec())])
    definition.write(tmp_path, made)
    for _ in range(3):
        attempt(tmp_path, spec(), "hang")

    def state() -> str:
        (status,) = read_state(tmp_path, ask=False).statuses
        return status.state

    assert state() == "given up"
    budget = made.rules.budget.model_copy(update={"attempts": 4})
    definition.write(tmp_path, made.model_copy(update={"rules": made.rules.model_copy(update={"budget": budget})}))
    assert state() == "waiting"
    attempt(tmp_path, spec(), "hang")
    assert state() == "given up"
