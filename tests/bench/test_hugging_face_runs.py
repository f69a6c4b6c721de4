"""Tests of runs of the model family hugging_face, which trains the model of a user's config.json. All engines must have
equal losses. This family has no formulas for FLOPs or memory. Therefore torch counts the FLOPs, and there are no
predictions."""

import io
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from started_runs import QUICK, Command
from test_allocation import Allocation, requested

from analysis.flags import list_flags
from analysis.observed import compute_step_flops
from bench import cli
from bench.core import store
from bench.core.record import RunRecord

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
OWN = [text for text in QUICK if not text.startswith(("model=", "sequence."))]
FLOPS = 3 * 4 * 32 * (2 * (24 * 64**2 + 4 * 64 * 32) + 2 * 64 * 384)
"""Model FLOPs of a step with 4 samples of 32 tokens. The forward pass needs 24 d² + 4 d × tokens per token and
layer, and 2 d × vocabulary per token. Forward and backward together need three times as many."""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(GPT2))
    model = ["model=hugging_face", f"model.config_file={file}", "model.name=own", "model.family=hugging_face"]
    return [*model, *OWN, "objective=causal_lm", "sequence.tokens=32", "machine=cpu"]


@pytest.fixture(scope="module")
def runs(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Results folders of real runs on two ranks, by name. The run with DDP was started as a user starts it. The two
    other runs were points of one job, which forks their ranks from a process that has already imported all modules."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("ddp", "allocated", "zero3", "recomputing")}
    alone = Command(folders["ddp"], [*asked, "engine=ddp"])
    assert alone.record().outcome.kind == "ok", (alone.output, alone.errors)
    assert "counted_flops" in alone.output
    allocated = {"zero3": ("engine=zero3",), "recomputing": ("engine=ddp", "activation_checkpointing=true")}
    quick = [text for text in asked if not text.startswith("machine=")]
    points = {name: requested(*words, quick=quick) for name, words in allocated.items()}
    output = Allocation(folders["allocated"], list(points.values())).end()
    for name, point in points.items():
        shutil.move(folders["allocated"] / point.config_id, folders[name])
        assert find_one(folders[name]).outcome.kind == "ok", output
    return folders


def find_one(folder: Path) -> RunRecord:
    [path] = store.find_records([folder])
    return store.read_record(path)


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_flops_of_hugging_face_models_are_counted(
    runs: dict[str, Path], engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = find_one(runs[engine])
    assert record.observations and record.observations.counted_flops == FLOPS
    assert "counted_flops" in list_flags(record)
    columns = ("--columns", "model,model_tflops_per_device", "--format", "csv")
    assert cli.main(["table", str(runs[engine]), *columns]) == 0
    row = pd.read_csv(io.StringIO(capsys.readouterr().out)).iloc[0]
    assert row.model == "own" and row.model_tflops_per_device > 0


def test_losses_of_all_engines_agree(runs: dict[str, Path]) -> None:
    ddp, zero3 = (find_one(runs[engine]).observations for engine in ("ddp", "zero3"))
    assert ddp and zero3 and ddp.steps and zero3.steps
    assert zero3.steps.loss[:5] == pytest.approx(ddp.steps.loss[:5], rel=1e-5)


def test_model_flops_exclude_recomputation(runs: dict[str, Path]) -> None:
    record = find_one(runs["recomputing"])
    hardware = compute_step_flops(record, "hardware")
    assert compute_step_flops(record, "model") is None, "the counter includes recomputation"
    assert hardware and FLOPS < hardware < FLOPS * 4 / 3


@pytest.mark.parametrize(("verb", "code"), [("predict", 0), ("advise", 2)])
def test_missing_prediction_is_stated(
    verb: str, code: int, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = [*(text for text in asked if not text.startswith("machine=")), "machine=a100_80"]
    assert cli.main([verb, *machine, *(["engine=zero2"] if verb == "predict" else [])]) == code
    printed = " ".join("".join(capsys.readouterr()).split())  # lines are wrapped
    assert "no prediction: the family does not describe this model's network; measure it" in printed


def test_rank_of_a_larger_job_is_rehearsed(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal runs one rank of the job alone. It needs no formulas of the model family, because it runs the model
    itself."""
    larger = [text for text in asked if not text.startswith("devices_per_node=")]
    assert cli.main(["rehearse", *larger, "engine=zero2", "devices_per_node=4", "--results", str(tmp_path)]) == 0
    assert "all other ranks are simulated" in capsys.readouterr().out
