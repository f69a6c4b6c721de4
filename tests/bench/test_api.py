"""Tests of the Python interface, as a notebook uses it. The functions of the interface have plain arguments, return
values and print nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from started_runs import QUICK

import analysis
from bench import api
from bench.config import compose
from bench.core import store
from bench.sweep.inputs import format_overrides

GPUS: dict[str, Any] = {"machine": "h100", "devices_per_node": 8}
QUEUED = GPUS | {"launcher": "slurm", "launcher.gpus": "--gres=gpu:{devices}"}


@pytest.fixture(autouse=True)
def _silent(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check after every test that neither this process nor a child process has printed anything."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # with several OpenMP threads, ranks would compete for cores
    yield
    assert capfd.readouterr() == ("", "")


def test_import_package_exports_both_interfaces_without_heavy_imports() -> None:
    import zeroscale

    assert set(zeroscale.__all__) == {*api.__all__, *analysis.__all__}
    assert zeroscale.plan is api.plan
    assert zeroscale.open_study is analysis.open_study
    code = "import sys, zeroscale; print(sorted({'torch', 'pandas', 'hydra', 'matplotlib'} & sys.modules.keys()))"
    path = Path(str(zeroscale.__file__)).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(path)}, capture_output=True)
    assert (done.stdout, done.stderr) == (b"[]\n", b"")


@pytest.mark.processes
def test_notebook_plans_runs_reads_and_predicts_a_study(tmp_path: Path) -> None:
    from analysis import results

    shared = dict(text.split("=") for text in QUICK) | {"machine": "cpu", "devices_per_node": "1"}
    study = api.Study(name="notebook", question="Does it work?", axes={"engine": ["ddp", "zero1"]})
    progress: list[str] = []
    plan = api.plan(study, shared)
    ended = api.run(plan, results=tmp_path, tell=progress.append)
    assert (ended.good, ended.outcomes, ended.skipped) == (True, {"ok": 2}, 0)
    assert len(progress) == 2

    found = results.read([ended.folder])
    assert sorted(found.table["engine"]) == ["ddp", "zero1"]
    assert set(found.table["parameters"]) == {973_568}

    predicted = {one.point.config_id: one.memory for one in api.predict(study, shared)}
    for row, config_id in enumerate(found.table["config_id"]):
        seen, memory = found.record(row).observations, predicted[config_id]
        assert seen and memory
        assert memory.resident == pytest.approx(seen.memory[0].resident_bytes, rel=0.05)

    assert api.status(ended.folder).answered
    answered = next(ended.folder.glob("*/0.0"))
    lost = Path(shutil.copytree(answered, answered.with_name("0.1"), ignore=shutil.ignore_patterns(store.RECORD)))
    assert api.run(plan, results=tmp_path).skipped == 2, "what has its answer is not measured again"
    assert store.read_record(lost / store.RECORD).outcome.kind == "error", (
        "a machine that went down left no record, this call does"
    )


@pytest.mark.processes
def test_every_call_measures_or_rehearses_one_point(tmp_path: Path) -> None:
    small = [*QUICK[:-1], "machine=cpu", "engine=ddp", "devices_per_node=1"]
    for repeat in range(2):
        folder, record = api.measure(api.point(small, study="mine"), results=tmp_path)
        assert (record.outcome.kind, record.circumstance.repeat) == ("ok", repeat)
        assert folder.parent.parent == tmp_path / "mine"
    rehearsed = api.rehearse([*small, "nodes=8"], rank=7, results=tmp_path).record
    assert (rehearsed.outcome.kind, rehearsed.evidence, rehearsed.spec.world_size) == ("ok", "rehearsed", 8)


def test_plan_writes_nothing_and_equals_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = api.plan("smoke", {"engine": ["ddp", "zero2"]}, prune=False)
    assert {point.spec["engine"]["name"] for point in plan.sweep.points} == {"ddp", "zero2"}
    assert not plan.queues and not plan.sweep.rules.prune
    assert plan.sweep.points == api.plan(overrides="study=smoke engine=ddp,zero2").sweep.points
    assert not list(tmp_path.iterdir())


def test_queue_options_are_stored_in_launcher_and_rules() -> None:
    plan = api.plan(overrides=QUEUED, nice=5, max_queued=3, autopilot=True)
    assert (plan.queues, plan.autopilot) == (True, True)
    assert (plan.sweep.launcher["nice"], plan.sweep.rules.max_queued) == (5, 3)


def test_plan_for_another_launcher_is_refused(tmp_path: Path) -> None:
    queued, here = (api.plan(overrides=QUEUED), api.plan("smoke", {"engine": "ddp"}))
    with pytest.raises(api.UserError, match="launcher=slurm: submits to a queue; use `submit`"):
        api.run(queued, results=tmp_path)
    with pytest.raises(api.UserError, match="launcher=local: has no queue; use `run`, or choose launcher="):
        api.submit(here, results=tmp_path)
    assert not list(tmp_path.iterdir())


def test_prediction_has_known_values_and_reasons_for_unknown_ones() -> None:
    large, small = api.predict(overrides=GPUS | {"model": "mt5_xxl", "engine": ["ddp", "zero3"], "batch.micro": 1})
    assert small.memory
    low, high = (f"{size / 1e9:.3g}" for size in small.memory.device)
    assert repr(small.memory).startswith(f"<MemoryPrediction: a device needs {low}–{high} GB; tensors by phase: ")
    assert large.fits is False and small.fits is not False
    assert small.memory and small.time and not small.time_unknown
    assert large.memory and large.memory.resident > 12 * 12e9, "ddp: Adam's 12 bytes for each of 13 billion parameters"
    most = small.largest_micro_batch()
    assert most and most.surely <= most.perhaps
    (slower,) = api.predict(overrides={**GPUS, "model": "mt5_xxl", "engine": "zero3", "batch.micro": 1}, straggler=2.0)
    assert slower.time and slower.time.step_s > small.time.step_s


@pytest.mark.parametrize("machine", ["cpu", "h100"])
def test_study_is_predicted_with_the_defaults_of_its_measurement(machine: str) -> None:
    """On a CPU, a study without a `base` (a section with common settings) gets the small sizes of the smoke study. On
    another device it does not. Both functions of the interface, `predict` and `plan`, must use the same sizes for the
    points of the study."""
    study = api.Study(name="mine", axes={"engine": ["ddp", "zero2"]})
    shared = {"machine": machine, "devices_per_node": 2}
    launcher = {} if machine == "cpu" else {"launcher": "slurm", "launcher.gpus": "--gres=gpu:{devices}"}
    predicted = [one.point.config_id for one in api.predict(study, shared)]
    assert predicted == [one.config_id for one in api.plan(study, shared | launcher).sweep.points]


def test_advice_accepts_plain_words_and_overrides() -> None:
    question = GPUS | {"model": "mt5_xl", "nodes": [1, 2], "engine": ["zero2", "zero3"], "tokens": 1e10}
    answer = api.advise(question | {"deadline": "30d"})
    assert answer.advice.winner.spec.engine.name in ("zero2", "zero3")
    assert (answer.query.question.tokens, answer.query.question.deadline_h) == (1e10, 720)


@pytest.mark.parametrize(("call", "expected"), [
    (lambda: api.plan("smok"), "study=smok: no such file in conf/study; did you mean smoke"),
    (lambda: api.plan("smoke", "study=paper"), "study=paper,smoke: only one study is supported; run `zeroscale"),
    (lambda: api.predict("model=tiny"), "'model=tiny': is no study, but an override of model; pass it as overrides=["),
    (lambda: api.plan("engine=ddp batch.micro=2"), "'engine=ddp batch.micro=2': is no study, but an override of "),
    (lambda: api.predict(overrides="tokens=1e9"), "tokens: is an argument of `zeroscale advise` only"),
    (lambda: api.predict(overrides="batch.mico=3"), "batch.mico: no such key; did you mean batch.micro"),
    (lambda: api.point({"engine": ["ddp", "zero1"]}), "engine=ddp,zero1: is a list of values, which only "),
    (lambda: api.status("nowhere"), "nowhere: no such folder"),
    (lambda: api.advise("model=tiny"), "machine: not given, so it is unknown what fits; add machine=h100 devices_per"),
    (lambda: api.advise("study=smoke"), "study: advice searches its own points"),
])  # fmt: skip
def test_impossible_requests_of_the_api_are_refused_in_one_line(call: Any, expected: str) -> None:
    with pytest.raises(api.UserError) as raised:
        call()
    assert str(raised.value).startswith(expected)


@pytest.mark.parametrize("value", [
    True, None, 3, 1e-5, "zero2", "a b", "it's", "back\\", "back\\'s", {"device": "cpu", "ratio": 0.5}, "5,6", "a=b",
])  # fmt: skip
def test_values_of_a_mapping_are_passed_unchanged(value: Any) -> None:
    assert compose.parse_overrides(format_overrides({"engine.some_key": value})) == [("engine.some_key", [value])]
    assert compose.parse_overrides(format_overrides({"engine.some_key": [value, 1]})) == [
        ("engine.some_key", [value, 1])
    ]
    assert compose.parse_overrides(format_overrides({"engine.some_key": [[value, 1]]})) == [
        ("engine.some_key", [[value, 1]])
    ]


@pytest.mark.processes
def test_python_interface_loads_no_training_library() -> None:
    heavy = "{'torch', 'deepspeed', 'transformers', 'datasets', 'pandas'}"
    script = (
        "import sys; from bench import api; api.plan('smoke'); api.predict(overrides='model=tiny machine=h100 "
        f"devices_per_node=8'); assert not {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("wrong", [-1, 0, "x", float("nan"), True, 2.0])
def test_plan_refuses_repeats_that_are_no_positive_integer(wrong: Any) -> None:
    with pytest.raises(api.UserError, match=f"^repeats={wrong!r}: is not a positive integer; set 1 or more$"):
        api.plan("smoke", repeats=wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("straggler", -1), ("straggler", float("nan")), ("straggler", float("inf")), ("straggler", "2"),
        ("data_wait_s", -2), ("data_wait_s", None), ("rehearsed_s", "a"), ("rehearsed_s", 0),
    ],
)  # fmt: skip
def test_predict_refuses_impossible_factors_and_seconds(name: str, wrong: Any) -> None:
    rule = "factor of at least 1; set for example 1.1" if name == "straggler" else "number of seconds above 0"
    with pytest.raises(api.UserError, match=f"^{name}={wrong!r}: must be a {rule}"):
        api.predict(overrides=GPUS, **{name: wrong})
