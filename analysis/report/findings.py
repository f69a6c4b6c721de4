"""Everything that a report shows of a set of runs, computed once for the page and the files next to it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from analysis.metrics.cost import add_prices
from analysis.questions import QUESTION, add_lengths, describe_choice, tell_apart
from analysis.report.caveats import ControlPointDrift, find_drifts
from analysis.report.provenance import Provenance, build_provenance
from analysis.results import Results
from analysis.scaling.best import Best, best
from analysis.scaling.crossover import Crossover, find_crossovers
from analysis.scaling.curves import ScalingCurve, build_curves
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.record import Circumstance
from bench.core.store import Unreadable


class ReportFindings(NamedTuple):
    """Findings of a set of runs. `rows`: the rows of `table` as plain values."""

    results: Results
    table: pd.DataFrame
    summary: pd.DataFrame
    rows: Sequence[Row]
    best: Sequence[Best]
    curves: Sequence[ScalingCurve]
    crossovers: Sequence[Crossover]
    drifts: Sequence[ControlPointDrift]
    origin: Provenance
    questions: tuple[str, ...]  # of the studies, in their own words

    def list_configurations(self, most: int) -> list[Row]:
        """Return the first rows of the summary, with a protocol where rows would have the same name."""
        rows = list_rows(self.summary[:most])
        return tell_apart(rows, self.results.specs, _name_row)


def _name_row(row: Row) -> tuple[Any, ...]:
    """Return the name of a row of the summary: its question and its choice."""
    known = add_lengths(row)
    return *(known[part] for part in QUESTION), describe_choice(row)


def compute_findings(results: Results, price: float | None = None) -> ReportFindings:
    """Return the findings of a set of runs. `price`: per device and hour, in the user's currency."""
    table, summary = results.table, results.summary
    if price is not None:
        table, summary = add_prices(table, price), add_prices(summary, price)
    around = list(_read_circumstances(results))
    return ReportFindings(
        results=results,
        table=table,
        summary=summary,
        rows=list_rows(table),
        best=best(results),
        curves=build_curves(results),
        crossovers=find_crossovers(results),
        drifts=find_drifts(results),
        origin=build_provenance(results, [one.machine for one in around]),
        questions=tuple(dict.fromkeys(one.question for one in around if one.question)),
    )


def _read_circumstances(results: Results) -> Iterable[Circumstance]:
    """Yield the circumstance of the first run of every study, machine and environment class."""
    firsts = ~results.table.duplicated(["study", "machine", "environment_id"])
    for place in firsts.to_numpy().nonzero()[0]:
        try:
            yield results.record(int(place)).circumstance
        except (OSError, Unreadable):  # its file is gone
            continue
