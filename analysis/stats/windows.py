"""The intervals of many runs' steps at once: what numpy takes for a call is shared by all windows of one length."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from analysis.stats.interval import Interval
from bench.statistics import LEAST, LEVEL, Array, Bounds, mean_bounds, median_bounds

Steps = tuple[float, ...]

_known: dict["Steps", "Ends"] = {}


class Ends(NamedTuple):
    """The intervals of the median and of the mean of a run's steps, as `analysis.stats.series` has them."""

    median: Interval | None
    mean: Interval | None


def of(step_s: Steps) -> Ends:
    """Return the intervals of a run's steps; at no cost for one of those that were last prepared."""
    if step_s not in _known:
        prepare([step_s])
    return _known[step_s]


def prepare(windows: Iterable[Steps]) -> None:
    """Work out the intervals of the steps of many runs, which will be asked for next."""
    lengths: dict[int, list[Steps]] = {}
    for step_s in dict.fromkeys(windows):
        lengths.setdefault(len(step_s), []).append(step_s)
    _known.clear()
    for n, alike in lengths.items():
        ends = _ends(np.array(alike)) if n >= LEAST else (Ends(None, None) for _ in alike)
        _known.update(zip(alike, ends, strict=True))


def _ends(alike: Array) -> Iterator[Ends]:
    return map(Ends, _intervals(median_bounds(alike), alike), _intervals(mean_bounds(alike), alike))


def _intervals(bounds: Bounds, alike: Array) -> Iterator[Interval | None]:
    for low, high in zip(bounds.low.tolist(), bounds.high.tolist(), strict=True):
        known = np.isfinite(low) and np.isfinite(high)
        yield Interval(low, high, "within the run", LEVEL, alike.shape[-1]) if known else None
