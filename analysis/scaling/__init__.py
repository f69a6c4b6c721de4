"""Seconds per sample of configurations, comparisons between them, and the columns of the resulting tables.

    from analysis.scaling import best, crossover, curves

    curves.build_curves(results)         strong and weak scaling, at equal and at the best micro-batch
    crossover.find_crossovers(results)   node counts at which one engine becomes faster than another
    best.best(results)                   per question: the fastest, its ties, the Pareto front of throughput and memory
    build_curve_table(…), build_crossover_table(…), best.as_table(…) of these modules return DataFrames

A question is a group of configurations that do the same work on equal hardware. All results are computed from T(n), the
mean seconds per sample on n nodes, over all timed steps, slow steps included.

The efficiency on n nodes is E(n) = T(n0) n0 / (T(n) n), where n0 is the smallest node count. The formula is the same
for strong and weak scaling, because T(n) is a time per sample and not per step.

Only measured runs are used. Failed configurations remain in the tables as rows without values.

In tables, the columns `*_low` and `*_high` are the ends of the interval of a value. The columns `ratio_kind`,
`ratio_level` and `ratio_n` describe the intervals of all ratios of a row. Columns copied from the summary have the same
name as in the summary. The columns `interval_*` describe the intervals of the copied columns.
"""

import functools
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pandas as pd

from analysis.columns import Kind, list_all_columns
from analysis.results import Results
from analysis.stats.compare import Comparison, Runs, blocks, compare, enough
from analysis.stats.intervals import Interval
from analysis.summary import KEY, Row
from analysis.table import build_typed_frame, list_rows
from bench.core.statistics import LEVEL

Result = TypeVar("Result")


def read_once(work: Callable[[Results], Result]) -> Callable[[Results], Result]:
    """Return a function that computes `work(results)` once per Results object and caches it in the object, as
    `functools.cached_property` does."""
    name = f"{work.__module__}.{work.__name__}"

    @functools.wraps(work)
    def read_or_compute(results: Results) -> Result:
        if name not in vars(results):
            vars(results)[name] = work(results)
        return cast(Result, vars(results)[name])

    return read_or_compute


class IntervalEstimate(NamedTuple):
    """A value with its interval. The interval is None if it is unknown, or if the value has no uncertainty because it
    holds by definition."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds per sample of one configuration, at every timed step. `runs` maps each allocation to its values, in the
    order of the steps.

    A value is the step time divided by the global batch. If all compared configurations do the same work per step, the
    values may also be step times that are not divided.
    """

    runs: Mapping[str, Sequence[float]]

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """Mean seconds per sample of each allocation, over all its timed steps."""
        return {name: float(np.mean(run)) for name, run in self.runs.items()}

    @functools.cached_property
    def typical(self) -> float:
        """Geometric mean of `means` over all allocations, in seconds per sample."""
        return statistics.geometric_mean(self.means.values())


Paces = Callable[[Row], Pace | None]
"""Function that returns the seconds per sample of a summary row. The result is None if the row has no run that ended
ok and undisturbed."""


@read_once
def paces(results: Results) -> Paces:
    """Return the function that looks up the seconds per sample of any row of the summary."""
    build_key, known = itemgetter(*KEY), dict[tuple[Any, ...], Pace]()
    for row in list_rows(results.summary[[*KEY, "n", "global_batch"]]):
        if row["n"] and (runs := results.runs(row)):
            batch = row["global_batch"]
            # an array takes a quarter of the memory of a list of floats
            known[build_key(row)] = Pace(
                {name: array("d", [step / batch for step in steps]) for name, steps in runs.items()}
            )
    return lambda row: known.get(build_key(row))


def compare_paces(one: Pace, other: Pace, level: float = LEVEL) -> Comparison:
    """Compare the seconds per sample of two configurations. The ratio is `one` divided by `other`.

    If both configurations ran in enough common allocations, they are compared within these allocations, so that good
    nodes favour neither of them.
    """

    def select(pace: Pace, names: Iterable[str]) -> Runs:
        return [[pace.means[name]] for name in names]  # a comparison of runs needs only the mean of each

    if shared := blocks(one.runs, other.runs):
        return compare(select(one, shared), select(other, shared), level, blocked=True)
    if enough(one.runs) and enough(other.runs):
        return compare(select(one, one.runs), select(other, other.runs), level)
    return compare(list(one.runs.values()), list(other.runs.values()), level)


def scaled(comparison: Comparison, factor: float = 1.0) -> IntervalEstimate:
    """Return the ratio of a comparison and its interval, both multiplied by `factor`. The factor is exact, so it does
    not widen the interval."""
    ends = comparison.interval
    interval = ends and ends._replace(low=ends.low * factor, high=ends.high * factor)
    return IntervalEstimate(comparison.ratio * factor, interval)


def add_interval_names(*names: str) -> tuple[str, ...]:
    """Return the column names `names`. Each name is followed by the two columns for the interval of its value, such as
    `ratio_low` and `ratio_high` after `ratio`."""
    return tuple(f"{name}{end}" for name in names for end in ("", "_low", "_high"))


WHERE = ("machine", "environment_id", "model", "engine", "variant", "precision", "activation_checkpointing", "data")
BATCH = ("micro", "accumulation", "global_batch")
PLACE = ("config_id", "nodes", "devices_per_node", *BATCH)
TIME = ("n", "outcome", "sample_s", *add_interval_names("step_s"), "interval_kind", "interval_level", "interval_n")
BASIS = ("ratio_kind", "ratio_level", "ratio_n")

_TEXTS = (
    "question", "law", "batch", "curve", "variant", "interval_kind", "micros", "tied_micros", "ratio_kind", "one",
    "other", "verdict", "found", "told", "standing", "pareto", "memory_verdict",
)  # fmt: skip
_INTEGERS = ("n", "interval_n", "base_nodes", "ratio_n")


def build_frame(rows: Sequence[Row], names: Sequence[str]) -> pd.DataFrame:
    """Return a table of the rows with the columns `names`. If a row lacks a column, the cell is empty. Other columns of
    the rows are ignored."""
    cells = {name: [row.get(name) for row in rows] for name in names}
    return build_typed_frame(cells, {name: _find_column_kind(name) for name in names})


def build_ratio_cells(name: str, comparison: Comparison | None) -> Row:
    """Return the cells of a comparison's ratio and of its interval, with column names that begin with `name`."""
    return build_interval_cells(name, scaled(comparison) if comparison else None)


def build_interval_cells(name: str, estimate: IntervalEstimate | None) -> Row:
    """Return the cells of a value and of its interval, with column names that begin with `name`."""
    interval = estimate and estimate.interval
    found = {f"{name}_{end}": getattr(interval, end, None) for end in ("low", "high")}
    return {name: estimate and estimate.value, **found}


def build_basis_cells(estimate: IntervalEstimate | Comparison | None) -> Row:
    """Return the cells of the columns BASIS, which describe the intervals of a row's ratios: kind, confidence level and
    number of values. The cells are empty if `estimate` is None."""
    interval = estimate and estimate.interval
    return {name: getattr(interval, name.removeprefix("ratio_"), None) for name in BASIS}


def _find_column_kind(name: str) -> Kind:
    bare = name.removeprefix("one_").removeprefix("other_")
    if name in _TEXTS or bare in _INTEGERS:
        return "text" if name in _TEXTS else "integer"
    known = list_all_columns().get(bare)
    return known.kind if known else "number"
