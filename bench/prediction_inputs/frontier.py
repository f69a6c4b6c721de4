"""Rehearse one rank of each stage of GPT of 175 billion parameters, laid out as a run on Frontier whose log is public.

  python -m bench.prediction_inputs.frontier [FOLDER]  # six minutes; writes rehearsed_frontier.csv

A rank holds 27 GB between two steps and 43 in one, and computes for hours on a CPU: its shapes alone are rehearsed. In
that log no step made its update, since the loss scale was still being found: the passes have a column of their own.
"""

import itertools
import multiprocessing
from collections.abc import Iterator

import torch
import torch.distributed as dist

from bench import data, engines, layout, models
from bench.config import compose
from bench.distributed.stages import build_stages
from bench.engines.pipeline import engine
from bench.measure import memory
from bench.measure.shapes import LeftOutOperations
from bench.prediction_inputs.rehearsals import format_header, parse_folder, write
from bench.spec import RunSpec, canonical

WORDS = (
    "model=gpt_175b", "engine=pipeline", "parallel.tensor=4", "parallel.pipeline=16", "nodes=16", "devices_per_node=8",
    "batch.micro=1", "batch.accumulation=20", "sequence.tokens=2048", "activation_checkpointing=true", "precision=bf16",
    "optimizer.implementation=fused", "machine=cpu",
)  # fmt: skip
"""Of the log's 640 micro-batches 20 are as full: a rank of 1F1B has at most 16 of them under way."""
NAMES = ("spec", "stage", "resident_bytes", "init_peak_bytes", "passes_peak_bytes", "peak_bytes")


def rehearse_stage(spec: RunSpec, stage: int) -> tuple[int | None, ...]:
    """Return the bytes of the first rank that has a stage, in the order of NAMES behind the stage."""
    rank = stage * spec.world_size // spec.parallel.pipeline
    with multiprocessing.get_context("fork").Pool(1) as alone:  # the counter begins with a process, and so does a group
        return alone.apply(_run_steps, (spec, rank))


def _run_steps(spec: RunSpec, rank: int) -> tuple[int | None, ...]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

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
        batches = iter(data.load(spec.data.source).micro_batches(spec, layout.place(spec, rank).data))
        for _ in range(2):
            built.train_step(_take(batches, spec))
        resident = memory.read_live_bytes(device)
        memory.reset_peak(device)
        built.run_passes(_take(batches, spec))
        passes_peak = memory.read_peak_bytes(device)
        built.train_step(_take(batches, spec))
    return resident, init_peak, passes_peak, memory.read_peak_bytes(device)


def _take(batches: Iterator[data.MicroBatch], spec: RunSpec) -> Iterator[dict[str, torch.Tensor]]:
    return (batch.tensors for batch in itertools.islice(batches, spec.accumulation))


def main() -> None:
    table = parse_folder(__doc__).inputs / "rehearsed_frontier.csv"
    spec = compose.compose_request(compose.parse_single(WORDS)).spec
    what = f"One rehearsed rank of each stage, its shapes alone: {' '.join(WORDS)}"
    rows = ([canonical(spec), stage, *rehearse_stage(spec, stage)] for stage in range(spec.parallel.pipeline))
    write(table, format_header(what, "bench.prediction_inputs.frontier"), NAMES, rows)


if __name__ == "__main__":
    main()
