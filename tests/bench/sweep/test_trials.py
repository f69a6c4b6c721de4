"""Tests of the trials of a search, which are files in the study's folder. Each trial number is written once, and a
resumed search reads all trials."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from sweeps import point, spec, sweep

from bench.core import store
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.study import SearchSection, Study
from bench.sweep import definition
from bench.sweep.definition import SearchRequest, SweepDefinition, SweepPoint, Trial
from bench.sweep.forecast import Forecast, MemoryForecast
from bench.sweep.local_sweep import LocalSearch, LocalSweep
from bench.sweep.policy import Proposal, TrialResult
from bench.sweep.search.planning import write_search
from bench.sweep.search.verdict import SearchOutlook

ROOM = Forecast(room=MemoryForecast(low_bytes=2**40, high_bytes=2**41, tensor_bytes=2**40))


class _InOrder:
    """Search algorithm (proposer) that proposes every point once. All points far exceed the device's memory. Therefore
    no point is run, and each gets the outcome `infeasible`."""

    def __init__(self, points: Sequence[SweepPoint]) -> None:
        self._points = points

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        tried = {result.trial.point.config_id for result in results}
        left = (one for one in self._points if one.config_id not in tried)
        found = next(left, None)
        return Proposal(found, {"batch.micro": found.spec["batch"]["micro"]}) if found else None


def points(count: int) -> list[SweepPoint]:
    return [point(spec(batch__micro=micro)).model_copy(update={"forecast": ROOM}) for micro in range(1, count + 1)]


def search_sweep(trials: int = 50) -> SweepDefinition:
    section = SearchSection.model_validate(
        {"objective": "step_s", "space": {"batch.micro": {"from": 1, "to": 20}}, "trials": trials}
    )
    study = Study(name="s", search=section)
    machines = {"cpu": Machine(name="cpu", device="cpu", memory_bytes=2**30)}
    made = sweep(points(1))
    return made.model_copy(
        update={"points": (), "order": (), "machines": machines, "search": SearchRequest(study=study)}
    )


def refuse_to_foresee(results: Sequence[TrialResult], current: TrialResult) -> SearchOutlook:
    raise AssertionError("no trial of these tests runs")


def worker(folder: Path, made: SweepDefinition, listed: list[SweepPoint]) -> LocalSweep:
    requested = definition.find_search(definition.read(folder))
    assert requested
    wanted = list(requested.wanted())
    search = LocalSearch(made, _InOrder(listed), refuse_to_foresee)
    return LocalSweep(folder, wanted, retry=False, tell=[].append, follow=[].append, search=search)


def test_concurrent_workers_never_run_a_point_twice(tmp_path: Path) -> None:
    made, listed = search_sweep(), points(12)
    write_search(tmp_path, made)
    workers = [threading.Thread(target=worker(tmp_path, made, listed).run) for _ in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    trials = definition.read_trials(tmp_path)
    assert [trial.number for trial in trials] == list(range(12))
    assert sorted(trial.point.config_id for trial in trials) == sorted(one.config_id for one in listed)
    attempts = [store.list_attempts(tmp_path / one.config_id) for one in listed]
    assert [[attempt.outcome for attempt in tried] for tried in attempts] == [["infeasible"]] * 12


def test_trial_without_an_attempt_is_run_by_a_resumed_search(tmp_path: Path) -> None:
    made, listed = search_sweep(), points(3)
    write_search(tmp_path, made)
    assert definition.write_trial(tmp_path, Trial(number=0, point=listed[2], values={}))
    assert not definition.write_trial(tmp_path, Trial(number=0, point=listed[1], values={})), (
        "trial 0 is already written"
    )
    assert worker(tmp_path, made, listed).run().outcomes == {"infeasible": 3}
    assert [one.point.config_id for one in definition.read_trials(tmp_path)] == [
        listed[index].config_id for index in (2, 0, 1)
    ]


def test_search_with_overrides_of_its_budget_and_launcher_can_be_continued_with_others(tmp_path: Path) -> None:
    def asked(*overrides: str, **changed: object) -> SweepDefinition:
        made = search_sweep(**changed)
        assert made.search
        return made.model_copy(update={"search": made.search.model_copy(update={"overrides": overrides})})

    write_search(tmp_path, asked("search.trials=2", "launcher.hang_s=60", "batch.micro=2", trials=2))
    definition.write_trial(tmp_path, Trial(number=0, point=points(1)[0], values={}))
    write_search(tmp_path, asked("batch.micro=2", "search.trials=4", trials=4))
    with pytest.raises(UserError, match=r"another search, which differs in batch\.micro; rename"):
        write_search(tmp_path, asked("batch.micro=4", "search.trials=4", trials=4))


def test_folder_holds_one_search_whose_number_of_trials_can_be_raised(tmp_path: Path) -> None:
    write_search(tmp_path, search_sweep())
    definition.write_trial(tmp_path, Trial(number=0, point=points(1)[0], values={}))
    write_search(tmp_path, search_sweep())
    write_search(tmp_path, search_sweep(trials=60))
    assert len(definition.read(tmp_path)) == 2, "an identical request is written once"
    other = search_sweep()
    assert other.search and other.search.study.search
    section = other.search.study.search.model_copy(update={"objective": "peak_bytes"})
    study = other.search.study.model_copy(update={"search": section})
    changed = other.model_copy(update={"search": SearchRequest(study=study)})
    with pytest.raises(UserError, match=r"another search, which differs in search\.objective; rename this search"):
        write_search(tmp_path, changed)
