"""Tests of whole runs on a GPU, started as a user starts them. Without a GPU, the tests are skipped.

Several runs use the GPU at the same time. This disturbs their step times, which are not compared here. Ranks are
started in new interpreters: a rank that is forked from the server of the tests has imported DeepSpeed for the CPU.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose
from bench.core import store
from bench.core.record import Circumstance, RunRecord
from bench.core.spec import RunSpec
from bench.predict.memory import predict_memory as predicted
from bench.runtime.coordinator import RunCoordinator
from bench.runtime.process import ForkServer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.cold,
    pytest.mark.skipif(
        not torch.cuda.is_available() and "ZEROSCALE_REQUIRE_CUDA" not in os.environ, reason="no CUDA device"
    ),
]
QUICK = (
    "devices_per_node=1", "precision=bf16", "batch.micro=2", "sequence.encoder=32", "sequence.decoder=16",
    "measure.block_steps=3", "measure.warmup_steps=6", "measure.gpu_warmup_s=0", "measure.min_steps=6",
    "measure.window_s=0", "launcher.lock=false",
)  # fmt: skip
LARGER = ("model=mt5_small", "batch.micro=8", "sequence.encoder=512", "sequence.decoder=128")
RUNS = {
    **{engine: ("model=tiny", f"engine={engine}") for engine in ("ddp", "zero0", "zero1", "zero2", "zero3")},
    "fp16": ("model=tiny", "engine=ddp", "precision=fp16"),
    "fused": ("model=tiny", "engine=ddp", "optimizer.implementation=fused"),
    "chunked": ("model=tiny", "engine=ddp", "model.loss_chunk_tokens=8"),
    "compiled": ("model=tiny", "engine=ddp", "model.compile=blocks"),
    "flex": ("model=tiny", "engine=ddp", "model.attention=flex"),
    "too large": ("model=mt5_small", "engine=ddp", "batch.micro=16384", "sequence.encoder=512"),
    **{f"predicted {engine}": (f"engine={engine}", *LARGER) for engine in ("ddp", "zero1", "zero2", "zero3")},
    "predicted checkpointed": ("engine=zero2", *LARGER, "activation_checkpointing=true"),
}
REHEARSED = {
    f"rehearsed {engine}": ("model=tiny", f"engine={engine}", "nodes=2", "devices_per_node=8")
    for engine in ("zero1", "zero2", "zero3")
}
WORKSPACES = 2 * 33 * 2**20
"""Bytes that cuBLAS keeps as workspaces on a GPU of NVIDIA's Hopper generation, at most: 32 MiB for each of two streams
(torch, CUDABlas.cpp), and rounding."""
SAME_LOSS = ("zero0", "zero1", "zero2", "zero3", "fused", "chunked", "compiled", "flex")


def recorded(words: tuple[str, ...], results: Path, verb: str = "run") -> RunRecord:
    """Run a command that measures (`run` or `rehearse`) with these overrides, as a user does. Return the record,
    whatever its outcome."""
    command = [sys.executable, "-m", "bench.cli", verb, *words, "--json", "--results", str(results)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "2"}
    )
    assert done.stdout, done.stderr
    return RunRecord.model_validate_json(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """Records of all runs of this file, by name. Ten runs share the GPU at a time. The run that exhausts the GPU's
    memory is made alone."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str) -> RunRecord:
        asked, verb = (REHEARSED[name], "rehearse") if name in REHEARSED else (RUNS[name], "run")
        return recorded((*QUICK, *asked), folder / name.replace(" ", "_"), verb)

    together = [name for name in (*RUNS, *REHEARSED) if name != "too large"]
    with ThreadPoolExecutor(10) as pool:
        found = dict(zip(together, pool.map(run, together), strict=True))
    return {**found, "too large": run("too large")}


def asked(*overrides: str) -> RunSpec:
    return compose.compose_request(compose.parse_single([*QUICK, *overrides])).spec


@pytest.mark.parametrize("name", [name for name in RUNS if name != "too large"])
def test_record_of_a_gpu_run_has_all_device_counters(runs: dict[str, RunRecord], name: str) -> None:
    record = runs[name]
    assert record.outcome.kind == "ok", (record.outcome.reason, record.outcome.evidence)
    seen = record.observations
    assert seen and seen.steps and record.environment
    (own,) = seen.memory
    assert own.peak_allocated_bytes and own.resident_bytes and own.peak_reserved_bytes and own.init_peak_bytes
    assert own.peak_reserved_bytes >= own.peak_allocated_bytes >= own.resident_bytes
    assert own.drift is None, "what cuBLAS holds is no storage that Python can reach"
    assert min(seen.steps.step_s) > 0
    assert own.init_reserved_bytes and own.warmup_reserved_bytes and own.device_peak_bytes
    # other runs share the GPU, so this number may be smaller than one that is read later
    assert own.device_peak_bytes >= own.peak_reserved_bytes
    assert seen.uninspected is None and len(seen.outside_collectives_s) == 1
    assert record.environment.devices_after and record.environment.classification.device == torch.cuda.get_device_name(
        0
    )


@pytest.mark.parametrize("name", SAME_LOSS)
def test_losses_equal_those_of_ddp(runs: dict[str, RunRecord], name: str) -> None:
    reference, other = (runs[which].observations for which in ("ddp", name))
    assert reference and other and reference.steps and other.steps
    # The tolerance is two and a half spacings of bf16 numbers, as in analysis.verify.
    assert other.steps.loss[:5] == pytest.approx(reference.steps.loss[:5], rel=2e-2)


def test_out_of_memory_is_recorded_as_an_outcome(runs: dict[str, RunRecord]) -> None:
    outcome = runs["too large"].outcome
    assert outcome.kind == "oom", outcome.reason
    assert outcome.shortage and outcome.shortage.where == "device" and "device memory: " in outcome.reason


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("predicted")])
def test_memory_equals_its_prediction(runs: dict[str, RunRecord], name: str) -> None:
    """The tolerances of this test were chosen before the first run on a GPU. So they are not fitted to
    measured errors."""
    prediction, seen = predicted(asked(*RUNS[name]), "cuda"), runs[name].observations
    assert seen
    (own,) = seen.memory
    print(
        name,
        json.dumps(
            {"predicted": [prediction.resident, prediction.init_peak, prediction.peak], "seen": own.model_dump()}
        ),
    )
    assert own.resident_bytes == pytest.approx(prediction.resident, rel=0.03)
    assert own.peak_allocated_bytes == pytest.approx(prediction.peak, rel=0.10)
    assert prediction.device[0] <= (own.device_used_bytes or 0), "what lies beside tensors is at least the least"


@pytest.mark.parametrize("name", REHEARSED)
def test_one_rank_of_sixteen_is_rehearsed_on_the_device(runs: dict[str, RunRecord], name: str) -> None:
    record = runs[name]
    assert (record.outcome.kind, record.evidence) == ("ok", "rehearsed"), record.outcome.reason
    seen = record.observations
    assert seen and seen.compute_s and seen.collectives and seen.memory[0].resident_bytes
    prediction = predicted(asked(*REHEARSED[name]), "cuda")
    workspaces = seen.memory[0].resident_bytes - prediction.resident
    assert 0 <= workspaces <= WORKSPACES + 0.03 * prediction.resident


@pytest.mark.parametrize("span", ["node", "device"])
def test_ranks_forked_after_the_imports_find_the_device(span: Any, tmp_path: Path) -> None:
    """A fork server imports all modules, and then forks the ranks. It must not initialise CUDA, because then its child
    processes could not use the GPU."""
    point = compose.compose_request(compose.parse_single([*QUICK, "model=tiny", "engine=zero2"]))
    machine = point.machine.model_copy(update={"device": "cuda"})
    circumstance = Circumstance(study="forked", repeat=0, attempt=0, machine=machine, launcher={"name": "local"})
    server = ForkServer("cuda", [point.spec])
    try:
        server.wait_until_ready()
        for _ in range(2 if span == "node" else 1):
            attempt = store.open_attempt(tmp_path / "forked", point.spec, circumstance, new_repeat=True)
            record = RunCoordinator(attempt.folder, handle_signals=False, span=span, start=server.start).run()
            assert record and record.outcome.kind == "ok", record and record.outcome.reason
    finally:
        server.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU has no link")
def test_link_between_two_devices_is_measured(tmp_path: Path) -> None:
    record = recorded(("model=tiny", *QUICK[1:], "engine=zero2", "devices_per_node=2"), tmp_path)
    seen = record.observations
    assert seen and seen.link and (seen.link.bus_bytes_per_s or 0) > 1e9
