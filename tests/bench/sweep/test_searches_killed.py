"""Tests of searches that are killed at random times and resumed, and of searches by several workers at a time. The
tests check the files that a search leaves."""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sweeps
from ended_well import observed

from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Outcome, RunRecord
from bench.core.spec import Batch, RunSpec
from bench.core.study import SearchSection, Study
from bench.sweep import definition, local_sweep
from bench.sweep.definition import RequestedRun, SearchRequest, SweepDefinition, SweepPoint, Trial
from bench.sweep.local_sweep import LocalSearch, LocalSweep
from bench.sweep.search.planning import build_proposer, write_search
from bench.sweep.search.space import CandidatePool, SearchSpace
from bench.sweep.search.verdict import foresee

SPACE = {"batch.micro": [1, 2, 4, 8], "batch.accumulation": [1, 2, 4]}
TRIALS = 6


class _Killed(BaseException):
    """Exception that ends a worker at once, as if it were killed. No `except Exception` catches it."""


@pytest.fixture(scope="module")
def base() -> RunSpec:
    return sweeps.spec(devices_per_node=1)


def request(base: RunSpec, sampler: str) -> SweepDefinition:
    section = SearchSection.model_validate(
        {"objective": "samples_per_s", "space": SPACE, "sampler": sampler, "trials": TRIALS, "gain": 0, "seed": 3}
    )
    made = sweeps.sweep([sweeps.point(base)])
    return made.model_copy(
        update={"points": (), "order": (), "search": SearchRequest(study=Study(name="s", search=section))}
    )


def begin_worker(folder: Path, base: RunSpec, sampler: str, tell: Callable[[str], None] = [].append) -> LocalSweep:
    """Return a new worker: an object that runs the trials of a search, as a new process would. It reads its whole state
    from the folder."""
    asked = definition.find_search(definition.read(folder))
    assert asked and asked.search and asked.search.study.search

    def build(values: Mapping[str, Any]) -> SweepPoint:
        batch = Batch(micro=values["batch.micro"], accumulation=values["batch.accumulation"])
        return sweeps.point(base.model_copy(update={"batch": batch}))

    section = asked.search.study.search
    pool = CandidatePool(section, SearchSpace(section), build, Machine(name="cpu", device="cpu"))
    wanted = list(asked.wanted())
    search = LocalSearch(asked, build_proposer(pool), functools.partial(foresee, pool))
    return LocalSweep(folder, wanted, retry=False, tell=tell, follow=[].append, search=search)


def make_attempt(requested: RequestedRun, folder: Path, follow: Any, supervisor: Any = None) -> tuple[Path, RunRecord]:
    """Write the files of a run without running it, and return its folder and record. With a micro-batch of 8, the run
    is out of memory. This function replaces the one that starts a run."""
    batch = requested.spec.batch
    ended = Outcome(kind="oom", reason="") if batch.micro == 8 else Outcome(kind="ok", reason="")
    opened = store.open_attempt(folder / requested.config_id, requested.spec, requested.circumstance).folder
    seconds = (0.1 + 0.02 * batch.micro) * batch.accumulation
    record = RunRecord(
        config_id=requested.config_id,
        spec=requested.spec,
        circumstance=requested.circumstance,
        outcome=ended,
        observations=observed((seconds,) * 5) if ended.kind == "ok" else None,
    )
    store.write_reserved(opened / store.RECORD, store.to_json(record))
    store.release_reserved(opened)
    return opened, record


def list_tried(folder: Path) -> list[tuple[int, str, dict[str, Any], str, dict[str, Any]]]:
    trials = definition.read_trials(folder)
    return [(one.number, one.point.config_id, one.values, one.why, one.sampler_state) for one in trials]


def count_attempts(folder: Path) -> list[int]:
    return [len(store.list_attempts(folder / one.point.config_id)) for one in definition.read_trials(folder)]


def kill_at_random(generator: random.Random, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `step`. It kills the worker before the call with a probability of 15 %, and after
    the call with the same probability."""

    def maybe(*args: Any) -> Any:
        if generator.random() < 0.15:
            raise _Killed
        done = step(*args)
        if generator.random() < 0.15:
            raise _Killed
        return done

    return maybe


@pytest.mark.parametrize("sampler", ("random", "tpe"))
def test_search_killed_at_random_moments_ends_with_the_same_trials(
    sampler: str, base: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampler == "tpe":
        pytest.importorskip("optuna")
    monkeypatch.setattr(local_sweep.local_attempt, "make_attempt", make_attempt)
    whole = tmp_path / "whole"
    write_search(whole, request(base, sampler))
    begin_worker(whole, base, sampler).run()
    assert len(list_tried(whole)) == TRIALS
    write_trial, kills = definition.write_trial, 0
    for seed in range(6):
        folder, generator = tmp_path / str(seed), random.Random(seed)
        write_search(folder, request(base, sampler))
        monkeypatch.setattr(local_sweep.local_attempt, "make_attempt", kill_at_random(generator, make_attempt))
        monkeypatch.setattr(definition, "write_trial", kill_at_random(generator, write_trial))
        while True:
            try:
                begin_worker(folder, base, sampler).run()
                break
            except _Killed:
                kills += 1
        monkeypatch.setattr(definition, "write_trial", write_trial)
        assert list_tried(folder) == list_tried(whole), f"seed {seed}"
        assert count_attempts(folder) == [1] * TRIALS, f"seed {seed}"
    assert kills > 10


def test_resumed_search_numbers_its_trials_as_the_whole_search_does(
    base: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is killed before its third trial runs, and resumed."""
    told: list[str] = []

    def kill_third(*args: Any) -> tuple[Path, RunRecord]:
        if len(told) == 2:
            raise _Killed
        return make_attempt(*args)

    write_search(tmp_path, request(base, "random"))
    for step, expected in ((kill_third, [1, 2]), (make_attempt, [3, 4, 5, 6])):
        monkeypatch.setattr(local_sweep.local_attempt, "make_attempt", step)
        told.clear()
        worker = begin_worker(tmp_path, base, "random", told.append)
        with contextlib.suppress(_Killed):
            worker.run()
        labels = [text.partition("]")[0] for text in told if text.startswith("[")]
        assert labels == [f"[trial {number} of {TRIALS}" for number in expected]


@pytest.mark.parametrize("sampler", ("tpe", "random"))
def test_workers_on_one_folder_never_run_a_trial_twice(
    sampler: str, base: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sweep.local_attempt, "make_attempt", make_attempt)
    for seed in range(4):
        folder = tmp_path / str(seed)
        write_search(folder, request(base, sampler))
        workers = [threading.Thread(target=begin_worker(folder, base, sampler).run) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        tried = list_tried(folder)
        assert [number for number, *_ in tried] == list(range(TRIALS))
        assert len({config_id for _, config_id, *_ in tried}) == TRIALS
        assert count_attempts(folder) == [1] * TRIALS


def test_trial_without_a_run_is_run_by_the_next_worker(
    base: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker was killed after it wrote the file of a trial and before it ran the trial. The next worker must first
    run this trial, and count it as one of the search's trials."""
    monkeypatch.setattr(local_sweep.local_attempt, "make_attempt", make_attempt)
    write_search(tmp_path, request(base, "random"))
    left = sweeps.point(base.model_copy(update={"batch": Batch(micro=4, accumulation=4)}))
    values = {"batch.micro": 4, "batch.accumulation": 4}
    assert definition.write_trial(tmp_path, Trial(number=0, point=left, values=values))
    begin_worker(tmp_path, base, "random").run()
    assert list_tried(tmp_path)[0][1] == left.config_id
    assert count_attempts(tmp_path) == [1] * TRIALS
