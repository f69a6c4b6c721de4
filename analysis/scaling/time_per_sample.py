"""A configuration's seconds per sample, how two of them compare, and the columns in which tables show it.

A number's `*_low` and `*_high` are its interval; `ratio_kind`, `ratio_level` and `ratio_n` say of all of a row which it
is. Columns of the summary keep their names, and `interval_*` is of theirs.
"""

import functools
import statistics
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """Keep what `work` returns for as long as its results live; it must not hold them. They are told apart by what they
    are and not by what they contain."""
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
    known: dict[tuple[Any, ...], Pace] = {}
    for row in rows:
        if runs := results.runs(row):
            batch = row["global_batch"]
            known[_key(row)] = Pace(
                {name: array("d", [step / batch for step in steps]) for name, steps in runs.items()}
            )
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


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def add_interval_names(*names: str) -> tuple[str, ...]:
    """Return the names of numbers, each with those of the ends of its interval."""
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
    """Return rows, which may lack columns or have others, as a table of the columns `names`."""
    return build_typed_frame(
        {name: [row.get(name) for row in rows] for name in names}, {name: _find_column_kind(name) for name in names}
    )


def build_ratio_cells(name: str, comparison: Comparison | None) -> Row:
    """Return the cells of a comparison's ratio."""
    return build_interval_cells(name, scaled(comparison) if comparison else None)


def build_interval_cells(name: str, estimate: IntervalEstimate | None) -> Row:
    """Return the cells of a number and of its interval."""
    interval = estimate and estimate.interval
    found = {f"{name}_{end}": getattr(interval, end, None) for end in ("low", "high")}
    return {name: estimate and estimate.value, **found}


def build_basis_cells(estimate: IntervalEstimate | Comparison | None) -> Row:
    """Return the cells that say which interval it is."""
    interval = estimate and estimate.interval
    return {name: getattr(interval, name.removeprefix("ratio_"), None) for name in BASIS}


def join_numbers(values: Iterable[int]) -> str:
    """Return a cell of several numbers."""
    return " ".join(map(str, values))


def _find_column_kind(name: str) -> Kind:
    bare = name.removeprefix("one_").removeprefix("other_")
    if name in _TEXTS or bare in _INTEGERS:
        return "text" if name in _TEXTS else "integer"
    known = list_all_columns().get(bare)
    return known.kind if known else "number"
