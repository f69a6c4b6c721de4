"""The intervals of many runs' steps at once: what numpy takes for a call is shared by all windows of one length."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from analysis.stats.interval import Interval
from bench.statistics import LEAST, LEVEL, Array, SeriesBounds, mean_bounds, median_bounds

Steps = tuple[float, ...]

_known: dict["Steps", "StepIntervals"] = {}


class StepIntervals(NamedTuple):
    """The intervals of the median and of the mean of a run's steps, as `analysis.stats.series` has them."""

    median: Interval | None
    mean: Interval | None


def of(step_s: Steps) -> StepIntervals:
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
    for n, equal_length in lengths.items():
        ends = _ends(np.array(equal_length)) if n >= LEAST else (StepIntervals(None, None) for _ in equal_length)
        _known.update(zip(equal_length, ends, strict=True))


def _ends(equal_length: Array) -> Iterator[StepIntervals]:
    return map(
        StepIntervals,
        _intervals(median_bounds(equal_length), equal_length),
        _intervals(mean_bounds(equal_length), equal_length),
    )


def _intervals(bounds: SeriesBounds, equal_length: Array) -> Iterator[Interval | None]:
    for low, high in zip(bounds.low.tolist(), bounds.high.tolist(), strict=True):
        known = np.isfinite(low) and np.isfinite(high)
        yield Interval(low, high, "within the run", LEVEL, equal_length.shape[-1]) if known else None
