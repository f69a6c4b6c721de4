"""The time of a step of several ranks: from the slowest rank's completion of the step before to that of this one.

The greatest of the ranks' own times is no such thing: what one rank is late with in one step and early with in the next
counts twice, so those add up to more than the window, and the more ranks there are the more.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from bench.core.spec import MeasureSpec


def compute_step_s(own_s: ArrayLike, blocks: Iterable[int]) -> list[float]:
    """Return the seconds of each step, from every rank's own seconds of it: an array of (steps, ranks).

    `blocks` are the numbers of steps between two barriers, in order: all ranks begin a block together, and its steps
    add up to the time that the slowest rank needs for all of them.
    """
    own, times = np.asarray(own_s, float), StepTimes()
    for part in np.split(own, np.cumsum(list(blocks))[:-1]):
        times.append(part, together=True)
    return times.step_s


class StepTimes:
    """The seconds of each step, from every rank's own, as blocks of them come in."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._own_s = np.zeros(0)  # by rank, since all of them began together
        self._completed_s = 0.0  # by the slowest of them

    def append(self, own_s: ArrayLike, *, together: bool) -> None:
        """Add a block: every rank's own seconds, an array of (steps, ranks). All ranks began it `together`, or each
        as soon as it had done the block before."""
        own = np.asarray(own_s, float)
        if len(own) == 0:
            return
        if own.shape[1] == 1:
            self.step_s += [float(seconds) for seconds in own[:, 0]]
            return
        if together:
            self._own_s, self._completed_s = np.zeros(own.shape[1]), 0.0
        ends = self._own_s + own.cumsum(axis=0)
        completed = ends.max(axis=1)
        self.step_s += [float(step) for step in np.diff(completed, prepend=self._completed_s)]
        self._own_s, self._completed_s = ends[-1], float(completed[-1])


def list_block_lengths(steps: int, cut: int, protocol: MeasureSpec) -> list[int]:
    """Return the lengths of the blocks in which a run made its steps, of which the first `cut` were its warm-up.

    The warm-up and the window end with a block of their own, which a budget may have cut short. Where a run ended
    within its warm-up, `cut` is 0 or all of its steps.
    """
    warmup = cut or steps
    return list(chain(_list_blocks(warmup, protocol.block_steps), _list_blocks(steps - warmup, protocol.block_steps)))


def _list_blocks(steps: int, length: int) -> Iterator[int]:
    return (min(length, steps - done) for done in range(0, steps, length))
