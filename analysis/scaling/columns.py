"""What the tables of this package share: plain columns, a number missing where there is none.

A number's `*_low` and `*_high` are its interval; `ratio_kind`, `ratio_level` and `ratio_n` say of all of a row which it
is. Columns of the summary keep their names, and `interval_*` is of theirs.
"""

from collections.abc import Iterable, Sequence

import pandas as pd

from analysis.columns import Kind, list_all_columns
from analysis.scaling.time_per_sample import IntervalEstimate, scaled
from analysis.stats.compare import Comparison
from analysis.summary import Row
from analysis.table import build_typed_frame


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
