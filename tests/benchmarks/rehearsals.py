"""Measure the memory of rehearsed ranks. A rehearsal runs one real rank of a job, and simulates its peers. The memory
is written to tables, which `analysis.validation` compares with predictions.

  python -m tests.benchmarks.rehearsals rehearsed    # one rank of jobs of 1 to 1,024 ranks; ten minutes
  python -m tests.benchmarks.rehearsals beside_real  # recorded runs of several ranks, rank by rank; ten minutes
  python -m tests.benchmarks.rehearsals frontier     # a rank of each stage of GPT 175B on Frontier; six minutes
  python -m tests.benchmarks.rehearsals h200         # runs recorded on an H200, by shapes on a CPU; eight minutes
  python -m tests.benchmarks.rehearsals adapters     # published LoRA and QLoRA, by shapes on a CPU; ten minutes

The tables are written to results/predictions/inputs. Every rehearsal runs the real engine in a process that is forked
after the imports. The tables contain no predictions.
"""

import argparse
import csv
import functools
import itertools
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from analysis.claims.sources import read_published
from analysis.validation.recorded import RecordedRuns, find_recorded_runs
from bench import models
from bench.config import compose
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance, RankMemory
from bench.core.spec import Batch, RunSpec, canonical, config_id

SHAPES = {
    "tiny": ("model=tiny",),
    "first_t5": (  # tied embeddings, no gated layers, most parameters in the embedding
        "model=tiny", "model.parameters=null", "model.shape.vocab=8000", "model.shape.d_model=96",
        "model.shape.d_kv=16", "model.shape.heads=5", "model.shape.d_ff=160", "model.shape.encoder_layers=2",
        "model.shape.decoder_layers=3", "model.shape.gated=false", "model.shape.activation=relu",
        "model.shape.separate_head=false",
    ),
}  # fmt: skip
BUCKETS = {
    "small": {"reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 100_000,
              "stage3_max_live_parameters": 100_000, "stage3_max_reuse_distance": 0,
              "stage3_param_persistence_threshold": 0},
    "ample": {"reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 1_000_000,
              "stage3_param_persistence_threshold": 1_000},
}  # fmt: skip
LENGTHS = ("sequence.encoder=64", "sequence.decoder=32")
SHORT = (
    "measure.warmup_steps=2", "measure.gpu_warmup_s=0", "measure.block_steps=1", "measure.min_steps=3",
    "measure.window_s=0", "measure.inspect=false",
)  # fmt: skip


class RehearsalCase(NamedTuple):
    """Parameters of one rehearsed job. `shape` and `buckets` are keys of SHAPES and BUCKETS."""

    stage: int
    precision: str
    ranks: int
    micro: int
    checkpointing: bool
    shape: str
    buckets: str


def list_cases() -> Iterator[RehearsalCase]:
    """Yield the cases: all combinations of model shape, precision and number of ranks. Each combination has seven
    variants, which differ in ZeRO stage, bucket sizes, micro-batch and activation checkpointing."""
    small, large, checkpointed = (1, False), (4, False), (4, True)
    combinations = [
        (3, "small", small), (3, "small", checkpointed), (3, "ample", large),
        (2, "small", small), (2, "small", checkpointed), (1, "small", large), (0, "small", small),
    ]  # fmt: skip
    for shape, precision, ranks in itertools.product(SHAPES, ("bf16", "fp32"), (1024, 64, 8, 1, 2, 512)):
        for stage, buckets, (micro, checkpointing) in combinations:
            yield RehearsalCase(stage, precision, ranks, micro, checkpointing, shape, buckets)


def build_spec(case: RehearsalCase) -> RunSpec:
    """Return the RunSpec of a rehearsal case."""
    batch = Batch(micro=case.micro, accumulation=1, global_=case.micro * case.ranks)
    return _build_base(case.stage, case.shape, case.buckets).model_copy(
        update={
            "precision": case.precision,
            "devices_per_node": case.ranks,
            "batch": batch,
            "activation_checkpointing": case.checkpointing,
        }
    )


@functools.cache
def _build_base(stage: int, shape: str, buckets: str) -> RunSpec:
    limits = {name: size for name, size in BUCKETS[buckets].items() if stage == 3 or (stage and "stage3" not in name)}
    options = [f"engine.{name}={size}" for name, size in limits.items()]
    words = ["devices_per_node=2", *SHAPES[shape], f"engine=zero{stage}", *options, *LENGTHS, *SHORT]
    return compose.compose_request(compose.parse_single(words)).spec


def rehearse(
    spec: RunSpec, rank: int, results: Path, *, shapes_only: bool = False, machine: Machine | None = None
) -> RankMemory:
    """Rehearse one rank of `spec` in a forked process: the rank is real, and its peers are simulated. Return the memory
    of this rank. The parent process has done the imports but has created no tensor. With `shapes_only`, operations on
    large tensors are skipped, and only their shapes are tracked, as on a GPU if `machine` has GPUs."""
    machine = machine or compose.compose_request(compose.parse_single(["machine=cpu"])).machine
    circumstance = Circumstance(
        study="rehearsals", repeat=0, attempt=0, machine=machine, rehearsed_rank=rank, shapes_only=shapes_only
    )
    folder = store.open_attempt(results / config_id(spec), spec, circumstance, new_repeat=True).folder
    child = os.fork()
    if child == 0:
        _become_rank(folder, rank)
    os.waitpid(child, 0)
    record = store.read_record(folder / store.RECORD)
    assert record.outcome.kind == "ok" and record.observations, (folder / "run.log").read_text()
    return record.observations.memory[0]


def _become_rank(folder: Path, rank: int) -> None:
    import torch

    from bench.runtime import worker

    log = os.open(folder / "run.log", os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", TOKENIZERS_PARALLELISM="false")
    sys.argv = ["bench.runtime.worker", str(folder)]
    worker.main()  # ends the process


def format_header(what: str) -> list[str]:
    """Return the comment lines at the top of a table: the description `what`, the date, and the versions that produced
    the table."""
    here = Path(__file__).parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=here).stdout
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    made = f"made {datetime.now(UTC):%Y-%m-%d} at {git.strip()} with {versions}"
    return [f"# {what}", f"# Live tensor bytes on a CPU; {made}, by python -m tests.benchmarks.rehearsals."]


def write(path: Path, header: Sequence[str], names: Sequence[str], table: Iterable[Sequence[object]]) -> None:
    """Write a CSV table row by row to a temporary file, and rename the file when the table is complete."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as file:
        file.writelines(f"{line}\n" for line in header)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for number, row in enumerate(table, start=1):
            writer.writerow(row)
            file.flush()
            print(number, *row, flush=True)
    unfinished.replace(path)


SEEN = ("resident_bytes", "init_peak_bytes", "peak_bytes")


def list_seen(memory: RankMemory) -> tuple[int | None, int | None, int | None]:
    """Return a rank's bytes in the order of SEEN: between steps, at the peak of initialisation, and at the peak of the
    steps."""
    return memory.resident_bytes, memory.init_peak_bytes, memory.peak_allocated_bytes


def write_rehearsed(recorded: RecordedRuns, results: Path) -> None:
    """Write the table of rehearsed memory into the folder of tables of `recorded`. A row has the memory of one rank of
    one case (a combination of model shape, ZeRO stage, number of ranks and other settings). The records of the
    rehearsals are written to the folder `results`."""
    explained = [f"# shape {name}: {' '.join(words)}" for name, words in SHAPES.items()]
    explained += [f"# buckets {name}: {values}" for name, values in BUCKETS.items()]
    explained += [f"# all: {' '.join(LENGTHS)} batch.accumulation=1"]
    what = "One rehearsed rank (see `zeroscale rehearse`) of jobs of 1 to 1,024 ranks."
    names, rows = ("spec", "parameters", "rank", *SEEN), (_build_row(case, results) for case in list_cases())
    write(recorded.inputs / "rehearsed.csv", [*format_header(what), *explained], names, rows)


def _build_row(case: RehearsalCase, results: Path) -> list[object]:
    """Return the table row of a case, for the rank with the highest peak.

    At ZeRO stages 1 and 2, the first rank keeps the whole gradient of the embedding, and the last rank keeps the whole
    gradient of the output head. Therefore both ranks are rehearsed, and the larger peak counts.
    """
    spec = build_spec(case)
    ranks = sorted({0, case.ranks - 1} if case.stage in (1, 2) else {0})
    seen = {rank: list_seen(rehearse(spec, rank, results)) for rank in ranks}
    most = max(ranks, key=lambda rank: seen[rank][-1] or 0)
    return [canonical(spec), models.count_expected_parameters(spec.model), most, *seen[most]]


Seen = tuple[int, ...]
COLUMNS = ("spec", "parameters", "repeat", *(f"{kind}_{name}" for kind in ("rehearsed", "real") for name in SEEN))
BESIDE_REAL = "Recorded runs of several ranks, and the same rehearsed: of both the rank that has most."


def list_compared(recorded: RecordedRuns, results: Path) -> Iterator[tuple[object, ...]]:
    """Yield one table row for each recorded run of several ranks: the memory in a rehearsal of this run, and the memory
    in the real run. A spec is rehearsed only once, even if it has several recorded runs."""
    rehearsed: dict[str, Seen] = {}
    for run in recorded.of_several_ranks():
        known = config_id(run.spec)
        if known not in rehearsed:
            rehearsed[known] = find_largest(run.spec, results)
        taken = run.resident, run.init_peak, run.peak
        yield canonical(run.spec), run.parameters, run.repeat, *rehearsed[known], *taken


def find_largest(spec: RunSpec, results: Path) -> Seen:
    """Rehearse ranks of a spec: run each rank alone, without the others. The quantities in SEEN are sizes in bytes.
    Return the largest value of each quantity over all rehearsed ranks, in the order of SEEN. At ZeRO stage 3, only rank
    0 is rehearsed."""
    short = compose.compose_request(compose.parse_single(SHORT)).spec.measure  # memory is the same in every step
    quick = spec.model_copy(update={"measure": short})
    ranks = [0] if spec.engine.options.get("stage") == 3 else range(spec.world_size)
    seen = [list_seen(rehearse(quick, rank, results)) for rank in ranks]
    return tuple(max(bytes_ for bytes_ in column if bytes_ is not None) for column in zip(*seen, strict=True))


def write_beside_real(recorded: RecordedRuns, results: Path) -> None:
    """Write the table that compares recorded runs of several ranks with rehearsals of the same runs."""
    rows = list_compared(recorded, results)
    write(recorded.inputs / "rehearsed_beside_real.csv", format_header(BESIDE_REAL), COLUMNS, rows)


FRONTIER = (
    "model=gpt_175b", "engine=pipeline", "parallel.tensor=4", "parallel.pipeline=16", "nodes=16", "devices_per_node=8",
    "batch.micro=1", "batch.accumulation=20", "sequence.tokens=2048", "activation_checkpointing=true", "precision=bf16",
    "optimizer.implementation=fused", "machine=cpu",
)  # fmt: skip
"""Overrides of the rehearsed job on Frontier. The job in the public log had 640 micro-batches per step, and this job
has 20. Peak memory is the same, because a rank of the 1F1B schedule has at most 16 micro-batches in flight."""
STAGE_COLUMNS = ("spec", "stage", "resident_bytes", "init_peak_bytes", "passes_peak_bytes", "peak_bytes")


def rehearse_stage(spec: RunSpec, stage: int) -> tuple[int | None, ...]:
    """Run the first rank of a pipeline stage with simulated peers (a rehearsal). Return the memory of this rank in
    bytes, in the order of STAGE_COLUMNS: between steps, and the peaks of initialisation, of forward and backward, and
    of a step."""
    rank = stage * spec.world_size // spec.parallel.pipeline
    # Memory counter and process group can be set up only once per process.
    with multiprocessing.get_context("fork").Pool(1) as alone:
        return alone.apply(_run_steps, (spec, rank))


def _run_steps(spec: RunSpec, rank: int) -> tuple[int | None, ...]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench import data, engines
    from bench.core.engine_facts import place as find_place
    from bench.engines.distributed.executor import build_stages
    from bench.engines.pipeline import engine
    from bench.measure import memory
    from bench.measure.shapes import LeftOutOperations

    torch.set_num_threads(1)
    device = torch.device("cpu")
    memory.install_counter(device)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.world_size)
    family, network = models.load_divided_builder(spec.model.family), models.get_network(spec.model)
    cut = engines.facts(spec).cut
    assert cut, "engine pipeline divides its model"
    with LeftOutOperations():
        stages = build_stages(spec, rank, family, engine, network, cut(spec, network))
        family.initialise(stages, spec, engine.whole)
        built = engine.build(stages, spec)
        init_peak = memory.read_peak_bytes(device)
        batches = iter(data.load(spec.data.source).micro_batches(spec, find_place(spec, rank).data))
        for _ in range(2):
            built.train_step(_take(batches, spec))
        resident = memory.read_live_bytes(device)
        memory.reset_peak(device)
        built.run_passes(_take(batches, spec))
        passes_peak = memory.read_peak_bytes(device)
        built.train_step(_take(batches, spec))
    return resident, init_peak, passes_peak, memory.read_peak_bytes(device)


def _take(batches: Iterator[Any], spec: RunSpec) -> Iterator[dict[str, Any]]:
    return (batch.tensors for batch in itertools.islice(batches, spec.accumulation))


def write_frontier(recorded: RecordedRuns, _: Path) -> None:
    """Write the table for a layout whose real run on the supercomputer Frontier has a public log. It has the memory of
    one rehearsed rank per pipeline stage.

    A rank holds 27 GB between steps and 43 GB within a step, and would compute for hours on a CPU. Therefore the
    rehearsal tracks only tensor shapes, and skips the operations on large tensors.

    In the public log, the optimizer skipped the update of every step, because the loss scale was still being searched.
    Therefore the table has an extra column with the peak of forward and backward passes without an update.
    """
    spec = compose.compose_request(compose.parse_single(FRONTIER)).spec
    what = f"One rehearsed rank of each stage, its shapes alone: {' '.join(FRONTIER)}"
    rows = ([canonical(spec), stage, *rehearse_stage(spec, stage)] for stage in range(spec.parallel.pipeline))
    write(recorded.inputs / "rehearsed_frontier.csv", format_header(what), STAGE_COLUMNS, rows)


GPU_SEEN = (*SEEN, "reserved_bytes", "least_reserved_bytes")


def list_seen_on_gpu(memory: RankMemory) -> tuple[int | None, ...]:
    """Return the bytes of a rank that was rehearsed as on a GPU, in the order of GPU_SEEN. They are those of
    `list_seen`, and what the caching allocator reserved and needed at least."""
    return *list_seen(memory), memory.peak_reserved_bytes, memory.least_reserved_bytes


def write_h200(recorded: RecordedRuns, results: Path) -> None:
    """Write the table of the runs that were recorded on H200s, each rehearsed by shapes on a CPU as on a GPU. Runs with
    compiled blocks are left out, because they cannot be rehearsed by shapes."""
    runs = map(store.read_record, store.find_records([recorded.measured / "h200.zip" / "single_gpu"]))
    what = "The runs of results/measured/h200.zip/single_gpu, rehearsed by shapes as on a GPU."
    names = "config_id", "model", "engine", "micro", *GPU_SEEN
    rows = (
        [run.config_id, run.spec.model.name, run.spec.engine.name, run.spec.batch.micro, *list_seen_on_gpu(
            rehearse(run.spec, 0, results, shapes_only=True, machine=run.circumstance.machine)
        )] for run in runs if run.outcome.kind == "ok" and run.spec.model.compile == "none"
    )  # fmt: skip
    write(recorded.inputs / "rehearsed_h200.csv", format_header(what), names, rows)


def write_adapters(recorded: RecordedRuns, results: Path) -> None:
    """Write the table of the published trainings whose memory was counted by torch's allocator. Each is rehearsed by
    shapes on a CPU as on a GPU."""
    counted = [row for row in read_published("adapters").rows if row["quantity"] in ("allocated", "reserved")]
    published = [row for row in counted if not row["not_testable"] and "model.compile" not in row["overrides"]]
    what = "Trainings of results/published/adapters.csv, rehearsed by shapes as on a GPU."
    rows = ([row["overrides"], *_rehearse_published(row["overrides"], results)] for row in published)
    write(recorded.inputs / "rehearsed_adapters.csv", format_header(what), ("overrides", *GPU_SEEN), rows)


def _rehearse_published(overrides: str, results: Path) -> tuple[int | None, ...]:
    request = compose.compose_request(compose.parse_single(shlex.split(overrides)))
    return list_seen_on_gpu(rehearse(request.spec, 0, results, shapes_only=True, machine=request.machine))


TABLES = {
    "rehearsed": write_rehearsed,
    "beside_real": write_beside_real,
    "frontier": write_frontier,
    "h200": write_h200,
    "adapters": write_adapters,
}


def main() -> None:
    from bench.runtime import fork_server

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    write_table = TABLES[parser.parse_args().table]
    recorded = find_recorded_runs()
    if write_table is not write_frontier:
        fork_server.preload("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_table(recorded, Path(folder))


if __name__ == "__main__":
    main()
