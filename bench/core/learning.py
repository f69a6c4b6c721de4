"""The course of a training that has an end: its optimizer steps, the learning rate of each, what happens between them.

Steps are numbered from 0; after n steps the next is number n.
"""

import math
from collections.abc import Iterator

from bench.core.spec import RunSpec


def count_steps(spec: RunSpec) -> int:
    """Return the optimizer steps of the whole training."""
    assert spec.learning.tokens is not None
    return spec.count_steps(spec.learning.tokens)


def find_last_step(spec: RunSpec) -> int:
    """Return the optimizer steps behind which a run of the training ends: all of them, or where it is to stop."""
    assert spec.learning.end_tokens is not None
    return spec.count_steps(spec.learning.end_tokens)


def compute_learning_rate(spec: RunSpec, step: int) -> float:
    """Return the learning rate of one step; behind the last one it stays what it came to."""
    learning, peak = spec.learning, spec.optimizer.lr
    warmup, steps = spec.count_steps(learning.warmup_tokens), count_steps(spec)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / (steps - warmup), 1.0) if steps > warmup else 1.0
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[learning.schedule]
    return peak * (learning.final_lr + (1 - learning.final_lr) * left)


def list_evaluations(spec: RunSpec) -> Iterator[int]:
    """Yield after how many steps the held-out loss is taken: before the first, every so often, after the last."""
    every, last = spec.learning.evaluate_every, find_last_step(spec)
    yield from range(0, last, spec.count_steps(every) if every else last)
    yield last


def list_checkpoints(spec: RunSpec) -> Iterator[int]:
    """Yield after how many steps a checkpoint is written. Behind the last of the training there is nothing to go on
    with."""
    last = find_last_step(spec)
    if every := spec.learning.checkpoint_every:
        each = spec.count_steps(every)
        yield from range(each, last, each)
    if last < count_steps(spec):
        yield last
