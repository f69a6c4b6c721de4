"""Tests of searches in results folders. The printed output and the report's page show how important each searched field
is for the search's objective."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import draw, joins, places, points
from records import failed, run, save, scattered, spec, steps

from analysis.answer import describe_answer
from analysis.figures import build_pictures, search
from analysis.figures.search import find_front, list_levels, trace_best
from analysis.importance import estimate_importances, explain_variance, number_levels
from analysis.results import Results, read
from bench import api
from bench.cli import main
from bench.core.errors import UserError
from bench.core.files import pack, read_whole
from bench.core.machine import Machine
from bench.core.study import SearchSection, Study
from bench.sweep import definition, local_attempt
from bench.sweep.definition import RequestedRun, SearchRequest, SweepDefinition, SweepPoint, Trial
from bench.sweep.snapshot import read_trial_results
from bench.sweep.submitting import SubmitResult

SPACE = {"engine": ["ddp", "zero1"], "batch.micro": [1, 2, 4, 8]}
STEP_S = {"ddp": 0.1, "zero1": 0.11}
FAILS = ("ddp", 8)


def write_search(folder: Path, **more: Any) -> Path:
    """Write a finished grid search of all eight points, in the order of its search space, and return the results
    folder. The choice of engine has little effect on throughput. `more` sets further keys of the search."""
    section = SearchSection.model_validate({"objective": "samples_per_s", "space": SPACE, "sampler": "grid"} | more)
    sweep = SweepDefinition(
        study="smoke",
        asked_at="2026-11-23T12:00:00+00:00",
        machines={"cpu": Machine(name="cpu", device="cpu")},
        launcher={"name": "local"},
        points=(),
        order=(),
        search=SearchRequest(study=Study(name="smoke", search=section)),
    )
    definition.write(folder / "smoke", sweep)
    for number, (engine, micro) in enumerate((one, two) for one in SPACE["engine"] for two in SPACE["batch.micro"]):
        assert isinstance(engine, str) and isinstance(micro, int)
        made, middle = spec(engine, micro), STEP_S[engine]
        timed = steps(scattered(0.99 * middle, middle, 1.01 * middle))
        record = failed("oom", made) if (engine, micro) == FAILS else run(made, steps=timed)
        save(folder, record)
        point = SweepPoint(
            config_id=record.config_id,
            line=f"{engine}, micro {micro}",
            machine="cpu",
            nodes=1,
            devices_per_node=2,
            time_limit_min=1,
            overrides=(),
            spec=made.model_dump(mode="json", by_alias=True),
        )
        values = {"engine": engine, "batch.micro": micro}
        assert definition.write_trial(folder / "smoke", Trial(number=number, point=point, values=values))
    return folder


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    yield read([write_search(tmp_path_factory.mktemp("results"))])


def test_failed_trial_has_no_value_and_other_trials_have_theirs(searched: Results) -> None:
    (search,) = searched.searches
    values = [trial.value for trial in search.trials]
    assert values[:4] == [pytest.approx(2 * micro / 0.1) for micro in (1, 2, 4)] + [None]
    assert [trial.outcome for trial in search.trials].count("oom") == 1


def test_best_value_so_far_never_decreases_and_ends_at_the_best(searched: Results) -> None:
    (found,) = searched.searches
    line = trace_best(found, lambda trial: trial.number)
    values = [value for _, value in line]
    assert values == sorted(values) and line[-1] == (8, pytest.approx(2 * 8 / 0.11))


def test_decisive_field_has_the_largest_importance(searched: Results) -> None:
    first, second = searched.searches[0].importances
    assert (first.field, second.field) == ("batch.micro", "engine")
    assert first.share > 3 * second.share and first.high > 0.95, "the values of the failed point are arbitrary"
    assert all(0 <= one.low <= one.share <= one.high <= 1 for one in (first, second))


def test_noisy_trials_widen_the_intervals_of_importances(searched: Results, tmp_path: Path) -> None:
    folder = write_search(tmp_path) / "smoke"
    sweep = definition.find_search(definition.read(folder))
    assert sweep and sweep.search and sweep.search.study.search
    results = read_trial_results(folder, sweep)
    disturbed = [one._replace(quantities=one.quantities and one.quantities._replace(step_noise=0.3)) for one in results]
    sound, busy = (
        {one.field: one.high - one.low for one in estimate_importances(sweep.search.study.search, trials)}
        for trials in (results, disturbed)
    )
    assert sound.keys() == busy.keys() == {"batch.micro", "engine"}
    assert busy["engine"] > 1.2 * sound["engine"]


def test_answer_begins_with_the_best_trial_by_objective_and_constraints(tmp_path: Path) -> None:
    """Micro-batch 8 of zero1 has the highest throughput. The constraint on the step time leaves only ddp, whose run
    with micro-batch 8 failed."""
    free = describe_answer(read([write_search(tmp_path / "free")]))
    assert free[0].startswith(
        "Search smoke: of 8 trials, trial 8 (engine zero1, batch.micro 8) has the highest samples_per_s: 145"
    )
    assert free[-2].endswith("confirm the best points by a sweep with --repeats 5."), "a search has no --repeats"
    bound = {"constraints": {"step_s": {"at_most": 0.105}}}
    (first, *_) = describe_answer(read([write_search(tmp_path / "bound", **bound)]))
    assert "trial 3 (engine ddp, batch.micro 4) has the highest samples_per_s with step_s at most 0.105: 80" in first
    never = {"constraints": {"step_s": {"at_most": 0.05}}}
    (first, *_) = describe_answer(read([write_search(tmp_path / "never", **never)]))
    assert first == "Search smoke: none of 8 trials has a value of samples_per_s with step_s at most 0.05."


def test_explained_variance_of_a_field_computed_by_hand() -> None:
    """The objective is 3 a + 4 b for a and b of 0 or 1, without an interaction. The total variance of the objective is
    25/4. The field a explains 9/4 of it, and the field b explains 16/4."""
    a, b = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    both = np.stack([3 * a + 4 * b, (2 * a - 1) * (2 * b - 1)]).astype(float)
    assert explain_variance(both, a) == pytest.approx([9 / 25, 0])
    assert explain_variance(both, b) == pytest.approx([16 / 25, 0])
    assert explain_variance(np.ones((1, 4)), a) == pytest.approx([0]), "a constant function depends on no field"


def test_many_numbers_are_grouped_into_levels_of_equal_size() -> None:
    assert np.bincount(number_levels([one / 7 for one in range(80)])).tolist() == [10] * 8
    assert number_levels(["a", None, "a"]).tolist() == [0, 1, 0]


def test_front_contains_the_points_not_dominated_by_another() -> None:
    assert find_front([(1, 5), (2, 5), (2, 3), (3, 4), (4, 1)]) == [(1, 5), (2, 3), (4, 1)]


def test_levels_order_numbers_by_size_and_other_values_by_appearance() -> None:
    assert list_levels([8, 1, 2, 8]) == {"1": 0, "2": 1, "8": 2}
    assert list_levels(["ddp", "zero1", "ddp"]) == {"ddp": 0, "zero1": 1}
    assert list_levels([False, True]) == {"false": 0, "true": 1}


def test_figure_of_a_search_has_panels_of_progress_importance_fields_and_fronts(searched: Results) -> None:
    (found,) = searched.searches
    panels = {(axes.get_xlabel(), axes.get_ylabel()): axes for axes in draw(search, searched).axes}
    objective = found.objective
    assert list(panels) == [
        ("trials", objective), ("node-hours", objective), ("importance", "fraction of the variance"),
        ("engine", objective), ("batch.micro", objective), ("seconds per sample", "peak memory per rank, GiB"),
        ("seconds per sample", "node-seconds per sample"),
    ]  # fmt: skip
    answered = [(trial.number, trial.value) for trial in found.answered]
    assert points(panels["trials", objective]) == answered
    assert places(panels["batch.micro", objective]) == ["1", "2", "4", "8"]
    assert len(points(panels["batch.micro", objective])) == 7, "every trial with a value"
    front = panels["seconds per sample", "peak memory per rank, GiB"]
    (line,) = joins(front)
    pairs = [(one.sample_s, one.peak_bytes / 2**30) for one in found.trials if one.sample_s and one.peak_bytes]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == find_front(pairs)


def test_archive_of_a_search_gives_equal_searches(searched: Results, tmp_path: Path) -> None:
    folder = searched.get_file(0).parents[3]
    (tmp_path / "searched.zip").write_bytes(pack(read_whole(folder)))
    assert read([tmp_path / "searched.zip"]).searches == searched.searches


def test_unreadable_search_is_reported_and_excluded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_search(tmp_path)
    (folder / "smoke" / "trials" / "00003.json").write_text("{")
    found = read([folder])
    assert found.searches == () and len(found.table) == 8
    assert "search not shown" in caplog.text and "00003.json" in caplog.text


def test_exported_search_is_readable_by_optuna(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optuna = pytest.importorskip("optuna")
    folder, out = write_search(tmp_path) / "smoke", tmp_path / "trials.log"
    archive = tmp_path / "search.zip"
    archive.write_bytes(pack(read_whole(folder)))
    for given in (folder, archive):  # the second export replaces the first
        assert main(["export", str(given), "--to", "optuna", "--out", str(out)]) == 0
    assert f"8 trials written; optuna-dashboard {out}" in capsys.readouterr().out
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(out)))
    study = optuna.load_study(study_name="smoke", storage=storage)
    assert study.direction.name == "MAXIMIZE" and study.best_value == pytest.approx(2 * 8 / 0.11)
    assert study.best_params == {"engine": "zero1", "batch.micro": 8}
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 3 + ["FAIL"] + ["COMPLETE"] * 4
    assert study.trials[3].user_attrs["outcome"] == "oom"


def test_export_without_the_definition_of_a_search_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    folder, records = write_search(tmp_path) / "smoke", tmp_path / "records.zip"
    records.write_bytes(pack({name: text for name, text in read_whole(folder).items() if name.endswith("record.json")}))
    (tmp_path / "empty").mkdir()
    rules = {"missing": "no such folder", "empty": "contains no definition of a search", "records.zip": "contains no"}
    for name, rule in rules.items():
        assert main(["export", str(tmp_path / name), "--to", "optuna", "--out", str(tmp_path / "out")]) != 0
        error = capsys.readouterr().err.strip()
        assert f"{tmp_path / name}: {rule}" in error and "\n" not in error


def test_results_without_a_search_have_no_search_figure(tmp_path: Path) -> None:
    found = read([save(tmp_path, run())])
    assert found.searches == ()
    assert "search" not in [figure.name for figure, _ in build_pictures(found)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RequestedRun]:
    """List of the runs that a command tried to start. The fixture makes each start fail, so that nothing runs."""
    found: list[RequestedRun] = []

    def refuse(requested: RequestedRun, *_: Any) -> None:
        found.append(requested)
        raise UserError(requested.config_id, "is not to run here")

    monkeypatch.setattr(local_attempt, "make_attempt", refuse)
    return found


def test_resume_of_a_completed_search_prints_its_verdict_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[RequestedRun]
) -> None:
    """The environment of the recorded trials differs from that of this machine, because the records are synthetic.
    Nevertheless no trial is repeated."""
    folder = write_search(tmp_path, trials=8) / "smoke"
    files = sorted(folder.rglob("*"))
    assert main(["resume", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["best"]["values"] == {"engine": "zero1", "batch.micro": 8}, "ddp fails with 8"
    assert printed["over"] and printed["outcomes"] == {"ok": 7, "oom": 1}
    assert main(["resume", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("smoke has 8 trials so far") and printed[1].startswith("best samples_per_s: ")
    assert started == [] and sorted(folder.rglob("*")) == files


def test_resumed_search_keeps_its_machine_if_the_default_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[RequestedRun]
) -> None:
    """The search was started with machine `cpu`, and the default in conf/config.yaml is `auto`. The next trial also
    uses `cpu`."""
    folder = write_search(tmp_path, trials=9) / "smoke"
    assert main(["resume", str(folder)]) == 2
    assert capsys.readouterr().err.endswith("is not to run here\n"), "a ninth trial starts"
    [ninth] = started
    assert ninth.circumstance.machine.name == "cpu"


def test_verdict_warns_of_trials_in_several_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, warning = write_search(tmp_path, trials=8) / "smoke", "trials ran in 2 environments"
    assert main(["resume", str(folder)]) == 0
    assert warning not in capsys.readouterr().out
    path = next(iter(sorted(folder.rglob("record.json"))))
    path.write_text(path.read_text().replace('"environment_id": "', '"environment_id": "1'))
    assert main(["resume", str(folder)]) == 0
    assert warning in capsys.readouterr().out


def test_resume_with_a_queue_prints_the_verdict_after_the_last_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_search(tmp_path, trials=8) / "smoke"
    nothing = SubmitResult([], 0, {}, [], "", None, answered=True)
    monkeypatch.setattr(api, "resume", lambda *_, **options: nothing._replace(queued=1))
    assert main(["resume", str(folder)]) == 0
    assert "best" not in capsys.readouterr().out
    monkeypatch.setattr(api, "resume", lambda *_, **options: nothing)
    assert main(["resume", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("best samples_per_s: ")
