"""Overhead of the harness: its step time divided by that of a bare DeepSpeed loop, within one benchmark run.

  python -m tests.benchmarks.overhead [--ranks 1 2] [--launches 3] [--rounds 30]
  python -m tests.benchmarks.overhead --device cuda --ranks 1 --point model=mt5_base batch.micro=8 precision=bf16

The same processes with one model run blocks of steps in three variants. The first is a bare loop. The second is the
harness with its clock, heartbeat, gathering of step times from all ranks, and memory counter. The third is the bare
loop again, which shows the difference between two equal loops. Each round runs the variants in random order, so that
drift of the machine affects all of them. All variants run in the same processes, because the memory layout of a process
makes it some per cent faster or slower for its lifetime. Several launches average over memory layouts. The benchmark
prints the median of the ratios within a round, with its 95 % rank-based interval.
"""

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from bench.core.statistics import median_interval

STEPS = 10
WARM_UP_ROUNDS = 2
POINT = (
    "model=tiny",
    "engine=zero2",
    "precision=fp32",
    "data=synthetic",
    "sequence.encoder=128",
    "sequence.decoder=32",
)
VARIANTS = ("bare", "harness", "bare again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--point", nargs="+", default=[], metavar="KEY=VALUE", help="of the model, the batch, …")
    parser.add_argument("--as-rank", nargs=3, type=int, help=argparse.SUPPRESS)  # rank, ranks, port
    args = parser.parse_args()
    point = [*POINT, *args.point]
    if args.as_rank:
        be_rank(*args.as_rank, args.device, point)
        return
    words = ["--device", args.device, *(("--point", *args.point) if args.point else ())]
    for ranks in args.ranks:
        rounds = [block for number in range(args.launches) for block in launch(ranks, args.rounds, number, words)]
        bare = statistics.median(seconds["bare"] for seconds in rounds)
        print(f"{' '.join(point)}, {args.device}, {ranks} process(es)")
        print(f"  {args.launches} launches of {args.rounds} rounds of {STEPS} steps")
        print(f"  bare loop          {1e3 * bare:.2f} ms per step")
        for variant in VARIANTS[1:]:
            ratios = [seconds[variant] / seconds["bare"] for seconds in rounds]
            low, high = median_interval(ratios) or (float("nan"), float("nan"))
            print(f"  {variant:<10} ÷ bare  {statistics.median(ratios):.4f}  (95 % {low:.4f}–{high:.4f})", flush=True)


def launch(ranks: int, rounds: int, number: int, words: list[str]) -> list[dict[str, float]]:
    """Start the ranks once, and run `rounds` rounds after the warm-up rounds. Return one dict per round with the
    seconds per step of each variant. `number` is the seed of the variants' random order, and `words` are the device and
    the overrides of the run."""
    group, generator = Group(ranks, words), random.Random(number)
    try:
        seconds = [
            {variant: group.block(variant) for variant in generator.sample(VARIANTS, len(VARIANTS))}
            for _ in range(WARM_UP_ROUNDS + rounds)
        ]
    finally:
        group.end()
    return seconds[WARM_UP_ROUNDS:]


class Group:
    """Rank processes of one launch. They wait for the name of a variant, then run one block of steps with it."""

    def __init__(self, ranks: int, words: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
            "DS_ACCELERATOR": words[1],
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "tests.benchmarks.overhead"]
        self.processes = [
            subprocess.Popen(
                [*command, "--as-rank", str(rank), str(ranks), str(port), *words],
                env=environment | {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]

    def block(self, variant: str) -> float:
        """Run one block of steps on all ranks. `variant` selects the loop around the steps, such as `bare` or `harness`
        (see VARIANTS). Return rank 0's mean seconds per step."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(f"{variant}\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                raise RuntimeError("a process of the benchmark died; run it with --as-rank to see why")
            answers.append(json.loads(line)["seconds"])
        return float(answers[0])

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def be_rank(rank: int, ranks: int, port: int, device_kind: str, point: list[str]) -> None:
    """Build the model of one rank, for a run with the overrides `point`, such as `model=tiny`. Then read lines from
    standard input. Each line names one variant of the loop (see VARIANTS). For each line, run a block of steps, and
    print its mean seconds per step."""
    import torch
    import torch.distributed as dist

    from bench import data, engines, models
    from bench.config import compose
    from bench.measure import memory

    device = torch.device(device_kind, *((rank,) if device_kind == "cuda" else ()))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory.install_counter(device)
    spec = compose.compose_request(compose.parse_single([*point, f"devices_per_node={ranks}"])).spec
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    module = family.build(spec, backend.construction(spec))
    family.initialise(module, spec, backend.whole)
    engine = backend.build(module, spec)
    ready = list(itertools.islice(data.load(spec.data.source).micro_batches(spec, rank), 8))
    blocks = {"bare": bare_block(engine, ready, device), "harness": harness_block(spec, engine, ready, device)}
    for line in sys.stdin:
        variant = line.split()[0]
        if counter := device.type == "cpu" and memory._load_cpu_allocator():
            counter.zeroscale_count(variant != "bare")
        print(json.dumps({"seconds": blocks[variant]()}), flush=True)


def bare_block(engine: object, ready: list, device: object) -> Callable[[], float]:
    """Return a function that runs STEPS steps on the batches in `ready`, and returns the mean seconds of a step. It
    uses the loop of DeepSpeed's documentation, without the harness."""
    import torch.distributed as dist

    from bench.measure.collectives import wait_for

    deepspeed_engine = engine._engine  # type: ignore[attr-defined]
    batches = itertools.cycle([batch.tensors for batch in ready])

    def block() -> float:
        dist.barrier()
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(STEPS):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
            loss = deepspeed_engine(**batch).loss
            deepspeed_engine.backward(loss)
            deepspeed_engine.step()
        wait_for(device)
        return (time.perf_counter() - begin) / STEPS

    return block


def harness_block(spec: object, engine: object, ready: list, device: object) -> Callable[[], float]:
    """Return a function that runs a block of steps in the harness, with its clock, heartbeat and memory counter, over
    the prepared batches in `ready`."""
    import torch

    from bench.measure.channel import Channel, SharedHeartbeat
    from bench.measure.clock import create_clock
    from bench.measure.loop import Series, Trainer
    from bench.measure.peers import ProcessGroupPeers

    channel = Channel(None, SharedHeartbeat.create(1), 0)
    trainer = Trainer(
        spec, engine, itertools.cycle(ready), create_clock(device), device, channel.beat, ProcessGroupPeers()
    )

    def block() -> float:
        series = Series(("encoder", "decoder"))
        trainer.block(STEPS, series)
        trainer.finish(series)
        return float(series.column("step_s")[:, torch.distributed.get_rank()].mean())

    return block


if __name__ == "__main__":
    main()
