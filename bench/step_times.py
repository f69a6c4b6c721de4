"""The time of a step of several ranks: from the slowest rank's completion of the step before to that of this one.

The greatest of the ranks' own times is no such thing: what one rank is late with in one step and early with in the next
counts twice, so those add up to more than the window, and the more ranks there are the more.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from bench.spec import MeasureSpec


def compute_step_s(own_s: ArrayLike, blocks: Iterable[int]) -> list[float]:
    """Return the seconds of each step, from every rank's own seconds of it: an array of (steps, ranks).

    `blocks` are the numbers of steps between two barriers, in order: all ranks begin a block together, and its steps
    add up to the time that the slowest rank needs for all of them.
    """
    own = np.asarray(own_s, float)
    if own.shape[1] == 1:
        return [float(seconds) for seconds in own[:, 0]]
    parts = np.split(own, np.cumsum(list(blocks))[:-1])
    completed = (part.cumsum(axis=0).max(axis=1) for part in parts if len(part))
    return [float(step) for ends in completed for step in np.diff(ends, prepend=0.0)]


def list_block_lengths(steps: int, cut: int, protocol: MeasureSpec) -> list[int]:
    """Return the lengths of the blocks in which a run made its steps, of which the first `cut` were its warm-up.

    The warm-up and the window end with a block of their own, which a budget may have cut short. Where a run ended
    within its warm-up, `cut` is 0 or all of its steps.
    """
    warmup = cut or steps
    return list(chain(_list_blocks(warmup, protocol.block_steps), _list_blocks(steps - warmup, protocol.block_steps)))


def _list_blocks(steps: int, length: int) -> Iterator[int]:
    return (min(length, steps - done) for done in range(0, steps, length))
