"""What the machine did meanwhile, told from configurations that ran several times in one allocation."""

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from analysis.questions import choice
from analysis.results import Results
from analysis.stats.drift import Drift, drift
from analysis.table import plain


class Drifted(NamedTuple):
    """A control point: what ran first and last in an allocation, and what changed in between."""

    allocation: str
    configuration: str
    drift: Drift


def drifts(results: Results) -> list[Drifted]:
    """Return the drift of every configuration in every allocation that it ran in at least twice, to a good end."""
    return list(_drifts(results))


def _drifts(results: Results) -> Iterable[Drifted]:
    for row in plain(results.summary):
        together: dict[str, list[int]] = {}
        for place in results.behind(row) if row["runs"] > row["n"] else ():
            allocation = results.table["allocation"].iloc[place]
            if not pd.isna(allocation):
                together.setdefault(str(allocation), []).append(place)
        for allocation, places in together.items():
            if found := drift([steps for place in places if (steps := results.window(place))]):
                yield Drifted(allocation, choice(row), found)
