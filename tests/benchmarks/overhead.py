"""What the harness costs: its step against the same step in a bare DeepSpeed loop, as ratios of one benchmark run.

  python -m tests.benchmarks.overhead [--ranks 1 2] [--launches 10] [--rounds 8]

Three groups of processes stand ready with the same model: a bare loop that imports nothing of the harness's measuring,
the harness, and the bare loop once more, which shows how far two equal programs are apart here. In every round each
runs one block of steps while the others sleep, in random order, so that a drift of the machine meets all three alike.
Where a process's memory happens to lie makes it faster or slower for all its life; so the groups are launched anew
several times. A launch gives the median of its rounds' ratios; shown is the median of the launches with its 95 %
rank-based interval.
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

from bench.measure.window import median_interval

STEPS = 10
WARM_UP_BLOCKS = 3
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
    parser.add_argument("--launches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)  # variant, rank, ranks, port
    args = parser.parse_args()
    if args.as_rank:
        variant, rank, ranks, port = args.as_rank
        be_rank(variant, int(rank), int(ranks), int(port))
        return
    for ranks in args.ranks:
        launches = [launch(ranks, args.rounds, number) for number in range(args.launches)]
        bare = statistics.median(second for seconds in launches for second in seconds["bare"])
        print(f"zero2, tiny, {ranks} process(es); {args.launches} launches of {args.rounds} rounds of {STEPS} steps")
        print(f"  bare loop          {1e3 * bare:.2f} ms per step")
        for variant in VARIANTS[1:]:
            ratios = [ratio(seconds[variant], seconds["bare"]) for seconds in launches]
            interval = median_interval(ratios)
            doubt = f"95 % {interval[0]:.4f}–{interval[1]:.4f}" if interval else "too few launches for an interval"
            print(f"  {variant:<10} ÷ bare  {statistics.median(ratios):.4f}  ({doubt})", flush=True)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def launch(ranks: int, rounds: int, number: int) -> dict[str, list[float]]:
    """Return seconds per step by variant and round of one launch."""
    groups = {variant: Group(variant, ranks) for variant in VARIANTS}
    generator = random.Random(number)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    try:
        for passed in range(-WARM_UP_BLOCKS, rounds):
            for variant in generator.sample(VARIANTS, len(VARIANTS)):
                block = groups[variant].block()
                if passed >= 0:
                    seconds[variant].append(block)
    finally:
        for group in groups.values():
            group.end()
    return seconds


class Group:
    """The processes of one variant; they sleep until asked for a block."""

    def __init__(self, variant: str, ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.benchmarks.overhead",
                    "--as-rank",
                    variant,
                    str(rank),
                    str(ranks),
                    str(port),
                ],
                env=environment | {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]

    def block(self) -> float:
        """Run one block; return rank 0's mean seconds per step."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write("go\n")
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


def be_rank(variant: str, rank: int, ranks: int, port: int) -> None:
    """Build the model, then run a block of steps for every line on standard input."""
    import torch
    import torch.distributed as dist

    from bench import config, data, engines, models

    spec = config.request(config.single([*POINT, f"devices_per_node={ranks}"])).spec
    if variant == "harness":
        from bench.measure import memory

        memory.count_on(torch.device("cpu"))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    backend, family = engines.load(spec.engine.backend), models.load(spec.model.family)
    module = family.build(spec, backend.construction(spec))
    family.initialise(module, spec, backend.whole)
    engine = backend.build(module, spec)
    ready = list(itertools.islice(data.load(spec.data.source).micro_batches(spec, rank), 8))
    block = harness_block(spec, engine, ready) if variant == "harness" else bare_block(engine, ready)
    for _ in sys.stdin:
        print(json.dumps({"seconds": block()}), flush=True)


def bare_block(engine: object, ready: list) -> Callable[[], float]:
    """DeepSpeed's documented loop over batches that are ready, and nothing else."""
    import torch.distributed as dist

    deepspeed_engine = engine._engine  # type: ignore[attr-defined]
    batches = itertools.cycle([batch.tensors for batch in ready])

    def block() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = deepspeed_engine(**next(batches)).loss
            deepspeed_engine.backward(loss)
            deepspeed_engine.step()
        return (time.perf_counter() - begin) / STEPS

    return block


def harness_block(spec: object, engine: object, ready: list) -> Callable[[], float]:
    """The harness's own block, with its clock, its pulse and its memory counter."""
    import torch

    from bench.measure.channel import Channel, Pulse
    from bench.measure.clock import HostClock
    from bench.measure.loop import Series, Trainer

    channel = Channel(None, Pulse.create(1), 0)
    trainer = Trainer(
        spec, engine, itertools.cycle(ready), HostClock(), torch.device("cpu"), lambda step: channel.beat("steps", step)
    )

    def block() -> float:
        series = Series()
        trainer.block(STEPS, series)
        return float(series.column("step_s")[:, torch.distributed.get_rank()].mean())

    return block


if __name__ == "__main__":
    main()
