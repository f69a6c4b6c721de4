"""Several streams of samples as one, each with its share of every stretch of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bench.data.pipeline.loader import SampleStream

CYCLE = 1000
"""Samples after which the order of the streams begins anew: a share is kept to within 0.1 % of all samples."""


def compute_shares(weights: Sequence[float], temperature: float) -> NDArray[np.float64]:
    """Return the share of each stream: its weight to the power of 1 / temperature, of the sum of all.

    At 1 shares are as weights; the higher the temperature, the more alike they become (Raffel et al., JMLR 21 (2020),
    section 3.5.2).
    """
    import numpy as np

    logarithms = np.log(np.asarray(weights, float)) / temperature  # no power of a large weight that overflows
    powers = np.exp(logarithms - logarithms.max())
    shares: NDArray[np.float64] = powers / powers.sum()
    return shares


def round_shares(shares: NDArray[np.float64], total: int = CYCLE) -> NDArray[np.int64]:
    """Return how many of `total` samples each stream gives: at least one each, the rest by the largest remainder."""
    import numpy as np

    wanted = shares * total
    counts = np.maximum(np.floor(wanted), 1).astype(np.int64)
    while (left := total - int(counts.sum())) != 0:
        apart = wanted - counts
        if left > 0:
            counts[np.argmax(apart)] += 1
        else:  # more streams than their shares allow were given one: the one that has most too much gives
            counts[np.argmin(np.where(counts > 1, apart, np.inf))] -= 1
    return counts


def order_evenly(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which stream each of `counts.sum()` places belongs to, spread so that after n places every stream has
    given less than one sample more or less than n × its share.

    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): of the streams that are not ahead if
    they give the next sample, the one whose own must come first.
    """
    import numpy as np

    if len(counts) == 1:
        return np.zeros(counts[0], np.int64)
    places, parts = int(counts.sum()), 2 * len(counts) - 2
    given, order = np.zeros_like(counts), np.empty(places, np.int64)
    for place in range(places):
        due = (place + 1) * counts - given * places  # in samples × places: whole numbers, nothing is rounded
        latest = (given + 1 - 1 / parts) / counts
        order[place] = np.argmin(np.where(due * parts >= places, latest, np.inf))
        given[order[place]] += 1
    return order


@dataclass(frozen=True)
class Interleaving:
    """Streams of samples as one: sample i is that of stream `order[i % len(order)]` that it has not given yet."""

    streams: tuple[SampleStream, ...]
    order: NDArray[np.int64]  # (samples of a cycle,): the stream that gives each
    eos: int

    @property
    def padded(self) -> frozenset[str]:
        return frozenset().union(*(stream.padded for stream in self.streams))

    def __call__(self, index: int) -> tuple[NDArray[Any], ...]:
        cycle, place = divmod(index, len(self.order))
        stream = self.order[place]
        given, each = int((self.order[:place] == stream).sum()), int((self.order == stream).sum())
        sample: tuple[NDArray[Any], ...] = self.streams[stream](cycle * each + given)
        return sample
