"""Overhead of the project's own code for tensor and pipeline parallelism, in three benchmarks.

  python -m tests.benchmarks.layouts [--rounds 40]

Slices: one of two tensor-parallel ranks runs a forward and a backward pass of eight small T5 blocks, with fake
collectives. The matrices of the blocks are sliced by the project's code, or are DTensors. The result is the processor
time divided by the processor time of the same blocks with whole matrices.

Schedules: two gloo ranks run the same pipeline stages with the project's executor and with
torch.distributed.pipelining. The result is the executor's step time divided by torch's step time.

For slices and schedules, each round runs all variants in random order and gives one ratio per variant. The median of
each variant's ratios is printed, with its 95 % rank-based interval.

Peak: the peak bytes of rank 0's tensors are measured in a pipeline step, with many and with few micro-batches. The
result is the peak with many micro-batches divided by the peak with few.
"""

import argparse
import gc
import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import models
from bench.core.network import Part
from bench.core.spec import RunSpec
from bench.core.statistics import median_interval
from bench.engines.distributed.executor import Neighbours, ScheduleExecutor
from bench.engines.distributed.schedule import PipelineSize, ScheduleName, build_schedule
from bench.engines.distributed.slices import TensorRanks
from bench.measure import memory

SHAPE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "encoder_layers": 4, "decoder_layers": 4, "heads": 4, "vocab": 256,
         "gated": True, "activation": "gelu_new", "separate_head": True}  # fmt: skip
UNITS, MICRO, ENCODER, DECODER = 10, 2, 32, 16
STATES = (MICRO, ENCODER, 64), (MICRO, DECODER, 64)
SCHEDULES: dict[str, tuple[ScheduleName, int]] = {"1f1b": ("1f1b", 1), "interleaved": ("interleaved", 2)}
FEW, MANY = 4, 64
CPU = torch.device("cpu")
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns that it will rename collectives
    with tempfile.TemporaryDirectory() as folder:
        for name in SCHEDULES:
            found = run_ranks(Path(folder), name, rounds)
            for label, ratios in found["seconds"].items():
                print_ratios(f"{label} / torch's schedule, {name}", ratios)
            if name == "1f1b" and (peaks := found["peaks"]):
                print(f"peak, {FEW} to {MANY} micro-batches of {name}: {peaks[1] / peaks[0]:.3f}", flush=True)
    for label, ratios in time_slices(rounds).items():
        print_ratios(f"{label} / whole matrices", ratios)


def print_ratios(label: str, ratios: list[float]) -> None:
    interval = median_interval(ratios)
    low, high = interval if interval else (min(ratios), max(ratios))
    print(f"{label}: {sorted(ratios)[len(ratios) // 2]:.2f} ({low:.2f}–{high:.2f})", flush=True)


def take_turns(
    calls: dict[str, Callable[[], object]], clock: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each call by label, one value per round after the warm-up rounds. The order of the calls
    within a round is random, but the same on every rank."""
    dice, seconds = random.Random(1), {label: list[float]() for label in calls}
    for number in range(WARM_UP + rounds):
        for label in dice.sample(list(calls), len(calls)):
            if dist.get_world_size() == 2 and dist.get_backend() == "gloo":
                dist.barrier()
            begin = clock()
            calls[label]()
            if number >= WARM_UP:
                seconds[label].append(clock() - begin)
    return seconds


def divide(seconds: dict[str, list[float]], by: str) -> dict[str, list[float]]:
    pairs = {label: zip(of, seconds[by], strict=True) for label, of in seconds.items() if label != by}
    return {label: [mine / other for mine, other in both] for label, both in pairs.items()}


def build(part: Part, among: TensorRanks | None = None) -> Any:
    """Return the layers `part` of a T5 with random weights. If the tensor-parallel ranks `among` are given, the
    matrices are sliced among these ranks. Then the returned layers contain only the slices of one rank."""
    job, family = spec(), models.load_divided_builder("t5")
    module = family.build_part(job, part, torch.device("cpu"), **({} if among is None else {"among": among}))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def spec() -> RunSpec:
    return RunSpec.model_validate({
        "model": {"name": "small", "shape": SHAPE}, "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "none", "source": "none"}, "batch": {"micro": MICRO}, "devices_per_node": 1,
        "sequence": {"encoder": ENCODER, "decoder": DECODER},
    })  # fmt: skip


def draw_batch() -> dict[str, Tensor]:
    tokens = [torch.randint(2, SHAPE["vocab"], (MICRO, length)) for length in (ENCODER, DECODER)]  # type: ignore[call-overload]
    return dict(zip(("input_ids", "labels"), tokens, strict=True))


def time_slices(rounds: int) -> dict[str, list[float]]:
    """Measure forward and backward passes of T5 blocks on one of two tensor-parallel ranks. The matrices of the blocks
    are sliced. Return ratios: the processor time of these blocks divided by the processor time of the same blocks with
    whole matrices. The keys are ways of slicing, and each list has one ratio per round."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    whole, batch, group = Part(0, UNITS, UNITS), draw_batch(), dist.group.WORLD
    assert group is not None
    built = {"whole": build(whole), "slices": build(whole, TensorRanks(group, 2, 0, sequence=False)),
             "slices, by tokens": build(whole, TensorRanks(group, 2, 0, sequence=True)),
             "DTensor": divide_by_dtensor(build(whole))}  # fmt: skip

    def run(module: Any) -> None:
        module(**batch).backward()
        module.zero_grad()

    calls = {label: lambda module=module: run(module) for label, module in built.items()}  # type: ignore[misc]
    return divide(take_turns(calls, time.process_time, rounds), "whole")


def divide_by_dtensor(module: Any) -> Any:
    """Return a T5 in which the matrices of all blocks are DTensors. The T5 is converted layer by layer, as in torch's
    guides."""
    plan: dict[str, ParallelStyle] = {}
    for name, owner in module.named_modules():
        kind = name.rpartition(".")[2]
        if kind in ("q", "k", "v", "wi_0", "wi_1", "relative_attention_bias"):
            plan[name] = ColwiseParallel()
        elif kind in ("o", "wo"):
            plan[name] = RowwiseParallel()
        elif hasattr(owner, "inner_dim"):
            owner.n_heads, owner.inner_dim = owner.n_heads // 2, owner.inner_dim // 2
    return parallelize_module(module, init_device_mesh("cpu", (2,)), plan)


def run_ranks(folder: Path, name: str, rounds: int) -> dict[str, Any]:
    """Run two ranks with the schedule `name`, and return the results of rank 0: `seconds` and `peaks`.

    `seconds` has the step times of our executor divided by those of torch's schedule. `peaks` has two peaks of our
    executor in bytes: with few and with many micro-batches. `peaks` is empty for schedules other than `1f1b`, and if
    the memory counter is not available.
    """
    torch.multiprocessing.start_processes(be_rank, (folder, name, rounds), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def be_rank(rank: int, folder: Path, name: str, rounds: int) -> None:
    memory.install_counter(CPU)
    dist.init_process_group("gloo", f"file://{folder}/{name}", rank=rank, world_size=2)
    found = {"seconds": time_schedules(name, rank, rounds), "peaks": measure_peaks(rank) if name == "1f1b" else []}
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def build_stages(size: PipelineSize, rank: int) -> dict[int, Any]:
    edges = [round(UNITS * stage / size.stages) for stage in range(size.stages + 1)]
    return {stage: build(Part(edges[stage], edges[stage + 1], UNITS)) for stage in size.stages_of(rank)}


def build_executor(schedule: ScheduleName, mine: dict[int, Any], size: PipelineSize, rank: int) -> ScheduleExecutor:
    neighbours = Neighbours(size.rank_of, STATES, torch.empty(1), limit=4)
    return ScheduleExecutor(mine, build_schedule(schedule, size)[rank], size, neighbours, {})


def measure_peaks(rank: int) -> list[int]:
    """Return the peak bytes of tensors in a 1F1B step on this rank: with few (FEW) and with many (MANY) micro-batches.
    The tensors of the micro-batches' tokens are not counted.

    Return an empty list if the memory counter is not available.
    """
    peaks = []
    for micro_batches in (FEW, MANY):
        size = PipelineSize(2, 1, micro_batches)
        mine, batches = build_stages(size, rank), [draw_batch()] * micro_batches
        executor = build_executor("1f1b", mine, size, rank)
        executor.run(batches)  # allocates the gradients
        gc.collect()
        memory.reset_peak(CPU)
        executor.run(batches)
        peaks.append(memory.read_peak_bytes(CPU))
        del executor, mine, batches
    return [peak for peak in peaks if peak]


def time_schedules(name: str, rank: int, rounds: int) -> dict[str, list[float]]:
    schedule, stages = SCHEDULES[name]
    size = PipelineSize(2, stages, 8)
    mine, batches = build_stages(size, rank), [draw_batch() for _ in range(size.micro_batches)]
    ours, theirs = build_executor(schedule, mine, size, rank), build_torch_schedule(name, mine, size, STATES)
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    def run_theirs() -> None:
        theirs.step(target=whole["labels"], losses=[], return_outputs=False, **whole)

    calls: dict[str, Callable[[], object]] = {"executor": lambda: ours.run(batches), "torch": run_theirs}
    return divide(take_turns(calls, time.perf_counter, rounds), "torch")


def build_torch_schedule(name: str, mine: dict[int, Any], size: PipelineSize, shapes: Any) -> Any:
    states = tuple(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)
    loss = torch.empty((), device="meta", requires_grad=True)
    device = torch.device("cpu")
    stages = [
        PipelineStage(
            module, stage, size.stages, device,
            input_args=states if stage else (), output_args=states if stage < size.stages - 1 else (loss,),
        )
        for stage, module in mine.items()
    ]  # fmt: skip

    def take_loss(made: Tensor, target: Tensor) -> Tensor:
        return made

    if name == "1f1b":
        return Schedule1F1B(stages[0], size.micro_batches, loss_fn=take_loss)
    return ScheduleInterleaved1F1B(stages, size.micro_batches, loss_fn=take_loss)


if __name__ == "__main__":
    main()
