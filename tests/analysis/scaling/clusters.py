"""Synthetic results of runs on several nodes with given step times."""

import random
from collections.abc import Iterable
from typing import Any

from records import MIB, failed, memory, run, scattered, spec, steps

from bench.core.record import OutcomeKind, RunRecord
from bench.core.spec import RunSpec


def asked(nodes: int, *, micro: int = 2, samples: int | None = None, **more: Any) -> RunSpec:
    """Return a point on this many nodes of two ranks, with `samples` per step or one micro-step."""
    batch = {"micro": micro} if samples is None else {"micro": micro, "global": samples}
    return spec(**{"engine": "zero2", "nodes": nodes, "batch": batch, **more})


def measured(of: RunSpec, seconds: float | Iterable[float], *, peak: int = 10 * MIB, **more: Any) -> list[RunRecord]:
    """Return one allocation for each of `seconds`, with step times within 0.1 %. A single number gives three
    allocations with that spread."""
    times = [seconds * by for by in (0.999, 1.0, 1.001)] if isinstance(seconds, int | float) else list(seconds)
    return [
        run(
            of,
            repeat=repeat,
            steps=steps(scattered(0.999 * time, time, 1.001 * time)),
            memory=memory(of.world_size, peak),
            **more,
        )
        for repeat, time in enumerate(times)
    ]


def out_of_memory(of: RunSpec, kind: OutcomeKind = "oom", **more: Any) -> list[RunRecord]:
    return [failed(kind, of, **more)]


def repeats(seconds: float, spread: float, seed: int, count: int = 3) -> list[float]:
    """Return log-normal step times of several allocations."""
    rng = random.Random(seed)
    return [seconds * rng.lognormvariate(0, spread) for _ in range(count)]
