"""A configuration's seconds per sample over its windows: what node counts, stages and micro-batches are compared by.

A mean, so that slow steps count for what they cost: that of all steps of an allocation.
"""

import functools
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.results import Results
from analysis.scaling.cached import read_once
from analysis.stats.compare import Comparison, blocks, compare, enough
from analysis.stats.interval import Interval
from analysis.stats.ratio import Runs
from analysis.summary import KEY, Row
from analysis.table import list_rows
from bench.statistics import LEVEL


class IntervalEstimate(NamedTuple):
    """A number and where it lies; without an interval where none is known, or where it holds by definition."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds per sample of every timed step in its order, by allocation: a step's seconds over the global batch. Or
    per step, where all that are compared do the same work in one."""

    runs: Mapping[str, Sequence[float]]

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """By allocation."""
        return {name: float(np.mean(run)) for name, run in self.runs.items()}

    @functools.cached_property
    def typical(self) -> float:
        """The geometric mean over allocations of their means."""
        return statistics.geometric_mean(self.means.values())


Paces = Callable[[Row], Pace | None]
"""The pace of a row of the summary; None where no run of it ended ok."""


@read_once
def paces(results: Results) -> Paces:
    """Return what looks up the pace of any row."""
    rows = [row for row in list_rows(results.summary[[*KEY, "n", "global_batch"]]) if row["n"]]
    known = {_key(row): _pace(runs, row["global_batch"]) for row in rows if (runs := results.runs(row))}
    return lambda row: known.get(_key(row))


def compare_paces(one: Pace, other: Pace, level: float = LEVEL) -> Comparison:
    """Compare two paces; the ratio is of the one's seconds per sample over the other's.

    Within the allocations that both ran in, where these are enough to be the unit, so that good nodes are not taken
    for a good configuration.
    """
    if shared := blocks(one.runs, other.runs):
        return compare(_each(one, shared), _each(other, shared), level, blocked=True)
    if enough(one.runs) and enough(other.runs):
        return compare(_each(one, one.runs), _each(other, other.runs), level)
    return compare(list(one.runs.values()), list(other.runs.values()), level)


def scaled(comparison: Comparison, factor: float = 1.0) -> IntervalEstimate:
    """Return the ratio of a comparison times an exact factor."""
    ends = comparison.interval
    interval = ends and ends._replace(low=ends.low * factor, high=ends.high * factor)
    return IntervalEstimate(comparison.ratio * factor, interval)


def _each(pace: Pace, names: Iterable[str]) -> Runs:
    """Return runs by their means, which are all that is asked of them where they are the unit."""
    return [[pace.means[name]] for name in names]


def _pace(runs: Mapping[str, Sequence[float]], batch: int) -> Pace:
    return Pace({name: array("d", [step / batch for step in steps]) for name, steps in runs.items()})


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)
