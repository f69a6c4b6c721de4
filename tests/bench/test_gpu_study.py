"""Tests of slurm/gpu_study.py, a script that runs all studies for one GPU. They need no GPU: they check the commands
that it runs, those that it skips, and the archive of results that it writes."""

import importlib.util
import sys
import tarfile
import threading
from pathlib import Path
from types import ModuleType

import pytest

from bench.config import compose
from bench.core import store
from bench.core.files import unpack
from bench.core.study import order_runs
from tests.benchmarks.plain import list_fast_options

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/data/runs.zip/smoke"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    found = importlib.util.spec_from_file_location("gpu_study", ROOT / "slurm/gpu_study.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["gpu_study"] = module
    found.loader.exec_module(module)
    return module


def test_every_swept_study_is_a_file_of_conf(study: ModuleType, tmp_path: Path) -> None:
    steps = list(study.list_steps("h200", tmp_path / "runs", tmp_path))
    swept = [word.partition("=")[2] for step in steps for word in step.words if word.startswith("study=")]
    assert len(swept) == 3 and "single_gpu" in swept
    for name in swept:
        compose.read_study(name)
    modules = {step.module for step in steps} - {"pytest"}
    assert all(importlib.util.find_spec(module) for module in modules)


def test_answered_points_are_not_run_again(study: ModuleType, tmp_path: Path) -> None:
    answered = tmp_path / "told.txt"
    assert study.call(study.Step("json", "json.tool", ("--help",), answered)) and "usage" in answered.read_text()
    answered.write_text("answered")
    assert study.call(study.Step("missing", "no_such_module", (), answered))
    assert not study.call(study.Step("missing", "no_such_module", (), tmp_path / "other.txt"))
    assert not (tmp_path / "other.txt").exists()


def test_trial_plans_all_studies_and_makes_an_archive_of_one_point(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def call(step: object) -> bool:
        seen.append(" ".join(step.words))  # type: ignore[attr-defined]
        if "model=tiny" in seen[-1]:  # pretend that this point has run
            unpack(RECORDED, tmp_path / "runs/gpu/adhoc")
        return True

    monkeypatch.setattr(study, "call", call)
    monkeypatch.setattr(sys, "argv", ["gpu_study.py", "--trial", "--results", str(tmp_path)])
    assert study.main() == 0
    *planned, measured = seen
    assert len(planned) == 3 and all(
        words.endswith("launcher=slurm launcher.gpus=--gres=gpu:{devices} --dry-run") for words in planned
    )
    assert "machine=cpu" in measured
    with tarfile.open(tmp_path / "gpu_study.tar.gz") as archive:
        records = [name for name in archive.getnames() if name.endswith("record.json")]
    assert len(records) == len(list(store.find_records([RECORDED])))


def test_only_the_named_steps_run_in_the_given_order(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(study, "call", lambda step: not seen.append(step.name))
    monkeypatch.setattr(sys, "argv", ["gpu_study.py", "--results", str(tmp_path), "--only", "trainer", "tests"])
    assert study.main() == 0 and seen == ["trainer", "tests", "tests"]
    for words, said in (
        (["--only", "tiny"], "no step without --trial"),
        (["--trial", "--only", "trainer"], "with --trial"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_study.py", "--results", str(tmp_path), *words])
        with pytest.raises(SystemExit):
            study.main()
        assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu_study.py", "--only", "trainers"])
    with pytest.raises(SystemExit):
        study.main()
    assert "'trainers' (choose from" in capsys.readouterr().err


def test_every_engine_runs_a_model_before_the_ladder_of_micro_batches_starts() -> None:
    composed = compose.read_study("single_gpu")
    points = compose.compose_points(composed, []).points
    begun = [points[index].composed.spec for _, index in order_runs([point.turn for point in points], composed)[:6]]
    assert {(spec.model.name, spec.batch.micro) for spec in begun} == {("mt5_large", 16)}
    assert {spec.engine.name for spec in begun} == {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp"}


def test_trainer_is_compared_with_the_options_of_the_fast_study() -> None:
    assert set(list_fast_options()) == {
        "engine=ddp", "optimizer.implementation=fused", "model.loss_chunk_tokens=1024", "model.compile=blocks",
    }  # fmt: skip


def test_steps_whose_times_do_not_matter_run_at_the_same_time(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two steps waits until the other has started. The steps that measure times run alone."""
    both = threading.Barrier(2, timeout=30)
    steps = [study.Step("one", "a", ("sweep",)), *(study.Step("both", "b", (name,), alone=False) for name in "xy")]
    monkeypatch.setattr(study, "list_steps", lambda *_: steps)
    monkeypatch.setattr(study, "call", lambda step: step.alone or both.wait() >= 0)
    monkeypatch.setattr(sys, "argv", ["gpu_study.py", "--results", str(tmp_path)])
    assert study.main() == 0
    assert all(step.alone for step in study.list_steps("h200", tmp_path, tmp_path) if step.words[0] == "sweep")
