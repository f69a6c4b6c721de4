"""Synthetic runs on several nodes, with given step times."""

import random
from collections.abc import Iterable
from typing import Any

from records import MIB, failed, memory, run, scattered, spec, steps

from bench.core.record import OutcomeKind, RunRecord
from bench.core.spec import RunSpec


def asked(nodes: int, *, micro: int = 2, samples: int | None = None, **more: Any) -> RunSpec:
    """Return the spec of a run on `nodes` nodes with two ranks each.

    A step has `samples` samples, or one micro-batch per rank if `samples` is None.
    """
    batch = {"micro": micro} if samples is None else {"micro": micro, "global": samples}
    return spec(**{"engine": "zero2", "nodes": nodes, "batch": batch, **more})


def measured(of: RunSpec, seconds: float | Iterable[float], *, peak: int = 10 * MIB, **more: Any) -> list[RunRecord]:
    """Return one run for each value of `seconds`, each in its own allocation, with step times within 0.1 % of the
    value.

    A single number gives three runs, whose step times differ by 0.1 % from one run to the next.
    """
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
    """Return the step times of `count` allocations. The step times are log-normally distributed around `seconds`, with
    the relative standard deviation `spread`."""
    rng = random.Random(seed)
    return [seconds * rng.lognormvariate(0, spread) for _ in range(count)]
