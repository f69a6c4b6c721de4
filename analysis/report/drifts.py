"""What the machine did meanwhile, told from configurations that ran several times in one allocation."""

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from analysis.questions import describe_choice
from analysis.results import Results
from analysis.stats.drift import Drift, drift
from analysis.table import list_rows


class ControlPointDrift(NamedTuple):
    """A control point: what ran first and last in an allocation, and what changed in between."""

    allocation: str
    configuration: str
    drift: Drift


def find_drifts(results: Results) -> list[ControlPointDrift]:
    """Return the drift of every configuration in every allocation that it ran in at least twice, to a good end."""
    return list(_iterate_drifts(results))


def _iterate_drifts(results: Results) -> Iterable[ControlPointDrift]:
    for row in list_rows(results.summary):
        together: dict[str, list[int]] = {}
        for place in results.list_timed(row) if row["runs"] > row["n"] else ():
            allocation = results.table["allocation"].iloc[place]
            if not pd.isna(allocation):
                together.setdefault(str(allocation), []).append(place)
        for allocation, places in together.items():
            if found := drift([steps for place in places if (steps := results.window(place))]):
                yield ControlPointDrift(allocation, describe_choice(row), found)
