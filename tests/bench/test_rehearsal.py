"""Tests of rehearsals, in which only one rank of a run is real and its collectives are simulated. They are compared
with real runs and with the formulas of ZeRO's paper."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import api, cli
from bench.core import store
from bench.core.engine_costs import CUBLAS_BYTES
from bench.core.record import RunRecord
from bench.measure.environment import find_device_kind
from bench.predict.memory import predict_memory

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.thorough, pytest.mark.processes]

SHORT = (
    "measure.warmup_steps=2", "measure.block_steps=1", "measure.min_steps=3",
    "measure.window_s=0",
)  # fmt: skip
LARGE = ("model=tiny", "precision=bf16", "batch.micro=1", "sequence.encoder=16", "sequence.decoder=8", "nodes=128",
         "devices_per_node=8")  # fmt: skip
SMALL_BUCKETS = "engine.reduce_bucket_size=100000"
STAGE_3 = (
    "engine=zero3", SMALL_BUCKETS, "engine.stage3_prefetch_bucket_size=100000", "engine.stage3_max_reuse_distance=0",
    "engine.stage3_param_persistence_threshold=0", "engine.stage3_max_live_parameters=100000",
)  # fmt: skip


def recorded() -> dict[str, dict[str, str]]:
    """Return a recorded real run of two ranks over gloo for each of three engines. A run is a row of peaks.csv."""
    lines = (ROOT / "results" / "predictions" / "inputs" / "peaks.csv").read_text().splitlines()
    runs = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return {
        engine: next(run for run in runs if {f"engine={engine}", "devices_per_node=2"} <= set(run["overrides"].split()))
        for engine in ("ddp", "zero1", "zero3")
    }


FOUR = ("precision=bf16", "devices_per_node=4", "batch.micro=2", "activation_checkpointing=true")
ON_GPU = (
    "model=gpt2_tiny",
    "engine=zero2",
    "machine=h200",
    "sequence.tokens=256",
    "batch.micro=8",
    "devices_per_node=4",
)
SHAPES_ALONE = {
    "fsdp": ("model=tiny", "engine=fsdp", "sequence.encoder=64", "sequence.decoder=32"),
    "modular": ("model=gpt2_tiny", "engine=modular", "parallel.tensor=2", "parallel.pipeline=2",
                "parallel.stages_per_rank=2", "batch.accumulation=4", "sequence.tokens=64"),
}  # fmt: skip
"""Overrides for engines that are rehearsed twice: once with all operations executed, and once with `--shapes-only`."""

REAL = recorded()
ASKED = {
    **{engine: tuple(run["overrides"].split()) for engine, run in REAL.items()},
    "the last of 1024": (*LARGE, "engine=zero2", SMALL_BUCKETS, "--rank", "1023"),
    "the first of 1024": (*LARGE, *STAGE_3),
    **{f"{engine} computed": (*words, *FOUR) for engine, words in SHAPES_ALONE.items()},
    **{f"{engine} by shapes": (*words, *FOUR, "--shapes-only") for engine, words in SHAPES_ALONE.items()},
    "on a GPU": (*ON_GPU, "precision=bf16", "activation_checkpointing=true", "--shapes-only"),
}


FORKED = """
import json, sys
from pathlib import Path
from bench.config import compose
from tests.benchmarks.rehearsals import rehearse
from bench.runtime import fork_server
fork_server.preload("cpu")
for name, words in json.loads(sys.argv[1]).items():
    chosen = [word for word in words if word != "--shapes-only"]
    request = compose.compose_request(compose.parse_single(chosen))
    rehearse(request.spec, 0, Path(sys.argv[2]) / name, shapes_only=chosen != words, machine=request.machine)
"""
"""Program that rehearses rank 0 of several points. Each rehearsal is forked from a process that has already imported
torch."""


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """Records of all rehearsals of this file, by name.

    One rehearsal is made by `zeroscale rehearse`. The others are made by the script that writes the tables in
    results/predictions/inputs.
    """
    results = tmp_path_factory.mktemp("rehearsals")
    named, others = (
        "the last of 1024",
        {name: [*words, *SHORT] for name, words in ASKED.items() if "--rank" not in words},
    )
    command = ["-m", "bench.cli", "rehearse", *ASKED[named], *SHORT, "--json", "--results", str(results / named)]
    for words in (command, ["-c", FORKED, json.dumps(others), str(results)]):
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    found = {name: store.find_records([results / name]) for name in ASKED}
    return {name: store.read_record(path) for name, paths in found.items() for path in paths}


@pytest.mark.parametrize("engine", REAL)
def test_rehearsed_memory_equals_that_of_a_real_run(rehearsals: dict[str, RunRecord], engine: str) -> None:
    observed = rehearsals[engine].observations
    assert observed is not None
    (own,) = observed.memory
    found = {
        "init_peak_bytes": (own.init_peak_bytes, 0.07),
        "resident_bytes": (own.resident_bytes, 0.01),
        "peak_bytes": (own.peak_allocated_bytes, 0.03),
    }
    for name, (rehearsed, allowed) in found.items():
        assert rehearsed == pytest.approx(int(REAL[engine][name]), rel=allowed), name


def test_rehearsed_rank_of_1024_has_its_partition_of_the_states(rehearsals: dict[str, RunRecord]) -> None:
    """The expected bytes follow from ZeRO's formulas (arXiv 1910.02054, section 3) for Ψ parameters on n ranks.

    No stage holds gradients between steps. Stages 1 and 2 hold all weights (2 Ψ bytes) and 1/n of the optimizer states
    (12 Ψ / n bytes). Stage 3 also partitions the weights, so it holds 14 Ψ / n bytes. At stage 3, each of the 83
    tensors is padded to a multiple of n elements.
    """
    last, first = (rehearsals[name].observations for name in ("the last of 1024", "the first of 1024"))
    assert last is not None
    assert first is not None
    count = last.parameters
    assert last.memory[0].rank == 1023
    assert last.memory[0].resident_bytes == pytest.approx(2 * count + 12 * count / 1024, rel=0.002)
    padded = first.collectives["reduce_scatter"].payload_bytes / 2 if first.collectives else 0
    buckets = 2 * 100_000
    assert count < padded < count + 83 * 1024
    assert first.memory[0].resident_bytes == pytest.approx(14 * padded / 1024 + buckets, rel=0.03)


def test_rehearsed_record_has_no_step_times_link_or_tokens(rehearsals: dict[str, RunRecord]) -> None:
    record = rehearsals["the last of 1024"]
    observed = record.observations
    assert (record.evidence, record.outcome.kind, record.circumstance.rehearsed_rank) == ("rehearsed", "ok", 1023)
    assert observed is not None
    assert (observed.steps, observed.tokens, observed.link, observed.outside_collectives_s) == (None, None, None, ())
    assert len(observed.compute_s) == 3
    assert min(observed.compute_s) > 0


def test_rehearsed_collectives_have_the_bytes_of_real_collectives(rehearsals: dict[str, RunRecord]) -> None:
    """At stage 2, every gradient is all-reduced once in bf16. A few scalars are all-reduced, too. Then the updated
    weights are gathered, padded to a multiple of the number of ranks."""
    observed = rehearsals["the last of 1024"].observations
    assert observed is not None
    assert observed.collectives is not None
    assert observed.collectives["all_reduce"].payload_bytes == pytest.approx(2 * observed.parameters, abs=64)
    assert 0 <= observed.collectives["all_gather"].payload_bytes - 2 * observed.parameters < 4 * 1024 * 2


@pytest.mark.parametrize("engine", SHAPES_ALONE)
def test_shapes_only_rehearsal_has_the_memory_of_a_computing_one(rehearsals: dict[str, RunRecord], engine: str) -> None:
    """A rehearsal with `--shapes-only` skips large operations. So it lacks the temporary memory inside of kernels,
    which is less than 1 % of the peak here. All other memory must be equal."""
    computed, by_shapes = (rehearsals[f"{engine} {how}"].observations for how in ("computed", "by shapes"))
    assert computed is not None
    assert by_shapes is not None
    (one,), (other,) = computed.memory, by_shapes.memory
    assert other.init_peak_bytes == one.init_peak_bytes
    assert other.resident_bytes == pytest.approx(one.resident_bytes, abs=128)  # some scalars
    assert other.peak_allocated_bytes == pytest.approx(one.peak_allocated_bytes, rel=0.01)
    assert by_shapes.collectives == computed.collectives
    assert (len(computed.compute_s), len(by_shapes.compute_s)) == (3, 0)


def test_rehearsal_by_shapes_for_a_gpu_has_the_predicted_memory_of_a_gpu(rehearsals: dict[str, RunRecord]) -> None:
    """The allocator of a GPU counts whole blocks, of which up to 1 MiB may be unused, and 64 MiB of cuBLAS. The
    prediction contains neither, and is an upper bound for gradients in flight."""
    record = rehearsals["on a GPU"]
    assert record.observations is not None
    (own,) = record.observations.memory
    assert own.peak_allocated_bytes and own.peak_reserved_bytes and own.least_reserved_bytes
    predicted = predict_memory(record.spec, "cuda", None, rehearsed=True)
    assert own.peak_allocated_bytes - CUBLAS_BYTES == pytest.approx(predicted.peak, rel=0.1)
    assert own.peak_allocated_bytes <= own.least_reserved_bytes <= own.peak_reserved_bytes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--shapes-only", "machine=h200", "engine=fsdp", "engine.offload=true"),
            "engine.offload: tensors on the host and on the GPU cannot be told apart without a GPU; remove it",
        ),
        pytest.param(
            ("machine=h200",),
            "machine=h200: this computer has no GPU that torch can use; add --shapes-only, or choose",
            marks=pytest.mark.skipif(find_device_kind() == "cuda", reason="this machine has a GPU"),
        ),
        (("--shapes-only", "model.compile=blocks"), "model.compile=blocks: memory by shapes is counted operation by"),
        (("engine=zero2", "--rank", "16"), "--rank 16: the run has ranks 0 to 15; choose one of these ranks"),
        (("engine=zero3", "--rank", "3"), "--rank 3: at stage 3 DeepSpeed compares rank 0's lists"),
        (("engine=zero2", "launcher=slurm"), "launcher=slurm: a rehearsal runs on this machine; remove the override"),
        (("model=mt5_xxl", "engine=ddp", "batch.micro=64"), "mt5_xxl: one rank needs"),
    ],
)
def test_unsupported_rehearsal_is_refused_before_the_start(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ("rehearse", "model=tiny", "nodes=2", "devices_per_node=8", *words, "--results", str(tmp_path))
    assert cli.main(asked) == 2
    assert capsys.readouterr().err.startswith(f"zeroscale: {expected}")
    assert not list(tmp_path.iterdir())


def test_rehearsal_takes_its_results_folder_from_the_study_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["model=tiny", "devices_per_node=8"]
    assert api.rehearsal(words, study="mine").requested.circumstance.study == "mine"
    assert api.rehearsal(words).requested.circumstance.study == "rehearsals"
    asked = ["rehearse", *words, "--dry-run", "--results", str(tmp_path), "--study"]
    assert cli.main([*asked, "mine"]) == 0
    assert cli.main([*asked, "no/name"]) == 2
    assert capsys.readouterr().err.startswith("zeroscale: --study no/name: a name is made of letters")


def test_results_folder_of_a_sweep_is_refused_for_a_rehearsal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "swept" / "sweeps").mkdir(parents=True)
    (tmp_path / "swept" / "sweeps" / "1.json").write_text("{}")
    asked = ["rehearse", "model=tiny", "devices_per_node=8", "--dry-run", "--results", str(tmp_path)]
    assert cli.main([*asked, "--study", "swept"]) == 2
    assert capsys.readouterr().err.startswith("zeroscale: --study swept: this folder belongs to a sweep")


def test_dry_run_of_a_rehearsal_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rehearse", "model=tiny", "devices_per_node=8", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["devices_per_node"] == 8
