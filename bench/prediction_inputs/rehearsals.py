"""Rehearse one real rank of jobs of 1 to 1,024 ranks, and write down the memory that it took.

  python -m bench.prediction_inputs.rehearsals [FOLDER]  # about ten minutes; writes rehearsed.csv

Every rehearsal is DeepSpeed itself in a process of its own, forked from one that has done the imports. No prediction
takes part.
"""

import argparse
import csv
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bench import models, store
from bench.config import compose
from bench.errors import UserError
from bench.prediction_inputs.memory_runs import RecordedRuns
from bench.record import Circumstance, RankMemory
from bench.spec import Batch, RunSpec, canonical, config_id

SHAPES = {
    "tiny": ("model=tiny",),
    "first_t5": (  # tied, not gated, and mostly vocabulary
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
    """What is rehearsed."""

    stage: int
    precision: str
    ranks: int
    micro: int
    checkpointing: bool
    shape: str
    buckets: str


def list_cases() -> Iterator[RehearsalCase]:
    """Every stage and world size."""
    small, large, checkpointed = (1, False), (4, False), (4, True)
    combinations = [
        (3, "small", small), (3, "small", checkpointed), (3, "ample", large),
        (2, "small", small), (2, "small", checkpointed), (1, "small", large), (0, "small", small),
    ]  # fmt: skip
    for shape, precision, ranks in itertools.product(SHAPES, ("bf16", "fp32"), (1024, 64, 8, 1, 2, 512)):
        for stage, buckets, (micro, checkpointing) in combinations:
            yield RehearsalCase(stage, precision, ranks, micro, checkpointing, shape, buckets)


def build_spec(case: RehearsalCase) -> RunSpec:
    """Return what a case asks."""
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


def rehearse(spec: RunSpec, rank: int, results: Path, *, shapes_only: bool = False) -> RankMemory:
    """Run `rank` of `spec` in a forked process; the parent has imported what it needs and touched no tensor."""
    machine = compose.compose_request(compose.parse_single(["machine=cpu"])).machine
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


def format_header(what: str, made_by: str) -> list[str]:
    """Return the comments in front of a table: what it is, and with what it was made."""
    here = Path(__file__).parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=here).stdout
    from importlib.metadata import version

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    made = f"made {datetime.now(UTC):%Y-%m-%d} at {git.strip()} with {versions}"
    return [f"# {what}", f"# Live tensor bytes on a CPU; {made}, by python -m {made_by}."]


def write(path: Path, header: Sequence[str], names: Sequence[str], table: Iterable[Sequence[object]]) -> None:
    """Write a table as it grows; the file appears when it is whole."""
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
    """Return the bytes of one rank, in the order of SEEN."""
    return memory.resident_bytes, memory.init_peak_bytes, memory.peak_allocated_bytes


def _rehearse_all(table: Path, results: Path) -> None:
    explained = [f"# shape {name}: {' '.join(words)}" for name, words in SHAPES.items()]
    explained += [f"# buckets {name}: {values}" for name, values in BUCKETS.items()]
    explained += [f"# all: {' '.join(LENGTHS)} batch.accumulation=1"]
    what = "One rehearsed rank (see `zeroscale rehearse`) of jobs of 1 to 1,024 ranks."
    explanation = [*format_header(what, "bench.prediction_inputs.rehearsals"), *explained]
    write(
        table, explanation, ("spec", "parameters", "rank", *SEEN), (_build_row(case, results) for case in list_cases())
    )


def _build_row(case: RehearsalCase, results: Path) -> list[object]:
    """The row of a case. At stages 1 and 2 the first rank keeps the embedding's gradient whole, the last the head's."""
    spec = build_spec(case)
    ranks = sorted({0, case.ranks - 1} if case.stage in (1, 2) else {0})
    seen = {rank: list_seen(rehearse(spec, rank, results)) for rank in ranks}
    most = max(ranks, key=lambda rank: seen[rank][-1] or 0)
    return [canonical(spec), models.count_expected_parameters(spec.model), most, *seen[most]]


def parse_folder(doc: str | None) -> RecordedRuns:
    """Return the recorded runs in the folder that is given on the command line; end in a line where it holds none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=Path("results"), metavar="FOLDER")
    recorded = RecordedRuns(parser.parse_args().results)
    try:
        recorded.require()
    except UserError as error:
        raise SystemExit(str(error)) from error
    return recorded


def main() -> None:
    from bench.runtime import fork_server

    table = parse_folder(__doc__).inputs / "rehearsed.csv"
    fork_server.preload("cpu")
    with tempfile.TemporaryDirectory() as folder:
        _rehearse_all(table, Path(folder))


if __name__ == "__main__":
    main()
