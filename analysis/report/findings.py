"""Everything that a set of runs says, worked out once for the page and for the files beside it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from analysis.prices import priced
from analysis.report.drifts import Drifted, drifts
from analysis.report.provenance import Provenance, provenance
from analysis.results import Results
from analysis.scaling.best import Best, best
from analysis.scaling.crossover import Crossover, crossovers
from analysis.scaling.curves import Curve, curves
from analysis.summary import Row
from analysis.table import plain
from bench.record import Circumstance
from bench.store import Unreadable


class Findings(NamedTuple):
    """What the results say; `rows` are those of `table` in plain values."""

    results: Results
    table: pd.DataFrame
    summary: pd.DataFrame
    rows: Sequence[Row]
    best: Sequence[Best]
    curves: Sequence[Curve]
    crossovers: Sequence[Crossover]
    drifts: Sequence[Drifted]
    origin: Provenance
    asked: tuple[str, ...]  # by the studies, in their own words


def findings(results: Results, price: float | None = None) -> Findings:
    """Work out what results say; `price` is of a device and hour, in a currency of the user's."""
    table, summary = results.table, results.summary
    if price is not None:
        table, summary = priced(table, price), priced(summary, price)
    around = list(_circumstances(results))
    return Findings(
        results=results,
        table=table,
        summary=summary,
        rows=plain(table),
        best=best(results),
        curves=curves(results),
        crossovers=crossovers(results),
        drifts=drifts(results),
        origin=provenance(results, [one.machine for one in around]),
        asked=tuple(dict.fromkeys(one.question for one in around if one.question)),
    )


def _circumstances(results: Results) -> Iterable[Circumstance]:
    """Yield how the first run of every study, machine and environment class was started."""
    firsts = ~results.table.duplicated(["study", "machine", "environment_id"])
    for place in firsts.to_numpy().nonzero()[0]:
        try:
            yield results.record(int(place)).circumstance
        except (OSError, Unreadable):  # its file is gone by now
            continue
