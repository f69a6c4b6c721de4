"""Tests of slurm/gpu_study.py, a script that runs all studies for one GPU. They need no GPU: they check the commands
that it runs, those that it skips, and the archive of results that it writes."""

import importlib.util
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

import analysis
from bench.config import compose
from bench.core import store
from bench.core.files import unpack
from bench.core.study import order_runs

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
    assert len(swept) == 5 and "single_gpu" in swept
    for name in swept:
        compose.read_study(name)
    modules = {step.module for step in steps} - {"pytest"}
    assert all(importlib.util.find_spec(module) for module in modules)


def test_answered_points_are_not_run_again(study: ModuleType, tmp_path: Path) -> None:
    answered = tmp_path / "told.txt"
    assert study.call(study.Step("json.tool", ("--help",), answered)) and "usage" in answered.read_text()
    answered.write_text("answered")
    assert study.call(study.Step("no_such_module", (), answered))
    assert not study.call(study.Step("no_such_module", (), tmp_path / "other.txt"))
    assert not (tmp_path / "other.txt").exists()


def test_fastest_point_of_every_model_is_repeated_unchanged(study: ModuleType, tmp_path: Path) -> None:
    unpack(RECORDED, tmp_path / "smoke")
    [overrides] = study.list_fastest(tmp_path / "smoke")
    runs = analysis.load(RECORDED)
    fastest = runs.loc[runs["samples_per_s"].idxmax(), "config_id"]
    spec = store.read_record(next(iter(store.find_records([RECORDED / fastest])))).spec
    # The current defaults for the window and for the mean of the loss differ from the values in the record.
    today = compose.compose_request(compose.parse_single(overrides)).spec
    assert today == spec.model_copy(update={"measure": today.measure, "loss_mean": today.loss_mean})


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
    *planned, measured, reported = seen
    assert len(planned) == 5 and all(
        words.endswith("launcher=slurm launcher.gpus=--gres=gpu:{devices} --dry-run") for words in planned
    )
    assert "machine=cpu" in measured and reported.startswith("report")
    with tarfile.open(tmp_path / "gpu_study.tar.gz") as archive:
        records = [name for name in archive.getnames() if name.endswith("record.json")]
    assert len(records) == len(list(store.find_records([RECORDED])))


def test_first_eight_points_cover_every_model_with_ddp_and_zero() -> None:
    composed = compose.read_study("single_gpu")
    points = compose.compose_points(composed, []).points
    begun = [points[index].composed.spec for _, index in order_runs([point.turn for point in points], composed)[:8]]
    assert {(spec.model.name, spec.engine.name) for spec in begun} == {
        (model, engine) for model in composed.axes["model"] for engine in ("ddp", "zero2")
    }
