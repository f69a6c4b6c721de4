"""Optimizer steps of a run: the schedule of a training, and step times over several ranks.

Steps are numbered from 0, so the step after n completed steps has number n.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from bench.core.spec import MeasureSpec, RunSpec

# ---------------------------------------- the schedule of a training


def count_steps(spec: RunSpec) -> int:
    """Return the number of optimizer steps of the whole training."""
    assert spec.learning.tokens is not None
    return spec.count_steps(spec.learning.tokens)


def find_last_step(spec: RunSpec) -> int:
    """Return the number of optimizer steps after which the run ends. These are the steps for `learning.stop_after`
    tokens or, if it is not set, the steps of the whole training."""
    assert spec.learning.end_tokens is not None
    return spec.count_steps(spec.learning.end_tokens)


def compute_learning_rate(spec: RunSpec, step: int) -> float:
    """Return the learning rate of the step with the number `step`, counted from 0. After the end of the training,
    return the final learning rate."""
    learning, peak = spec.learning, spec.optimizer.lr
    warmup, steps = spec.count_steps(learning.warmup_tokens), count_steps(spec)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / (steps - warmup), 1.0) if steps > warmup else 1.0
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[learning.schedule]
    return peak * (learning.final_lr + (1 - learning.final_lr) * left)


def list_evaluations(spec: RunSpec) -> Iterator[int]:
    """Yield the numbers of completed steps at which the held-out loss is computed: 0, every multiple of n, and the
    number of steps at the end of the run. n is the number of steps that process `learning.evaluate_every` tokens."""
    every, last = spec.learning.evaluate_every, find_last_step(spec)
    yield from range(0, last, spec.count_steps(every) if every else last)
    yield last


def count_evaluation_steps(spec: RunSpec) -> tuple[float, float]:
    """Return the least and greatest time of all evaluations of a training, as a number of optimizer steps that take as
    long; 0 for a run that is no training.

    Each evaluation makes a forward pass over the held-out samples. A forward pass is a third of a step's work on as
    many samples. If answers are generated, each token of an answer needs one more forward pass. Without a limit, an
    answer has at most as many tokens as the sequence.
    """
    learning = spec.learning
    if learning.end_tokens is None:
        return 0.0, 0.0
    micro_steps = math.ceil(learning.evaluation_samples / (spec.batch.micro * spec.data_parallel))
    each = len(list(list_evaluations(spec))) * micro_steps / spec.accumulation / 3
    tokens = (learning.answer_tokens or 1, learning.answer_tokens or max(spec.sequence.values()))
    least, most = (each * (1 + number * bool(learning.quality)) for number in tokens)
    return least, most


def list_checkpoints(spec: RunSpec) -> Iterator[int]:
    """Yield the numbers of completed steps at which a checkpoint is saved. There is no checkpoint at the end of the
    whole training, because no run would resume from it."""
    last = find_last_step(spec)
    if every := spec.learning.checkpoint_every:
        each = spec.count_steps(every)
        yield from range(each, last, each)
    if last < count_steps(spec):
        yield last


# ---------------------------------------- the time of a step


class StepTimes:
    """Step times in seconds over all ranks, computed block by block from each rank's own times.

    A rank's own time of a step lasts from its own completion of the previous step to its own completion of this step. A
    step over all ranks lasts from the slowest rank's completion of the previous step to the slowest rank's completion
    of this step.

    The maximum of the ranks' own times is not used, because it can be longer than the step. Example: one rank is
    delayed in step n, and the other ranks wait for this rank only in step n + 1. The maximum of step n and the maximum
    of step n + 1 then both contain the delay. The sum of the maxima would exceed the length of the window. The excess
    would grow with the number of ranks.
    """

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._own_s = np.zeros(0)  # (ranks,): seconds of each rank since the last barrier
        self._completed_s = 0.0  # maximum of `_own_s`

    def append(self, own_s: ArrayLike, *, together: bool) -> None:
        """Add a block of steps. `own_s` has each rank's own time for each step in seconds, shape (steps, ranks).

        If `together` is True, all ranks began the block at the same time, after a barrier. Otherwise each rank began it
        as soon as it had completed the previous block.
        """
        own = np.asarray(own_s, float)
        if len(own) == 0:
            return
        if own.shape[1] == 1:  # keep the measured values: sums and their differences would round them
            self.step_s += own[:, 0].tolist()
            return
        if together:
            self._own_s, self._completed_s = np.zeros(own.shape[1]), 0.0
        ends = self._own_s + own.cumsum(axis=0)  # (steps, ranks)
        completed = ends.max(axis=1)
        self.step_s += np.diff(completed, prepend=self._completed_s).tolist()
        self._own_s, self._completed_s = ends[-1], float(completed[-1])


def compute_step_s(own_s: ArrayLike, blocks: Iterable[int]) -> list[float]:
    """Return the step times over all ranks, in seconds, computed from each rank's own times.

    `own_s` has the seconds of each step as measured on each rank, shape (steps, ranks). `blocks` has the number of
    steps of each block. All ranks begin a block at the same time, because there is a barrier before it. The step times
    of a block add up to the time that the slowest rank needs for the block.
    """
    own, times = np.asarray(own_s, float), StepTimes()
    for part in np.split(own, np.cumsum(list(blocks))[:-1]):
        times.append(part, together=True)
    return times.step_s


def list_block_lengths(steps: int, cut: int, protocol: MeasureSpec) -> list[int]:
    """Return the number of steps of each block (steps between two barriers) of a run. The run has `steps` steps, of
    which the first `cut` were the warm-up.

    No block contains steps of both the warm-up and the window. The last block of the warm-up and the last block of the
    window may be shorter than the other blocks, because of a time limit. For a run that ended during its warm-up, `cut`
    is 0 or the number of all steps.
    """
    warmup, length = cut or steps, protocol.block_steps
    return [min(length, part - done) for part in (warmup, steps - warmup) for done in range(0, part, length)]
