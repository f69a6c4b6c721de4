"""What was read and judged: the run table, and beside each of its rows what a table cannot hold."""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.reading import Reading
from analysis.reading import read as read_records
from analysis.summary import KEY, Row, answering, summarise
from analysis.table import plain, table_of
from analysis.variants import variants
from analysis.verify import Verdict, verify
from bench.record import RunRecord
from bench.spec import RunSpec
from bench.store import Unreadable, read_record

_TRACES = ("file", "spec", "environment", "step_s", "cut", "own_s", "rank_peak_bytes")

Runs = dict[str, list[float]]
"""The timed steps of the runs behind a row of the summary, in seconds and in their order, by allocation. Runs that
share one are not independent and stand in a row; one outside of Slurm has its own, named after its folder."""


@dataclass(frozen=True)
class Results:
    """A set of runs.

    table   one row per run, in the order in which people look for them; `analysis.columns` documents its columns
    traces  the same rows, a column each for what a table cannot hold: `file` (of the record), `spec` and `environment`
            (JSON; environment None where it is unknown), `step_s` (seconds of every stored step, warm-up included),
            `cut` (index of the first timed one), `own_s` (per rank, in a step outside its collectives) and
            `rank_peak_bytes` (per rank, peak allocated over steady steps), empty where unknown
    """

    table: pd.DataFrame
    traces: pd.DataFrame
    skipped: tuple[Unreadable, ...] = ()
    unfinished: tuple[Path, ...] = ()

    @functools.cached_property
    def summary(self) -> pd.DataFrame:
        """One row per configuration, machine, environment class and kind of evidence (`analysis.summary`)."""
        return summarise(self.table, variants(self.specs))

    @functools.cached_property
    def specs(self) -> dict[str, RunSpec]:
        """What was measured, by config_id."""
        texts = dict(zip(self.table["config_id"], self.traces["spec"], strict=True))
        return {str(config_id): RunSpec.model_validate(json.loads(text)) for config_id, text in texts.items()}

    def record(self, row: int) -> RunRecord:
        """Return the whole record of a row of the table, read again from its file."""
        return read_record(Path(self.traces["file"].iloc[row]))

    def runs(self, row: Row) -> Runs:
        """Return the steps behind a row of the summary: those of its n runs, none where n is 0."""
        found: Runs = {}
        for place in self._behind.get(_key(row), ()):
            trace = self.traces.iloc[place]
            allocation = self.table["allocation"].iloc[place]
            name = str(Path(trace["file"]).parent) if pd.isna(allocation) else str(allocation)
            found.setdefault(name, []).extend(trace["step_s"][trace["cut"] :])
        return found

    @functools.cached_property
    def _behind(self) -> dict[tuple[Any, ...], list[int]]:
        """By key of the summary, the rows of the table that its numbers come from, in the order in which they ran."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for place, row in enumerate(plain(self.table)):
            groups.setdefault(_key(row), []).append(row | {"place": place})
        return {key: [row["place"] for row in answering(rows)] for key, rows in groups.items()}


def read(paths: Iterable[str | Path]) -> Results:
    """Read and judge every record at or below `paths`; UserError for a path that is not there."""
    return judged(read_records(Path(path) for path in paths))


def judged(found: Reading) -> Results:
    """Return the results of what was read; records are judged beside each other (`analysis.verify`)."""
    return of_verdicts(verify(list(found.records.values())), found)


def of_verdicts(verdicts: Sequence[Verdict], found: Reading) -> Results:
    """Return the results of what was read and judged, in that order."""
    traces = [_trace(verdict.record, file) for verdict, file in zip(verdicts, found.records, strict=True)]
    frame = pd.DataFrame({name: pd.Series([trace[name] for trace in traces], dtype=object) for name in _TRACES})
    return Results(table_of(verdicts), frame, found.skipped, found.unfinished)


def _trace(record: RunRecord, file: Path) -> dict[str, Any]:
    observed = record.observations
    steps = observed.steps if observed else None
    return {
        "file": str(file),
        "spec": record.spec.model_dump_json(),
        "environment": record.environment.model_dump_json() if record.environment else None,
        "step_s": steps.step_s if steps else (),
        "cut": steps.cut if steps else 0,
        "own_s": observed.outside_collectives_s if observed else (),
        "rank_peak_bytes": tuple(rank.peak_allocated_bytes for rank in observed.memory) if observed else (),
    }


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)
