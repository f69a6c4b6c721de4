"""Tests of `zeroscale run` and `zeroscale sweep` in real processes, started as a user starts them."""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from started_runs import PATIENCE_S, QUICK, T5, Command

from analysis.observed import find_slowest_rank
from bench.config import compose
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance, RunRecord
from bench.core.spec import RunSpec
from bench.models import derived_seed

pytestmark = pytest.mark.processes
Start = Callable[..., Command]


def test_record_of_a_measured_point_fills_the_table(zeroscale_run: Start) -> None:
    run = zeroscale_run(
        *T5, "engine=zero2", "data=text", "batch.accumulation=2", env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    record = run.record()
    assert run.process.returncode == 0, run.errors
    assert record.outcome.kind == "ok"
    observed, steps = record.observations, record.observations and record.observations.steps
    assert observed and steps and observed.collectives and observed.tokens and record.environment
    assert observed.parameters == 2_116_352
    assert all(map(math.isfinite, (loss or math.nan for loss in steps.loss)))
    assert observed.tokens.of("encoder") == record.spec.global_batch * 32
    # In fp32, ZeRO-2 averages 4 bytes of gradients and gathers 4 bytes of updated weights per parameter.
    assert observed.collectives["all_gather"].payload_bytes == pytest.approx(4 * observed.parameters, rel=0.01)
    for rank in observed.memory:
        assert rank.resident_bytes and rank.peak_allocated_bytes and rank.init_peak_bytes and rank.drift is not None
        assert rank.peak_allocated_bytes > rank.resident_bytes > 4 * observed.parameters
        assert rank.warmup_peak_bytes and rank.warmup_peak_bytes > rank.resident_bytes
        assert abs(rank.drift) < 0.01, "the allocator's count and the reachable storages agree"
    assert record.environment.variables["OMP_NUM_THREADS"] == "1"
    assert record.environment.variables["GOMP_SPINCOUNT"] == "1000"
    assert len(list(run.folder().iterdir())) <= 10


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results folder of a run with two ranks that has ended."""
    run = Command(tmp_path_factory.mktemp("ended"), (*QUICK, "engine=ddp"))
    assert run.record().outcome.kind == "ok", run.errors
    return run.folder()


def test_steps_of_every_rank_are_stored_and_the_record_has_their_extremes(ended: Path) -> None:
    record = store.read_record(ended / store.RECORD)
    assert record.observations and record.observations.steps
    table = pq.read_table(ended / store.STEPS).to_pandas()
    by_step, steps = table.groupby("step").step_s, record.observations.steps
    assert tuple(by_step.max()) == pytest.approx(steps.slowest_rank_s)
    assert tuple(by_step.min()) == pytest.approx(steps.fastest_rank_s)
    assert sum(steps.step_s[steps.cut :]) == pytest.approx(steps.window_s)
    block = (table.step - steps.cut) // record.spec.measure.block_steps
    by_block = table[table.window].groupby([block, "rank"]).step_s.sum().groupby(level=0).max()
    assert steps.window_s == pytest.approx(by_block.sum()), "of every block, what the rank spent that took longest"
    assert set(table["rank"]) == {0, 1}
    assert (~table.window).sum() == 2 * record.observations.steps.cut


def test_repeated_run_is_the_next_repeat_and_overwrites_nothing(ended: Path, zeroscale_run: Start) -> None:
    before = (ended / store.RECORD).read_bytes()
    again = zeroscale_run(*QUICK, "engine=ddp", results=ended.parents[2])
    again.process.communicate(timeout=PATIENCE_S)
    assert sorted(path.parent.name for path in store.find_records([ended.parent])) == ["0.0", "1.0"]
    assert (ended / store.RECORD).read_bytes() == before


def test_seed_determines_a_run_with_dropout(zeroscale_run: Start, tmp_path: Path) -> None:
    """The random numbers of dropout depend only on the seed and the rank. So two runs with the same seed must have
    equal losses."""
    point = (*QUICK, "engine=ddp", "model.dropout=0.3", "measure.inspect=false")
    losses = []
    for name in ("once", "again"):
        run = zeroscale_run(*point, results=tmp_path / name)
        assert run.record().outcome.kind == "ok", run.errors
        table = pq.read_table(run.folder() / store.STEPS).to_pandas()
        losses.append(table[table.step < 6].loss.tolist())  # of both ranks
    once, again = losses
    assert once == again
    assert derived_seed(0, "rank 0") != derived_seed(0, "rank 1")


@pytest.mark.timed
@pytest.mark.parametrize(("engine", "action"), [("zero1", "slow"), ("zero3", "slow_compute")])
def test_straggler_has_the_longest_time_outside_collectives(zeroscale_run: Start, engine: str, action: str) -> None:
    drill = f"rank=1 step=0 action={action}"
    record = zeroscale_run(*QUICK, f"engine={engine}", env=os.environ | {"ZEROSCALE_DRILL": drill}).record()
    assert record.observations and record.observations.drill == drill
    fast, slow = record.observations.outside_collectives_s
    assert slow > fast + 0.05, "150 ms, and what else this machine is doing"
    assert record.observations.steps
    assert statistics.median(record.observations.steps.step_s) > 0.15


@pytest.mark.timed
def test_slow_rank_is_named_among_tensor_and_pipeline_peers(zeroscale_run: Start) -> None:
    """One of four ranks is slow. Its tensor-parallel peer waits for it in all-reduces, and the ranks of the other
    pipeline stage wait in transfers.

    Step times alone do not show which rank is slow. But the slow rank spends more time outside of collectives than its
    peers.
    """
    layout = ("engine=pipeline", "parallel.pipeline=2", "parallel.tensor=2", "batch.accumulation=2")
    drill = {"ZEROSCALE_DRILL": "rank=1 step=0 action=slow_compute"}
    record = zeroscale_run(*QUICK[:-1], *layout, "devices_per_node=4", env=os.environ | drill).record()
    assert record.observations
    own = record.observations.outside_collectives_s
    assert own[1] > 2 * 0.15, "in each of two micro-batches"
    assert max(own[0], own[2], own[3]) < own[1] - 0.15
    assert find_slowest_rank(record) == 1


def test_ranks_refuse_a_machine_with_other_devices_before_timing(tmp_path: Path) -> None:
    spec = compose.compose_request(compose.parse_single([*QUICK, "machine=cpu", "devices_per_node=1"])).spec
    other = Machine(name="other", device="cpu", device_names=("no such processor",))
    record = supervised(tmp_path, spec, other)
    assert record.outcome.kind == "error"
    assert "machine=other expects no such processor, but this node has" in record.outcome.reason
    assert record.observations is None


def supervised(runs: Path, spec: RunSpec, machine: Machine) -> RunRecord:
    """Run a point as a launcher does, which means without the checks that a command makes before it calls the launcher.
    The run must fail. Return the record of the run."""
    circumstance = Circumstance(study="s", repeat=0, attempt=0, machine=machine)
    folder = store.open_attempt(runs, spec, circumstance).folder
    ended = subprocess.run([sys.executable, "-m", "bench.runtime", str(folder)], timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    return store.read_record(folder / store.RECORD)


def test_sweep_measures_every_point_and_resumes_after_its_end(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bench.cli", "sweep", *QUICK, "engine=ddp,zero1", "devices_per_node=1", "--json"]
    words += ["--results", str(tmp_path)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=one_thread)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == {
        "study": "adhoc",
        "outcomes": {"ok": 2},
        "skipped": 0,
        "unanswered": 0,
        "folder": str(tmp_path / "adhoc"),
    }
    again = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=one_thread)
    assert json.loads(again.stdout)["skipped"] == 2
    assert len(list(store.find_records([tmp_path]))) == 2


def test_ranks_refuse_a_model_with_another_parameter_count(tmp_path: Path) -> None:
    asked = compose.compose_request(compose.parse_single([*QUICK, "engine=ddp"]))
    wrong = asked.spec.model.model_copy(update={"parameters": 2_000_000})
    outcome = supervised(tmp_path, asked.spec.model_copy(update={"model": wrong}), asked.machine).outcome
    assert outcome.kind == "error"
    assert outcome.reason.endswith("Refused: gpt2_tiny has 973568 parameters where 2000000 were expected")
