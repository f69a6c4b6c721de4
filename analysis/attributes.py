"""Units and meanings of the columns of public tables, in pandas' `attrs`.

`frame.attrs["units"]` and `frame.attrs["meanings"]` are texts by column; a unit is empty for what has none. pandas
keeps the attributes of a table with its columns, rows and copies, and gives a single column those of its whole table.
"""

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from analysis.columns import list_all_columns

UNITS, MEANINGS = "units", "meanings"


class ColumnMeaning(NamedTuple):
    """What a column of a derived table holds."""

    meaning: str
    unit: str = ""


_ENDS = {"_low": "lower end of the interval of", "_high": "upper end of the interval of"}
_SIDES = {"base_": "at the base", "one_": "of the one", "other_": "of the other"}

DERIVED: Mapping[str, ColumnMeaning] = {
    "variant": ColumnMeaning("what else sets configurations of an engine apart in this set"),
    "n": ColumnMeaning("allocations in which repeats ended ok: the numbers come from these runs"),
    "runs": ColumnMeaning("rows of the run table, all attempts"),
    "interval_kind": ColumnMeaning("what the interval of step_s holds for"),
    "interval_level": ColumnMeaning("probability that the interval of step_s holds the median"),
    "interval_n": ColumnMeaning("what the interval of step_s rests on: steps of the one run, or repeats"),
    "standing": ColumnMeaning("fastest, equal within 3 %, tied, slower, failed, or too few repeats to tell"),
    "ratio": ColumnMeaning("seconds per sample over those of the fastest, or of the other"),
    "ratio_kind": ColumnMeaning("what the intervals of the row's ratios hold for"),
    "ratio_level": ColumnMeaning("probability that they hold the value"),
    "ratio_n": ColumnMeaning("what they rest on: steps or repeats of both sides"),
    "pareto": ColumnMeaning("throughput against memory: front, tied, dominated, or too few repeats to tell"),
    "memory_ratio": ColumnMeaning("seconds per sample over the fastest of those that need no more memory"),
    "memory_verdict": ColumnMeaning("verdict on that ratio"),
    "law": ColumnMeaning("what is held over node counts: strong, the global batch; weak, the work per device"),
    "batch": ColumnMeaning("at which micro-batch: an equal one, or the best of each node count"),
    "curve": ColumnMeaning("name of the curve: engine and what is held"),
    "micros": ColumnMeaning("micro-batches asked for at that node count", "samples"),
    "tied_micros": ColumnMeaning("those of them that repeats do not find slower than the one of the row", "samples"),
    "base_nodes": ColumnMeaning("the smallest measured node count of the curve"),
    "speedup": ColumnMeaning("samples per second over the base's; of a weak curve the scaled speed-up"),
    "efficiency": ColumnMeaning("speed-up over nodes / base_nodes: 1 is ideal"),
    "serial_fraction": ColumnMeaning("the part that is not parallel, by Karp and Flatt; of strong curves only"),
}
"""Of the columns that the run table has not."""


def describe(name: str) -> ColumnMeaning | None:
    """Return what a column of any public table holds; None for one that no table has."""
    if column := list_all_columns().get(name):
        return ColumnMeaning(column.meaning, column.unit)
    if name in DERIVED:
        return DERIVED[name]
    for end, words in _ENDS.items():
        if name.endswith(end) and (whole := describe(name.removesuffix(end))):
            return ColumnMeaning(f"{words} {name.removesuffix(end)}", whole.unit)
    for side, words in _SIDES.items():
        if name.startswith(side) and (bare := describe(name.removeprefix(side))):
            return ColumnMeaning(f"{bare.meaning}, {words}", bare.unit)
    return None


def annotate(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the same values that carries the units and meanings of its columns."""
    known = {str(name): found for name in frame.columns if (found := describe(str(name)))}
    carrying = frame.copy(deep=False)
    carrying.attrs = {
        UNITS: {name: one.unit for name, one in known.items()},
        MEANINGS: {name: one.meaning for name, one in known.items()},
    }
    return carrying


def tabulate_columns(frame: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return unit and meaning of each column of a table, or of every run table, by its name."""
    names = list_all_columns() if frame is None else map(str, frame.columns)
    known = [(name, describe(name) or ColumnMeaning("")) for name in names]
    cells = {"unit": [one.unit for _, one in known], "meaning": [one.meaning for _, one in known]}
    return pd.DataFrame(cells, index=pd.Index([name for name, _ in known], name="column"))
