"""Export of records to TensorBoard and MLflow. The exported files are read back with these programs."""

import sys
from pathlib import Path
from typing import Any

import pytest
from records import LOSSES, failed, results, run, save, spec, steps

from analysis.export import list_exported_runs
from bench.cli import main

TO = ("tensorboard", "mlflow")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder with an ok run and a run that ran out of memory."""
    good = run(spec("zero1", nodes=2), steps=steps((0.1, 0.2, 0.3) * 10), repeat=2)
    return save(tmp_path / "runs", good, failed("oom", spec("zero3"), reason="no <b>room</b>"))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return pytest.importorskip("mlflow")


def export(folder: Path, to: str, out: Path) -> int:
    return main(["export", str(folder), "--to", to, "--out", str(out)])


def of_mlflow(mlflow: Any, out: Path) -> dict[str, Any]:
    client = mlflow.MlflowClient(out.as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    assert experiment.name == "smoke"
    return {found.data.tags["outcome"]: found for found in client.search_runs([experiment.experiment_id])}


def of_tensorboard(out: Path) -> dict[str, Any]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for file in out.rglob("events.out.tfevents.*"):
        found[file.parent.name] = event_accumulator.EventAccumulator(str(file.parent)).Reload()
        assert file.parent.parent == out / "smoke"
    return found


# -- read back


def test_mlflow_has_a_run_per_record(folder: Path, tmp_path: Path, mlflow: Any) -> None:
    assert export(folder, "mlflow", tmp_path / "store") == 0
    found = of_mlflow(mlflow, tmp_path / "store")
    good = found["ok"]
    assert good.info.run_name.startswith("tiny-zero1-2x2-micro2-cpu-")
    assert good.info.run_name.endswith(".2.0")
    assert (good.info.status, found["oom"].info.status) == ("FINISHED", "FAILED")
    assert {name: good.data.params[name] for name in ("engine.name", "batch.micro", "nodes", "precision")} == {
        "engine.name": "zero1", "batch.micro": "2", "nodes": "2", "precision": "fp32",
    }  # fmt: skip
    assert good.data.metrics["run/step_s"] == 0.2
    assert "run/step_s" not in found["oom"].data.metrics, "unknown values are omitted"
    assert found["oom"].data.tags["reason"] == "no <b>room</b>"
    history = mlflow.MlflowClient((tmp_path / "store").as_uri()).get_metric_history(good.info.run_id, "steps/loss")
    losses = {point.step: point.value for point in history}
    assert [losses[step] for step in range(6)] == [*LOSSES, 4.0]


def test_tensorboard_has_a_run_per_record(folder: Path, tmp_path: Path) -> None:
    assert export(folder, "tensorboard", tmp_path / "logs") == 0
    found = of_tensorboard(tmp_path / "logs")
    (good,) = [one for name, one in found.items() if "zero1" in name]
    (bad,) = [one for name, one in found.items() if "zero3" in name]
    series = good.Scalars("steps/step_s")
    assert [event.step for event in series] == list(range(35))
    assert [event.value for event in series[4:8]] == pytest.approx([9.9, 0.1, 0.2, 0.3])
    (median,) = good.Scalars("run/step_s")
    assert median.value == pytest.approx(0.2)
    assert "run/step_s" not in bad.Tags()["scalars"]
    assert b"    no <b>room</b>" in bad.Tensors("reason/text_summary")[0].tensor_proto.string_val[0], "as code"
    plugins = [good.SummaryMetadata(tag).plugin_data.content for tag in ("_hparams_/session_start_info",)]
    assert b"engine.name" in plugins[0] and b"zero1" in plugins[0]


@pytest.mark.parametrize("to", TO)
def test_second_export_updates_runs_without_duplicates(to: str, folder: Path, tmp_path: Path, mlflow: Any) -> None:
    out = tmp_path / "out"
    read = of_tensorboard if to == "tensorboard" else lambda folder: of_mlflow(mlflow, folder)
    for _ in range(2):
        export(folder, to, out)
    save(folder, run(spec("zero1", nodes=2), repeat=3))
    export(folder, to, out)
    if to == "mlflow":
        client = mlflow.MlflowClient(out.as_uri())
        (experiment,) = [one for one in client.search_experiments() if one.name == "smoke"]
        found = client.search_runs([experiment.experiment_id])
        assert len(found) == 3
        lengths = [len(client.get_metric_history(one.info.run_id, "steps/step_s")) for one in found]
    else:
        assert len(list(out.rglob("events*"))) == 3
        lengths = [len(one.Scalars("steps/step_s")) for one in read(out).values() if one.Tags()["scalars"]]
    assert sorted(lengths)[-2:] == [35, 35]


def test_partly_exported_mlflow_run_is_written_again(folder: Path, tmp_path: Path, mlflow: Any) -> None:
    export(folder, "mlflow", tmp_path)
    partial = of_mlflow(mlflow, tmp_path)["ok"]
    client = mlflow.MlflowClient(tmp_path.as_uri())
    client.delete_tag(partial.info.run_id, "zeroscale.digest")  # written last
    export(folder, "mlflow", tmp_path)
    renewed = of_mlflow(mlflow, tmp_path)["ok"]
    assert renewed.info.run_id != partial.info.run_id
    assert renewed.data.metrics == partial.data.metrics


# -- errors


@pytest.mark.parametrize(("to", "module"), [("tensorboard", "tensorboardX"), ("mlflow", "mlflow")])
def test_missing_extra_is_reported_in_one_line(
    to: str,
    module: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert export(folder, to, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"is not installed; pip install 'zeroscale[{to}]'")


def test_records_with_equal_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, step_s in (("a", 0.5), ("b", 0.6)):
        save(tmp_path / place, run(steps=steps((step_s, step_s + 0.001) * 60)))
    assert export(tmp_path, "mlflow", tmp_path / "out") == 2
    assert "2 records have this name; export their folders one by one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_study_name_with_path_separators_is_sanitised() -> None:
    (one,) = list_exported_runs(results(run(study="../../etc")))
    assert one.study == "_.._etc"
