"""Time per sample of configurations, how two of them compare, and the columns in which tables show it.

    from analysis.scaling import best, crossover, curves

    curves.build_curves(results)         strong and weak scaling, at equal and at the best micro-batch
    crossover.find_crossovers(results)   node counts where one stage overtakes another
    best.best(results)                   per question: the fastest, its ties, the Pareto front of throughput and memory
    build_curve_table(…), build_crossover_table(…), best.as_table(…) of these modules return DataFrames

Everything is derived from seconds per sample over the whole window, slow steps included. That makes one formula of all
efficiencies: E(n) = pace(n0) n0 / (pace(n) n). Only measured runs take part; failures stay as rows.

In tables `*_low` and `*_high` are the interval of a number; `ratio_kind`, `ratio_level` and `ratio_n` describe all
intervals of a row. Columns of the summary keep their names, and `interval_*` describes their intervals.
"""

import functools
import statistics
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

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
    """Cache the result of `work` while its argument lives. Results are compared by identity.

    The result must not reference the argument, which would then live forever.
    """
    known: dict[int, Result] = {}

    @functools.wraps(work)
    def read_or_compute(results: Results) -> Result:
        name = id(results)
        if name not in known:
            known[name] = work(results)
            weakref.finalize(results, known.pop, name, None)
        return known[name]

    return read_or_compute


class IntervalEstimate(NamedTuple):
    """A number with its interval; None if it is unknown, or if the number holds by definition."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds per sample of every timed step in order, by allocation: the step time over the global batch.

    Or seconds per step, if all compared configurations do the same work per step.
    """

    runs: Mapping[str, Sequence[float]]

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """Means by allocation."""
        return {name: float(np.mean(run)) for name, run in self.runs.items()}

    @functools.cached_property
    def typical(self) -> float:
        """The geometric mean over the means of the allocations."""
        return statistics.geometric_mean(self.means.values())


Paces = Callable[[Row], Pace | None]
"""Pace of a row of the summary; None if no run of it ended ok."""


@read_once
def paces(results: Results) -> Paces:
    """Return the function that looks up the pace of any row."""
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
    """Compare two paces; the ratio is the one's seconds per sample over the other's.

    If they share enough allocations, the comparison is within these, so that good nodes do not favour a configuration.
    """

    def select(pace: Pace, names: Iterable[str]) -> Runs:
        return [[pace.means[name]] for name in names]  # a comparison of runs needs their means only

    if shared := blocks(one.runs, other.runs):
        return compare(select(one, shared), select(other, shared), level, blocked=True)
    if enough(one.runs) and enough(other.runs):
        return compare(select(one, one.runs), select(other, other.runs), level)
    return compare(list(one.runs.values()), list(other.runs.values()), level)


def scaled(comparison: Comparison, factor: float = 1.0) -> IntervalEstimate:
    """Return the ratio of a comparison times an exact factor."""
    ends = comparison.interval
    interval = ends and ends._replace(low=ends.low * factor, high=ends.high * factor)
    return IntervalEstimate(comparison.ratio * factor, interval)


def add_interval_names(*names: str) -> tuple[str, ...]:
    """Return column names, each followed by those of the ends of its interval."""
    return tuple(f"{name}{end}" for name in names for end in ("", "_low", "_high"))


WHERE = ("machine", "environment_id", "model", "engine", "variant", "precision", "activation_checkpointing", "data")
BATCH = ("micro", "accumulation", "global_batch")
PLACE = ("config_id", "nodes", "devices_per_node", *BATCH)
TIME = ("n", "outcome", "sample_s", *add_interval_names("step_s"), "interval_kind", "interval_level", "interval_n")
BASIS = ("ratio_kind", "ratio_level", "ratio_n")

_TEXTS = (
    "law", "batch", "curve", "variant", "interval_kind", "micros", "tied_micros", "ratio_kind", "one",
    "other", "verdict", "found", "told", "standing", "pareto", "memory_verdict",
)  # fmt: skip
_INTEGERS = ("n", "interval_n", "base_nodes", "ratio_n")


def build_frame(rows: Sequence[Row], names: Sequence[str]) -> pd.DataFrame:
    """Return rows as a table of the columns `names`; rows may lack columns or have others."""
    cells = {name: [row.get(name) for row in rows] for name in names}
    return build_typed_frame(cells, {name: _find_column_kind(name) for name in names})


def build_ratio_cells(name: str, comparison: Comparison | None) -> Row:
    """Return the cells of a comparison's ratio."""
    return build_interval_cells(name, scaled(comparison) if comparison else None)


def build_interval_cells(name: str, estimate: IntervalEstimate | None) -> Row:
    """Return the cells of a number and of its interval."""
    interval = estimate and estimate.interval
    found = {f"{name}_{end}": getattr(interval, end, None) for end in ("low", "high")}
    return {name: estimate and estimate.value, **found}


def build_basis_cells(estimate: IntervalEstimate | Comparison | None) -> Row:
    """Return the cells that describe the intervals of a row."""
    interval = estimate and estimate.interval
    return {name: getattr(interval, name.removeprefix("ratio_"), None) for name in BASIS}


def _find_column_kind(name: str) -> Kind:
    bare = name.removeprefix("one_").removeprefix("other_")
    if name in _TEXTS or bare in _INTEGERS:
        return "text" if name in _TEXTS else "integer"
    known = list_all_columns().get(bare)
    return known.kind if known else "number"
