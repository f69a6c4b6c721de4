"""What was read and judged: the run table, and beside each of its rows what a table cannot hold."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from analysis.columns import list_all_columns
from analysis.flags import DISTURBED
from analysis.reading import FoundRows, Reading, find_rows
from analysis.reading.extraction import Follow
from analysis.reading.rows import FILE, TRACES, RecordFile, RecordRows, build_row, build_schema, split_table
from analysis.searches import MeasuredSearch, find_searches
from analysis.summary import ANSWERING, KEY, Row, select_answering, summarise
from analysis.table import judge_table, list_rows
from analysis.variants import describe_variants
from bench.core.errors import make_printable
from bench.core.formatting import format_count
from bench.core.record import Outcome, RunRecord
from bench.core.spec import RunSpec
from bench.core.store import Unreadable, read_record

_log = logging.getLogger(__name__)

Runs = dict[str, list[float]]
"""The timed steps of the runs behind a row of the summary, in seconds and in their order, by allocation. Runs that
share one are not independent and stand in a row; one outside of any job has its own, named after its folder."""


@dataclass(frozen=True)
class Results:
    """A set of runs.

    table       one row per run, in the order in which people look for them; `analysis.columns` documents its columns
    skipped     files that are no record, and why
    unfinished  attempts without a record
    keeps_disturbed
                whether the times of disturbed runs count like all others; see `with_disturbed`
    """

    table: pd.DataFrame
    skipped: tuple[Unreadable, ...]
    unfinished: tuple[Path, ...]
    _rows: RecordRows
    _outcomes: Mapping[int, Outcome]  # by place, where it is not what the record says
    _load: Callable[[Path], RunRecord]
    keeps_disturbed: bool = False

    @functools.cached_property
    def with_disturbed(self) -> "Results":
        """The same runs, those that carry a flag of `analysis.flags.DISTURBED` among the numbers like all others.

        For times only in a paired comparison, since background load during a round changes both of its sides. And for
        counts that background load does not change, such as bytes moved.
        """
        return dataclasses.replace(self, keeps_disturbed=True)

    def take(self, places: Sequence[int]) -> "Results":
        """Return the runs at these places of the table, with the judgements that all runs together gave."""
        outcomes = {new: self._outcomes[old] for new, old in enumerate(places) if old in self._outcomes}
        table, rows = (
            self.table.iloc[list(places)].reset_index(drop=True),
            self._rows.take(pa.array(places, pa.int64())),
        )
        return dataclasses.replace(self, table=table, _rows=rows, _outcomes=outcomes)

    @functools.cached_property
    def traces(self) -> pd.DataFrame:
        """Return the rows of the table again, a column each for what a table cannot hold: `file` (of the record),
        `spec` and `environment` (JSON; environment None where it is unknown), `step_s` (seconds of every stored step,
        warm-up included), `cut` (index of the first timed one), `own_s` (per rank, in a step outside its collectives)
        and `rank_peak_bytes` (per rank, peak allocated over steady steps), empty where unknown."""
        cells = {FILE: self._files} | {name: self._traces.column(name) for name in TRACES}
        frame = {name.removeprefix("trace_"): _list_values(column) for name, column in cells.items()}
        return pd.DataFrame(frame, dtype=object)

    @functools.cached_property
    def summary(self) -> pd.DataFrame:
        """One row per configuration, machine, environment class and kind of evidence (`analysis.summary`)."""
        return summarise(self.table, describe_variants(self.specs), keep_disturbed=self.keeps_disturbed)

    @functools.cached_property
    def specs(self) -> dict[str, RunSpec]:
        """What was measured, by config_id."""
        places = self.table["config_id"].drop_duplicates(keep="last").index
        texts = self._traces.column("trace_spec").take(pa.array(places)).to_pylist()
        return dict(zip(self.table["config_id"].loc[places], map(RunSpec.model_validate_json, texts), strict=True))

    def list_environments(self) -> list[str]:
        """Return the environments of the runs as JSON, each once, in the order of the table."""
        texts: list[str] = self._traces.column("trace_environment").unique().drop_null().to_pylist()
        return texts

    def find_environment(self, place: int) -> str | None:
        """Return the environment of a run of the table as JSON; None where it is unknown."""
        text: str | None = self._traces.column("trace_environment")[place].as_py()
        return text

    def get_file(self, place: int) -> Path:
        """Return the file of the record of a run of the table."""
        return Path(self._files[place].as_py())

    def record(self, row: int) -> RunRecord:
        """Return the whole record of a row of the table, read again from its file, with the outcome of the table."""
        record = self._load(self.get_file(row))
        return record.model_copy(update={"outcome": self._outcomes.get(row, record.outcome)})

    def runs(self, row: Row) -> Runs:
        """Return the steps behind a row of the summary: those of its n runs, none where n is 0 or where all of these
        carry a flag of `analysis.flags.DISTURBED`."""
        found: Runs = {}
        for place in self.list_timed(row):
            if steps := self.window(place):
                found.setdefault(self.allocation(place), []).extend(steps)
        return found

    def list_timed(self, row: Row) -> list[int]:
        """Return the places in the table of the runs behind a row of the summary whose times count."""
        return [place for place in self.behind(row) if not self.is_disturbed(place)]

    def find_hosts(self, row: Row) -> dict[str, set[str]]:
        """Return the hosts of the runs behind a row of the summary whose times count, by allocation."""
        hosts: dict[str, set[str]] = {}
        for place in self.list_timed(row):
            known = self.find_environment(place)
            hosts.setdefault(self.allocation(place), set()).update(json.loads(known).get("hosts", ()) if known else ())
        return hosts

    def is_disturbed(self, place: int) -> bool:
        """Whether the times of a run of the table count for nothing (`analysis.flags.DISTURBED`)."""
        return not self.keeps_disturbed and place in self._disturbed

    def window(self, place: int) -> list[float]:
        """Return the timed steps of a run of the table, in seconds and in their order.

        They add up to its window, which says what they cost: the steps of an older record of several ranks add up to
        more, where no rank's own were kept.
        """
        steps, cut = (self._traces.column(f"trace_{name}")[place].as_py() for name in ("step_s", "cut"))
        timed: list[float] = steps[cut:]
        total, window_s = math.fsum(timed), float(self._window_s[place])
        if not (total and window_s > 0) or math.isclose(total, window_s):
            return timed
        return [seconds * (window_s / total) for seconds in timed]

    @functools.cached_property
    def _disturbed(self) -> frozenset[int]:
        """The places in the table of runs with a flag of `analysis.flags.DISTURBED`."""
        flags = enumerate(self.table["flags"].tolist())
        return frozenset(place for place, raised in flags if not set(DISTURBED).isdisjoint(str(raised).split()))

    @functools.cached_property
    def _window_s(self) -> NDArray[np.float64]:
        """The seconds of every row's window; NaN where it has none."""
        table = self.table
        return (table["sample_s"] * table["global_batch"] * table["n_steps"]).to_numpy(float, na_value=np.nan)

    def behind(self, row: Row) -> list[int]:
        """Return the places in the table of the runs behind a row of the summary, in the order in which they ran."""
        return self._behind.get(tuple(row[name] for name in KEY), [])

    def allocation(self, place: int) -> str:
        """Return the allocation of a run of the table; one outside of any job has its own, named after its folder."""
        allocation: str | None = self._rows.core.column("allocation")[place].as_py()
        return allocation or str(self.get_file(place).parent)

    @functools.cached_property
    def searches(self) -> tuple[MeasuredSearch, ...]:
        """The searches in whose folders the records lie."""
        return find_searches(Path(file) for file in self._files.to_pylist())

    @property
    def _files(self) -> pa.ChunkedArray:
        return self._rows.core.column(FILE)

    @functools.cached_property
    def _traces(self) -> pa.Table:
        return self._rows.traces().combine_chunks()

    @functools.cached_property
    def _behind(self) -> dict[tuple[Any, ...], list[int]]:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for place, cells in enumerate(list_rows(self.table[[*KEY, *ANSWERING]])):
            groups.setdefault(tuple(cells[name] for name in KEY), []).append(cells | {"place": place})
        return {
            key: [cells["place"] for cells in select_answering(rows, keep_disturbed=self.keeps_disturbed)]
            for key, rows in groups.items()
        }


def read(paths: Iterable[str | Path], follow: Follow = lambda read, files: None) -> Results:
    """Read and judge every record at or below `paths`; `follow` hears how many are read. UserError for a path that is
    not there."""
    found = find_rows((Path(path) for path in paths), follow)
    return _judge_rows(found, read_record)


def judge_records(found: Reading) -> Results:
    """Return the results of records in memory; they are judged beside each other (`analysis.verify`)."""
    known, by_path = list_all_columns(), {str(file): record for file, record in found.records.items()}
    cells = [build_row(RecordFile(path), record, known) for path, record in by_path.items()]
    table = pa.Table.from_pylist(cells, build_schema())
    return _judge_rows(FoundRows(split_table(table), found.skipped, found.unfinished), lambda path: by_path[str(path)])


_MOST_WARNED = 3
"""Skipped files, and attempts without a record, up to which a warning names all."""


def warn(found: Reading | Results) -> None:
    """Warn of skipped files and of attempts without a record: their numbers, and the first few of each."""
    read = len(found.records if isinstance(found, Reading) else found.table)
    skipped = f"skipped as no record: {len(found.skipped)} of {len(found.skipped) + read} files"
    unfinished = f"without a record yet: {format_count(len(found.unfinished), 'attempt')}"
    for text, things in ((skipped, found.skipped), (unfinished, found.unfinished)):
        if things:
            _log.warning(text)
        for thing in things[:_MOST_WARNED]:
            _log.warning("  %s", make_printable(str(thing)))
        if len(things) > _MOST_WARNED:
            _log.warning("  … and %d more", len(things) - _MOST_WARNED)


def _judge_rows(found: FoundRows, load: Callable[[Path], RunRecord]) -> Results:
    table, outcomes = judge_table(found.rows.core, load)
    return Results(table, found.skipped, found.unfinished, found.rows, outcomes, load)


def _list_values(column: pa.ChunkedArray) -> list[Any]:
    """Return plain values, those of lists as tuples."""
    values = column.to_pylist()
    return [tuple(value) for value in values] if pa.types.is_list(column.type) else values
