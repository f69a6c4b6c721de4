"""Tests of real runs of decoder-only models. All engines must have equal losses and use the predicted memory."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from started_runs import PATIENCE_S, QUICK
from test_allocation import Allocation, requested

from bench.core import store
from bench.core.record import RunRecord
from bench.predict.memory import predict_memory
from bench.predict.work import compute_flops_per_step

pytestmark = [pytest.mark.thorough, pytest.mark.processes, pytest.mark.timeout(900)]

POINT = (*(word for word in QUICK if not word.startswith(("model=", "sequence."))), "machine=cpu", "sequence.tokens=64")
BUCKET = "engine.reduce_bucket_size=100000"  # the default bucket is larger than all other memory
RUNS = {
    "gpt2_tiny": (("engine=ddp",), ("engine=zero2", BUCKET)),
    "llama_tiny": (("engine=ddp", "activation_checkpointing=true"), ("engine=zero1", BUCKET), ("engine=zero3", BUCKET)),
}
TEXT = (
    "model=llama_tiny", "engine=ddp", "data=text", "objective=causal_lm_documents", "data.sample_by=paragraph",
    "data.max_bytes=100000",
)  # fmt: skip
COMPILED = {engine: ("model=gpt2_tiny", f"engine={engine}", "model.compile=blocks") for engine in ("ddp", "fsdp")}
PEAK = {"ddp": 0.03, "zero1": 0.05, "zero2": 0.05, "zero3": 0.05}
"""Maximum relative error of predicted memory peaks, by engine. It allows for gloo's copies of tensors, which may or may
not be allocated at the peak."""


def zeroscale(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench.cli", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results folder of real runs with two ranks. One job makes all runs, so that modules are imported only once. All
    runs except TEXT have the default objective."""
    results = tmp_path_factory.mktemp("decoders")
    runs = [(f"model={model}", *words) for model, asked in RUNS.items() for words in asked]
    allocation = Allocation(
        results / "adhoc", [requested(*words, quick=POINT) for words in (*runs, TEXT, *COMPILED.values())]
    )
    output = allocation.end()
    assert [record.outcome.kind for record in allocation.records()] == ["ok"] * 8, output
    for beside, words in (("text", [TEXT]), ("compiled", COMPILED.values())):
        for point in (requested(*each, quick=POINT) for each in words):
            shutil.move(results / "adhoc" / point.config_id, results / beside / point.config_id)
    return results


@pytest.fixture(scope="module")
def records(folder: Path) -> list[RunRecord]:
    found = [store.read_record(path) for path in store.find_records([folder / "adhoc"])]
    assert len(found) == 5 and all(record.observations and record.observations.steps for record in found)
    return found


def losses(record: RunRecord) -> list[float]:
    assert record.observations and record.observations.steps
    return [loss or 0.0 for loss in record.observations.steps.loss][:6]


@pytest.mark.parametrize("model", RUNS)
def test_losses_of_every_engine_equal_those_of_ddp(model: str, records: list[RunRecord]) -> None:
    of = [record for record in records if record.spec.model.name == model]
    (reference,) = (losses(record) for record in of if record.spec.engine.name == "ddp")
    assert {record.spec.objective for record in of} == {"causal_lm"}
    assert 5.9 < reference[0] < 6.1, "ln 384"
    for record in of:
        assert losses(record) == pytest.approx(reference, rel=1e-5), record.spec.engine.name


@pytest.mark.parametrize("engine", COMPILED)
def test_losses_with_compiled_layers_equal_those_without(engine: str, records: list[RunRecord], folder: Path) -> None:
    found = [store.read_record(path) for path in store.find_records([folder / "compiled"])]
    (compiled,) = (record for record in found if record.spec.engine.name == engine)
    (plain,) = (r for r in records if (r.spec.model.name, r.spec.engine.name) == ("gpt2_tiny", "ddp"))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-6)
    assert compiled.observations and compiled.observations.steps
    assert compiled.observations.steps.step_s[0] > 10 * compiled.observations.steps.step_s[-1], "it was compiled there"


def test_predicted_memory_of_decoder_runs_equals_the_measurement(records: list[RunRecord]) -> None:
    for record in records:
        assert record.observations
        seen, predicted = record.observations.memory, predict_memory(record.spec, "cpu")
        peak, resident = (max(m.peak_allocated_bytes or 0 for m in seen), max(m.resident_bytes or 0 for m in seen))
        bound = PEAK[record.spec.engine.name]
        assert predicted.peak == pytest.approx(peak, rel=bound), (record.spec.model.name, record.spec.engine.name)
        assert predicted.resident == pytest.approx(resident, rel=0.001)


def test_rates_count_all_tokens_and_the_flops_of_the_formulas(folder: Path, records: list[RunRecord]) -> None:
    columns = "model,engine,objective,lengths,step_s,tokens_per_s,model_tflops_per_device,flags"
    text = zeroscale("table", str(folder / "adhoc"), "--columns", columns, "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert set(table["lengths"]) == {"64 tokens"} and not table["flags"].str.contains("counted_flops").any()
    for ours in {record.spec.model.name: record.spec for record in records}.values():
        of_model = table[table["model"] == ours.model.name]
        per_token = compute_flops_per_step(ours).model / ours.global_batch / 64 / ours.world_size / 1e12
        assert (of_model["model_tflops_per_device"] / of_model["tokens_per_s"]).tolist() == pytest.approx(
            [per_token] * len(of_model)
        )
    zeroscale("report", str(folder / "adhoc"), "--out", str(folder / "report"))
    assert "tokens/s, with padding" in (folder / "report" / "report.html").read_text()


def test_documents_of_a_text_are_trained_separately(folder: Path) -> None:
    (record,) = (store.read_record(path) for path in store.find_records([folder / "text"]))
    assert record.outcome.kind == "ok" and record.observations and record.observations.steps
    assert record.observations.data and record.observations.data["source"] == "text"
    predicted = predict_memory(record.spec, "cpu").peak
    assert predicted == pytest.approx(max(m.peak_allocated_bytes or 0 for m in record.observations.memory), rel=0.02)


def test_large_decoder_is_predicted_advised_and_planned_by_default_objective(tmp_path: Path) -> None:
    where = ("machine=h100", "devices_per_node=8")
    (prediction,) = json.loads(zeroscale("predict", "model=llama_2_7b", *where, "engine=zero3", "nodes=2", "--json"))
    assert prediction["fits"] and prediction["time"]["step_s"] > 0
    assert "llama_3_8b" in zeroscale("advise", "model=llama_3_8b", *where, "nodes=4")
    plan = zeroscale(
        "sweep", "model=gpt2,mt5_base", "engine=ddp,zero2", *where, "launcher=slurm", "--dry-run",
        "launcher.gpus=--gres=gpu:{devices}", "--results", str(tmp_path),
    )  # fmt: skip
    assert plan.count("causal_lm") == 2 and "512" in plan


def test_one_rank_of_many_is_rehearsed(tmp_path: Path) -> None:
    words = ("model=gpt2_tiny", "engine=zero2", BUCKET, "nodes=16", *POINT)
    out = zeroscale("rehearse", *words, "--results", str(tmp_path))
    assert "gpt2_tiny" in out
