"""Tests of a sweep that runs on this machine: the points that it skips, the supervisor process of each run, and its
output."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ended_well import observed, saved_pair
from started_runs import ENDLESS, PATIENCE_S, QUICK, survivors
from sweeps import attempt, point, spec, sweep

from bench import api
from bench.cli import options
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance, Outcome, RunRecord
from bench.core.terminal import Progress
from bench.runtime.outcome import build_heartbeat
from bench.sweep.local_sweep import BestSoFar, LocalSweep, SweepResult
from bench.sweep.policy import PlannedRun, SweepPlan, find_skip


def here(folder: Path, *micros: int, retry: bool = True) -> LocalSweep:
    made = sweep([point(spec(batch__micro=micro)) for micro in micros])
    wanted = list(made.wanted())
    return LocalSweep(folder, wanted, retry=retry, tell=[].append, follow=[].append)


def left(one: LocalSweep) -> list[PlannedRun]:
    return [run for run in one.runs if not find_skip(run, SweepPlan(one.runs), one.snapshot())]


def test_pruned_points_and_answered_points_are_counted_separately(tmp_path: Path) -> None:
    small, large = spec(batch__micro=2), spec(batch__micro=4)
    for _ in range(2):
        attempt(tmp_path, small, "oom")
    found = here(tmp_path, 2, 4)
    ended = found.run()
    assert not ended.good, "not everything is ok"
    assert (ended.outcomes, ended.skipped) == ({"oom": 1, "pruned": 1}, 1)
    assert [a.outcome for a in store.list_attempts(tmp_path / point(large).config_id)] == ["pruned"]


def test_a_repeated_sweep_begins_with_its_answers_from_a_busy_machine_and_how_to_add_quiet_ones(tmp_path: Path) -> None:
    """An earlier sweep has results for three of four points (configurations to measure): one was measured on a busy
    machine, one on a quiet machine, and one ran out of memory. The repeated sweep first prints the number of existing
    results, the number measured on a busy machine, and a command that adds repeats on a quiet machine."""
    attempt(tmp_path, spec(batch__micro=1), "ok", busy=True)
    attempt(tmp_path, spec(batch__micro=2), "ok")
    for _ in range(2):
        attempt(tmp_path, spec(batch__micro=4), "oom")
    told: list[str] = []
    wanted = list(sweep([point(spec(batch__micro=micro)) for micro in (1, 2, 4, 8)]).wanted())
    LocalSweep(tmp_path, wanted, retry=True, tell=told.append, follow=print).run()
    made, *rest = told[0].split("; ", 1)
    assert made == "3 of 4 runs already had a result, 1 to run"
    assert rest == [
        "1 answer was made on a busy machine: times of such runs decide nothing; to add repeats without "
        "background load, run the same sweep command again with --repeats 4 launcher.quiet_within_s=600"
    ]
    LocalSweep(tmp_path, wanted, retry=True, tell=told.append, follow=print).run()
    assert len(told) == 2, "nothing is left to run, and the answer follows at once"


def test_remedy_for_a_busy_machine_counts_the_planned_repeats(tmp_path: Path) -> None:
    """If a result was measured on a busy machine, a sweep prints a command that adds repeats on a quiet machine. The
    sweep prints this command at its beginning and at its end, with a number of repeats. At the beginning, some planned
    repeats have not run yet. The number must include these planned repeats, so that the command at the end has the same
    number."""
    attempt(tmp_path, spec(batch__micro=1), "ok", busy=True)
    asked = sweep([point(spec(batch__micro=1))])
    asked = asked.model_copy(update={"order": ((0, 0), (1, 0))})
    local = LocalSweep(tmp_path, list(asked.wanted()), retry=True, tell=print, follow=print)
    assert "--repeats 5 " in local.describe_busy(local.find_answers().values()), "two planned, and three quiet ones"


def test_summary_counts_flags_of_this_sweep_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for micro in (1, 2, 4):
        attempt(tmp_path, spec(batch__micro=micro), "ok", busy=True)
    options.print_ended(here(tmp_path, 4).run(), as_json=False)
    assert capsys.readouterr().out.startswith("1 ok (1 busy, 1 short, 1 unverified); 1 already had a result; ")


def test_answer_of_a_sweep_is_about_its_own_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sweeps without a study share a folder. The answer of a sweep includes earlier runs of the sweep's own points. It
    does not include other points, or runs of the same point on another machine."""
    for micro in (1, 2):
        attempt(tmp_path, spec(batch__micro=micro), "ok", busy=True)
    attempt(tmp_path, spec(batch__micro=8), "host_oom")
    attempt(tmp_path, spec(batch__micro=4), "ok", busy=True)
    attempt(tmp_path, spec(batch__micro=4), "ok", machine="other")
    attempt(tmp_path, spec(batch__micro=4), "ok", repeat=7)
    options.print_ended(here(tmp_path, 4).run(), as_json=False)
    _, *answer = capsys.readouterr().out.splitlines()
    text = " ".join(answer)
    assert "1 of 2 ok runs was made on a busy machine: " in text
    assert "ended ok" not in text and "other" not in text, "neither the failed run nor the other machine"


def test_run_that_deviates_from_the_reference_run_counts_as_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of the deviating run has the outcome `ok`, because the record was written before the run was compared
    with the reference run."""
    for factor, expected in ((1.0, {"ok": 2}), (1.5, {"ok": 1, "invalid": 1})):
        folder = tmp_path / f"{factor}"
        ended = SweepResult(folder, Counter(ok=2), 0, attempts=frozenset(saved_pair(folder, factor).values()))
        assert options.print_ended(ended, as_json=True) == (factor == 1.0)
        assert json.loads(capsys.readouterr().out)["outcomes"] == expected
    assert not options.print_ended(ended, as_json=False)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("1 ok (") and ", 1 invalid; " in first
    assert second.startswith("1 invalid: loss differs from that of ddp")


CLAIM = "import sys; from bench.runtime.outcome import build_heartbeat; print(build_heartbeat('claimed').decode())"


def test_point_claimed_by_a_live_process_is_skipped_and_one_of_a_dead_process_is_run(tmp_path: Path) -> None:
    four = spec(batch__micro=4)
    dead = subprocess.run([sys.executable, "-c", CLAIM], capture_output=True, check=True).stdout
    place = Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="cpu"), launcher={})
    store.open_attempt(tmp_path / point(four).config_id, four, place, claim=dead)
    assert left(here(tmp_path, 4)), "at once, not when its heartbeat is stale"
    store.open_attempt(tmp_path / point(four).config_id, four, place, claim=build_heartbeat("claimed"))
    ended = here(tmp_path, 4).run()
    assert (ended.good, ended.unanswered, dict(ended.outcomes)) == (False, 1, {})
    said = f"0 already had a result; 1 without a final result: continue with zeroscale resume; {tmp_path}"
    assert options.format_ended(ended, {}) == said


def test_attempts_are_counted_separately_for_each_machine(tmp_path: Path) -> None:
    four = spec(batch__micro=4)
    for machine in ("cpu", "other"):
        attempt(tmp_path, four, "error", machine=machine)
    one = here(tmp_path, 4, retry=False)
    assert left(one) == one.runs
    attempt(tmp_path, four, "error")
    one = here(tmp_path, 4, retry=False)
    ended = one.run()
    assert not ended.good and ended.skipped == 1


def ended_well(step_s: float, micro: int = 4, **overrides: Any) -> RunRecord:
    made = spec(batch__micro=micro, **overrides)
    return RunRecord(
        config_id=point(made).config_id,
        spec=made,
        circumstance=Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="cpu"), launcher={}),
        outcome=Outcome(kind="ok", reason=""),
        observations=observed((step_s,) * 5),
    )


def test_best_so_far_compares_points_that_differ_in_engine_and_micro_batch_only() -> None:
    best = BestSoFar()
    assert best.add(ended_well(0.2)) == "", "nothing to compare with"
    assert best.add(ended_well(0.1, engine="ddp")).startswith("best so far: ddp micro 4, ")
    assert best.add(ended_well(0.3, engine="zero3")).startswith("best so far: ddp micro 4, ")
    assert best.add(ended_well(0.01, precision="fp32")) == "", "another precision is another question"


def test_last_line_of_a_sweep_and_line_of_a_run_have_the_flags(tmp_path: Path) -> None:
    here_ = here(tmp_path, 4)
    attempt(tmp_path, spec(batch__micro=4), "ok")
    line = options.format_ended(here_.run(), {"short": 1, "busy": 1})
    assert line.startswith("1 ok (1 short, 1 busy); 1 already had a result; ")
    assert options.describe_run(ended_well(0.2)).endswith("; flags: short")


def started_sweep(results: Path, *overrides: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "bench.cli", "sweep", *overrides, "--results", str(results)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.processes
def test_runs_of_a_local_sweep_are_forked_from_one_supervisor_and_a_dead_one_is_replaced(
    tmp_path: Path,
) -> None:
    plan, supervisors = api.plan(overrides=[*QUICK, "devices_per_node=1", "engine=ddp", "seed=0,1,2"]), []

    def kill_the_second(progress: Progress) -> None:
        for beat in tmp_path.rglob(store.HEARTBEAT):
            pid = int(beat.read_text().partition('"supervisor": ')[2].partition(",")[0])
            if pid != os.getpid() and pid not in supervisors:
                supervisors.append(pid)
        if progress.subject.startswith("[2/3]") and progress.what == "starting" and len(supervisors) == 1:
            os.kill(supervisors[0], signal.SIGKILL)
            assert not survivors(supervisors)
            supervisors.append(0)

    ended = api.run(plan, tmp_path, follow=kill_the_second)
    records = [store.read_record(path) for path in store.find_records([tmp_path])]
    assert ended.outcomes == {"ok": 3} and {one.circumstance.launcher["started"] for one in records} == {"forked"}
    assert len(supervisors) == 3, "the first, its mark, and its successor"
    assert not survivors([pid for pid in supervisors if pid])


@pytest.mark.processes
def test_sweep_ended_by_sigterm_and_its_status_print_the_resume_command(tmp_path: Path) -> None:
    process = started_sweep(tmp_path, *ENDLESS, "engine=ddp", "seed=0,1")
    until = time.monotonic() + PATIENCE_S
    while not any('"step": 1' in beat.read_text() for beat in tmp_path.rglob(store.HEARTBEAT)):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    resume = f"zeroscale resume {tmp_path / 'adhoc'}"
    assert f"zeroscale: ended by SIGTERM; results of finished runs are kept. To continue: {resume}\n" in errors
    [record] = map(store.read_record, store.find_records([tmp_path]))
    assert record.outcome.kind == "cancelled"
    command = [sys.executable, "-m", "bench.cli", "status", str(tmp_path / "adhoc")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout
    assert "to run again; last attempt: interrupted by SIGTERM" in told
    assert f"no process runs this sweep now; to run the waiting points: {resume}\n" in told
