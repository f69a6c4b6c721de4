"""What is known of many runs' steps at once: what numpy takes for a call is shared by all windows of one length."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.stats.intervals import FEW, Interval
from bench.core.statistics import (
    LEAST,
    LEVEL,
    Array,
    SeriesBounds,
    effective_size,
    mean_bounds,
    median_bounds,
)

Steps = tuple[float, ...]

_known: dict["Steps", "StepIntervals"] = {}


SHARES = (0.95, 0.99)
"""Of a window's steps: the step times that these stay below are known of each."""


STALL_SHARE = 0.01
"""Of a window's steps: the longest, at least one."""

CHANGE = 0.02
"""Difference between the means of a window's first and last third, over its mean, that does not matter."""


class StepIntervals(NamedTuple):
    """Intervals of a run's steps, as `analysis.stats.intervals` has them, and facts of its window."""

    median: Interval | None
    mean: Interval | None
    few: bool  # `intervals.few`
    changed: bool  # the means of its first and last third differ by more than `CHANGE`, and their intervals do not meet
    quantiles: tuple[float, ...]  # by SHARES
    stall_s: float  # by which its longest steps, `STALL_SHARE` of them, exceed the median, all together


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
        found = _describe_windows(np.array(equal_length)) if n else [StepIntervals(None, None, False, False, (), 0.0)]
        _known.update(zip(equal_length, found, strict=True))


def _describe_windows(steps: Array) -> Iterator[StepIntervals]:
    """Yield what is known of windows of one length, shape (runs, steps)."""
    runs, n = steps.shape
    medians: list[Interval | None] = [None] * runs
    means, few = medians, np.zeros(runs, bool)
    if n >= LEAST:
        medians, means = list(_intervals(median_bounds(steps), steps)), list(_intervals(mean_bounds(steps), steps))
        few = effective_size(steps) < FEW
    changed = _find_changed(steps) if n >= 3 * LEAST else np.zeros(runs, bool)
    ordered = np.sort(steps, axis=-1)
    quantiles = map(tuple, np.quantile(ordered, SHARES, axis=-1).T.tolist())
    longest = ordered[:, -max(1, int(STALL_SHARE * n)) :]
    stall_s = (longest - np.median(ordered, axis=-1, keepdims=True)).sum(axis=-1)
    yield from map(StepIntervals, medians, means, few.tolist(), changed.tolist(), quantiles, stall_s.tolist())


def _find_changed(steps: Array) -> NDArray[np.bool_]:
    """Return of windows of one length, shape (runs, steps), which changed between their first and last third."""
    third = steps.shape[1] // 3
    parts = steps[:, :third], steps[:, -third:]
    (first, last), (one, other) = (part.mean(axis=1) for part in parts), map(mean_bounds, parts)
    apart = (one.high < other.low) | (other.high < one.low)
    changed: NDArray[np.bool_] = apart & (np.abs(last - first) > CHANGE * steps.mean(axis=1))
    return changed


def _intervals(bounds: SeriesBounds, equal_length: Array) -> Iterator[Interval | None]:
    for low, high in zip(bounds.low.tolist(), bounds.high.tolist(), strict=True):
        known = np.isfinite(low) and np.isfinite(high)
        yield Interval(low, high, "within the run", LEVEL, equal_length.shape[-1]) if known else None
