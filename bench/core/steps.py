"""Optimizer steps of a run: the schedule of a training, and the time of each step of several ranks.

Steps are numbered from 0, so after n steps the next is number n.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from bench.core.spec import MeasureSpec, RunSpec

# ---------------------------------------- the schedule of a training


def count_steps(spec: RunSpec) -> int:
    """Return the optimizer steps of the whole training."""
    assert spec.learning.tokens is not None
    return spec.count_steps(spec.learning.tokens)


def find_last_step(spec: RunSpec) -> int:
    """Return the number of optimizer steps after which a run ends: all of the training, or up to `stop_after`."""
    assert spec.learning.end_tokens is not None
    return spec.count_steps(spec.learning.end_tokens)


def compute_learning_rate(spec: RunSpec, step: int) -> float:
    """Return the learning rate of a step. After the last step it keeps its final value."""
    learning, peak = spec.learning, spec.optimizer.lr
    warmup, steps = spec.count_steps(learning.warmup_tokens), count_steps(spec)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / (steps - warmup), 1.0) if steps > warmup else 1.0
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[learning.schedule]
    return peak * (learning.final_lr + (1 - learning.final_lr) * left)


def list_evaluations(spec: RunSpec) -> Iterator[int]:
    """Yield the numbers of steps after which the held-out loss is computed: 0, every `evaluate_every`, and the last."""
    every, last = spec.learning.evaluate_every, find_last_step(spec)
    yield from range(0, last, spec.count_steps(every) if every else last)
    yield last


def list_checkpoints(spec: RunSpec) -> Iterator[int]:
    """Yield the numbers of steps after which a checkpoint is saved. No run resumes from the end of the training, so
    that there is none."""
    last = find_last_step(spec)
    if every := spec.learning.checkpoint_every:
        each = spec.count_steps(every)
        yield from range(each, last, each)
    if last < count_steps(spec):
        yield last


# ---------------------------------------- the time of a step


class StepTimes:
    """Seconds of each step, computed block by block from every rank's own seconds.

    A step lasts from the slowest rank's completion of the previous step to that of this step. The maximum of the ranks'
    own times would be wrong: a delay that a rank makes up for in the next step would count twice, so that steps
    would add up to more than the window, and more so with more ranks.
    """

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._own_s = np.zeros(0)  # (ranks,): seconds of each rank since all ranks last began together
        self._completed_s = 0.0  # the maximum of these

    def append(self, own_s: ArrayLike, *, together: bool) -> None:
        """Add a block of steps: every rank's own seconds, shape (steps, ranks).

        With `together` all ranks began the block at once, else each rank as soon as it had completed the last block.
        """
        own = np.asarray(own_s, float)
        if len(own) == 0:
            return
        if own.shape[1] == 1:  # exactly as measured: sums and their differences would round
            self.step_s += own[:, 0].tolist()
            return
        if together:
            self._own_s, self._completed_s = np.zeros(own.shape[1]), 0.0
        ends = self._own_s + own.cumsum(axis=0)  # (steps, ranks)
        completed = ends.max(axis=1)
        self.step_s += np.diff(completed, prepend=self._completed_s).tolist()
        self._own_s, self._completed_s = ends[-1], float(completed[-1])


def compute_step_s(own_s: ArrayLike, blocks: Iterable[int]) -> list[float]:
    """Return the seconds of each step from every rank's own seconds, shape (steps, ranks).

    `blocks` are the numbers of steps between two barriers, in order. All ranks begin a block together, and its steps
    add up to the time that the slowest rank needs for all of them.
    """
    own, times = np.asarray(own_s, float), StepTimes()
    for part in np.split(own, np.cumsum(list(blocks))[:-1]):
        times.append(part, together=True)
    return times.step_s


def list_block_lengths(steps: int, cut: int, protocol: MeasureSpec) -> list[int]:
    """Return the lengths of a run's blocks of steps, of which the first `cut` steps were its warm-up.

    The warm-up and the window each end with their own block, which a time limit may have shortened. For a run that
    ended within its warm-up, `cut` is 0 or the number of all steps.
    """
    warmup, length = cut or steps, protocol.block_steps
    return [min(length, part - done) for part in (warmup, steps - warmup) for done in range(0, part, length)]
