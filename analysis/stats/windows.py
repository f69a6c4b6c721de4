"""What is known of many runs' steps at once: what numpy takes for a call is shared by all windows of one length."""

import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from analysis.stats.interval import Interval
from analysis.stats.series import FEW
from bench.statistics import (
    LEAST,
    LEVEL,
    Array,
    SeriesBounds,
    effective_size,
    find_likeliest_changes,
    mean_bounds,
    median_bounds,
    signs,
    student,
)

Steps = tuple[float, ...]

_known: dict["Steps", "StepIntervals"] = {}


SHARES = (0.95, 0.99)
"""Of a window's steps: the step times that these stay below are known of each."""


class LikelyChange(NamedTuple):
    """The likeliest change of a window's level (`bench.statistics.LikeliestChanges`)."""

    apart: float  # seconds
    statistic: float
    freedom: float


class StepIntervals(NamedTuple):
    """The intervals of the median and of the mean of a run's steps, as `analysis.stats.series` has them, and what else
    is asked of every window."""

    median: Interval | None
    mean: Interval | None
    few: bool  # `analysis.stats.series.few`
    change: LikelyChange | None  # None of a window that is too short for one
    quantiles: tuple[float, ...]  # by SHARES


def of(step_s: Steps) -> StepIntervals:
    """Return the intervals of a run's steps; at no cost for one of those that were last prepared."""
    if step_s not in _known:
        prepare([step_s])
    return _known[step_s]


def is_changing(step_s: Steps, width: float, level: float) -> bool:
    """Whether the steps of a window were still changing (`bench.statistics.is_changing`)."""
    change = of(step_s).change
    if change is None or change.apart <= width / 4 * statistics.median(step_s):
        return False
    return change.statistic > _compute_limit(change.freedom, level)


def prepare(windows: Iterable[Steps]) -> None:
    """Work out the intervals of the steps of many runs, which will be asked for next."""
    lengths: dict[int, list[Steps]] = {}
    for step_s in dict.fromkeys(windows):
        lengths.setdefault(len(step_s), []).append(step_s)
    _known.clear()
    for n, equal_length in lengths.items():
        found = _describe_windows(np.array(equal_length)) if n else [StepIntervals(None, None, False, None, ())]
        _known.update(zip(equal_length, found, strict=True))


def _compute_limit(freedom: float, level: float) -> float:
    return float(student(np.asarray(freedom), level))


def _describe_windows(steps: Array) -> Iterator[StepIntervals]:
    """Yield what is known of windows of one length, shape (runs, steps)."""
    runs, n = steps.shape
    medians: list[Interval | None] = [None] * runs
    means, few = medians, np.zeros(runs, bool)
    if n >= LEAST:
        bounds = median_bounds(steps)
        medians, means = list(_intervals(bounds, steps)), list(_intervals(mean_bounds(steps), steps))
        few = np.isfinite(bounds.low) & np.isfinite(bounds.high) & (effective_size(signs(steps)) < FEW)
    changes: Iterable[LikelyChange | None] = [None] * runs
    if n >= 2 * LEAST:
        changes = map(LikelyChange, *(part.tolist() for part in find_likeliest_changes(steps)))
    quantiles = np.quantile(steps, SHARES, axis=-1).T
    yield from map(StepIntervals, medians, means, few.tolist(), changes, map(tuple, quantiles.tolist()))


def _intervals(bounds: SeriesBounds, equal_length: Array) -> Iterator[Interval | None]:
    for low, high in zip(bounds.low.tolist(), bounds.high.tolist(), strict=True):
        known = np.isfinite(low) and np.isfinite(high)
        yield Interval(low, high, "within the run", LEVEL, equal_length.shape[-1]) if known else None
