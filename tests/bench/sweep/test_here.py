"""A sweep on this machine: what it does about points before it starts any."""

import subprocess
import sys
from pathlib import Path

from sweeps import attempt, point, spec, sweep

from bench.cli.sweep import format_ended
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance
from bench.runtime.outcome import build_heartbeat
from bench.sweep.local_sweep import LocalSweep
from bench.sweep.policy import PlannedRun, SweepPlan, find_skip


def here(folder: Path, *micros: int, retry: bool = True) -> LocalSweep:
    made = sweep([point(spec(batch__micro=micro)) for micro in micros])
    wanted = list(made.wanted())
    return LocalSweep(folder, wanted, retry=retry, tell=[].append, follow=[].append)


def left(one: LocalSweep) -> list[PlannedRun]:
    return [run for run in one.runs if not find_skip(run, SweepPlan(one.runs), one.snapshot())]


def test_a_pruned_point_is_told_apart_from_one_that_had_its_answer(tmp_path: Path) -> None:
    small, large = spec(batch__micro=2), spec(batch__micro=4)
    for _ in range(2):
        attempt(tmp_path, small, "oom")
    found = here(tmp_path, 2, 4)
    ended = found.run()
    assert not ended.good, "not everything is ok"
    assert (ended.outcomes, ended.skipped) == ({"oom": 1, "pruned": 1}, 1)
    assert [a.outcome for a in store.list_attempts(tmp_path / point(large).config_id)] == ["pruned"]


CLAIM = "import sys; from bench.runtime.outcome import build_heartbeat; print(build_heartbeat('claimed').decode())"


def test_a_point_that_another_process_has_is_unanswered_and_one_of_a_dead_process_is_free(tmp_path: Path) -> None:
    four = spec(batch__micro=4)
    dead = subprocess.run([sys.executable, "-c", CLAIM], capture_output=True, check=True).stdout
    place = Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="cpu"), launcher={})
    store.open_attempt(tmp_path / point(four).config_id, four, place, claim=dead)
    assert left(here(tmp_path, 4)), "at once, not when its heartbeat is stale"
    store.open_attempt(tmp_path / point(four).config_id, four, place, claim=build_heartbeat("claimed"))
    ended = here(tmp_path, 4).run()
    assert (ended.good, ended.unanswered, dict(ended.outcomes)) == (False, 1, {})
    said = f"0 already had an answer; 1 without an answer: go on with zeroscale resume; {tmp_path}"
    assert format_ended(ended, as_json=False) == said


def test_attempts_on_another_machine_do_not_use_up_those_on_this_one(tmp_path: Path) -> None:
    four = spec(batch__micro=4)
    for machine in ("cpu", "other"):
        attempt(tmp_path, four, "error", machine=machine)
    one = here(tmp_path, 4, retry=False)
    assert left(one) == one.runs
    attempt(tmp_path, four, "error")
    one = here(tmp_path, 4, retry=False)
    ended = one.run()
    assert not ended.good and ended.skipped == 1
