"""Tests of pipelines that are started by the commands of a user. They check the record of a run, the record of a
rehearsal, and the error message for a command that lacks settings of the pipeline."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from test_allocation import Allocation, requested

from analysis import results
from analysis.metrics.throughput import compute_tokens_per_s
from analysis.metrics.waiting import compute_idle_share
from analysis.observed import get_window
from bench.cli.run import format_answer
from bench.config import compose
from bench.config.decode import check_rank
from bench.core import store
from bench.core.engine_facts import place as find_place
from bench.core.errors import UserError
from bench.core.record import RunRecord
from bench.engines.distributed.schedule import PipelineSize, build_computation
from bench.predict.memory import predict_memory_by_place

QUICK = (
    "precision=fp32", "batch.micro=2", "measure.warmup_steps=2", "measure.block_steps=1",
    "measure.min_steps=3", "measure.window_s=0", "model=tiny", "sequence.encoder=32",
    "sequence.decoder=16", "devices_per_node=4",
)  # fmt: skip
LAYOUT = ("engine=modular", "parallel.pipeline=2", "parallel.stages_per_rank=2", "batch.accumulation=4")
LARGE = ("engine=pipeline", "parallel.pipeline=4", "batch.accumulation=4", "nodes=256")
PROGRAM = """
import json, sys
from pathlib import Path
from bench.config import compose
from tests.benchmarks.rehearsals import rehearse
from bench.runtime import fork_server
fork_server.preload("cpu")
for rank, words in json.loads(sys.argv[1]):
    rehearse(compose.compose_request(compose.parse_single(words)).spec, rank, Path(sys.argv[2]) / str(rank))
"""
"""Program that makes rehearsals. Each runs in a forked process, whose parent has already imported torch."""


def start(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_one(folder: Path) -> RunRecord:
    [path] = store.find_records([folder])
    return store.read_record(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with records of several runs. A pipeline on four real ranks and its reference with DDP ran in one job, so
    that ranks import modules only once. All four ranks of the pipeline were also rehearsed, each without the others.
    One rank of a pipeline with 1,024 ranks was rehearsed, too."""
    made = tmp_path_factory.mktemp("pipelines")
    points = [requested(*words, quick=QUICK) for words in (LAYOUT, ("engine=ddp", "batch.global=16"))]
    allocation = Allocation(made / "real" / "adhoc", points)
    output = allocation.end()
    assert [record.outcome.kind for record in allocation.records()] == ["ok"] * 2, output
    ranks = [*((rank, [*QUICK, *LAYOUT]) for rank in range(4)), (1023, [*QUICK, *LARGE])]
    start("-c", PROGRAM, json.dumps(ranks), str(made / "rehearsed"))
    return made


@pytest.fixture(scope="module")
def real(folder: Path) -> RunRecord:
    read = map(store.read_record, store.find_records([folder / "real"]))
    return next(record for record in read if record.spec.engine.name == "modular")


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_samples_and_tokens_of_a_pipeline_count_model_copies_and_not_ranks(real: RunRecord) -> None:
    observed, timed = real.observations, get_window(real)
    assert observed and observed.tokens and timed
    assert real.spec.global_batch == 2 * 4 * 2  # micro-batch, accumulation, number of model copies on four ranks
    assert observed.tokens.of("encoder") == 16 * 32 and observed.tokens.of("decoder") == 16 * 16
    assert compute_tokens_per_s(real) == pytest.approx(16 * 48 * len(timed.step_s) / sum(timed.step_s), rel=0.01)
    assert len(observed.memory) == 4 and observed.parameters == real.spec.model.parameters


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_losses_of_a_pipeline_record_are_verified_against_ddp(folder: Path) -> None:
    table = results.read([folder / "real"]).table.set_index("engine")
    assert set(table.outcome) == {"ok"}
    assert "unverified" not in table["flags"]["modular"].split()
    assert table.pipeline["modular"] == 2 and table.stages_per_rank["modular"] == 2


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_idle_time_of_every_rank_is_recorded_and_printed(real: RunRecord, tmp_path: Path) -> None:
    observed, timed = real.observations, get_window(real)
    assert observed and observed.idle_s and timed and all(seconds and seconds > 0 for seconds in observed.idle_s)
    share = statistics.mean(seconds or 0 for seconds in observed.idle_s) / statistics.median(timed.step_s)
    assert compute_idle_share(real) == pytest.approx(share)
    lines = format_answer(real, tmp_path / "study" / "point" / "0.0", [*QUICK, *LAYOUT])
    assert any(
        line.startswith(f"ranks are idle for {100 * share:.0f} % of a step; by pipeline position: ") for line in lines
    )
    assert any(line.startswith("peak memory by pipeline position: ") and line.endswith(" MiB") for line in lines)
    [reference] = [line for line in lines if "engine=ddp" in line]
    assert "batch.global=16" in reference and "parallel." not in reference and "accumulation" not in reference


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_record_has_the_time_of_each_pass_in_schedule_order(real: RunRecord) -> None:
    """The record has the passes of the first rank at each position of the pipeline. Their order is that of the
    schedule, and their times do not overlap."""
    observed = real.observations
    assert observed and observed.passes
    orders = build_computation("breadth_first", PipelineSize(2, 2, 4))
    assert [[one[:3] for one in here] for here in observed.passes] == [list(map(tuple, order)) for order in orders]
    for here in observed.passes:
        moments = [moment for one in here for moment in (one.begin_s, one.end_s)]
        assert moments == sorted(moments) and moments[0] >= 0


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", range(4))
def test_memory_of_a_rehearsed_pipeline_rank_equals_that_of_the_real_rank(
    folder: Path, real: RunRecord, rank: int
) -> None:
    rehearsed = find_one(folder / "rehearsed" / str(rank)).observations
    assert rehearsed and real.observations
    [own], there = rehearsed.memory, real.observations.memory[rank]
    assert own.rank == there.rank == rank and there.resident_bytes and own.peak_allocated_bytes
    # the difference is data that the measurement loop keeps for each step
    assert own.resident_bytes == pytest.approx(there.resident_bytes, abs=2000)
    assert own.peak_allocated_bytes == pytest.approx(there.peak_allocated_bytes, rel=0.01)
    # passes whose result another rank needs
    assert rehearsed.collectives and rehearsed.collectives["send"].calls == 4 * 3 * 2


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", range(4))
def test_memory_of_a_real_pipeline_rank_equals_the_prediction_for_its_stage(real: RunRecord, rank: int) -> None:
    place = predict_memory_by_place(real.spec, "cpu")[find_place(real.spec, rank).pipeline]
    assert real.observations and (seen := real.observations.memory[rank]).resident_bytes and seen.peak_allocated_bytes
    assert place.resident == pytest.approx(seen.resident_bytes, rel=0.01)
    assert place.peak == pytest.approx(seen.peak_allocated_bytes, rel=0.05)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_last_rank_of_1024_is_rehearsed(folder: Path) -> None:
    record = find_one(folder / "rehearsed" / "1023")
    assert record.spec.world_size == 1024 and record.spec.data_parallel == 256
    assert record.outcome.kind == "ok" and record.observations and record.observations.memory[0].rank == 1023


@pytest.mark.parametrize(("words", "rule"), [
    (["engine=pipeline"], "or more; add parallel.pipeline=2 batch.accumulation=8"),
    (["engine=interleaved"], "add parallel.pipeline=2 parallel.stages_per_rank=2 batch.accumulation=8"),
    (["engine=modular"], "add parallel.stages_per_rank=2 batch.accumulation=8, and parallel.pipeline=2"),
    (["engine=lga"], "add parallel.stages_per_rank=2 batch.accumulation=8"),
    (["engine=interleaved", "parallel.pipeline=2", "parallel.stages_per_rank=2"], "to a multiple of 2"),
    (["engine=pipeline", "parallel.pipeline=16", "devices_per_node=16"], "set 9 stages or less"),
    (["engine=pipeline", "parallel.pipeline=2", "devices_per_node=3"], "does not divide the 3 ranks"),
])  # fmt: skip
def test_incomplete_pipeline_request_is_refused_with_the_missing_overrides(words: list[str], rule: str) -> None:
    given = words if any(word.startswith("devices") for word in words) else [*words, "devices_per_node=4"]
    with pytest.raises(UserError) as refused:
        check_rank(compose.compose_request(compose.parse_single(given)), "cpu")
    assert rule in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("words", [
    ["engine=pipeline", "parallel.pipeline=2", "batch.accumulation=8"],
    ["engine=interleaved", "parallel.pipeline=2", "parallel.stages_per_rank=2", "batch.accumulation=8"],
    ["engine=modular", "parallel.stages_per_rank=2", "batch.accumulation=8", "parallel.pipeline=2"],
    ["engine=lga", "parallel.stages_per_rank=2", "batch.accumulation=8"],
])  # fmt: skip
def test_suggested_pipeline_overrides_are_sufficient(words: list[str]) -> None:
    check_rank(compose.compose_request(compose.parse_single([*words, "devices_per_node=2"])), "cpu")
