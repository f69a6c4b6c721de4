"""Results: the run table of records that were read and judged next to each other, with the steps and specs behind
it."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from analysis.columns import LATER, LEARNED, list_all_columns, list_columns
from analysis.flags import DISTURBED, FLAGS
from analysis.questions import describe_variants
from analysis.reading import FoundRows, Reading, find_rows
from analysis.reading.extraction import Follow
from analysis.reading.rows import (
    FILE,
    TRACES,
    RecordFile,
    RecordRows,
    build_cases,
    build_row,
    build_schema,
    compute_invalid_cells,
    split_table,
)
from analysis.searches import MeasuredSearch, find_searches
from analysis.summary import ANSWERING, KEY, Row, select_answering, summarise
from analysis.table import group_by, list_rows, to_pandas
from analysis.verify import build_invalid_outcome, judge
from bench.core.errors import make_printable
from bench.core.formatting import format_count
from bench.core.record import Outcome, RunRecord
from bench.core.spec import RunSpec
from bench.core.store import Unreadable, read_record

_log = logging.getLogger(__name__)

Runs = dict[str, list[float]]
"""Timed steps of the runs behind a row of the summary, in seconds and in order, by allocation.

Runs of one allocation are not independent and are joined. A run outside of any job has an allocation of its own, named
after its folder.
"""


@dataclass(frozen=True)
class Results:
    """A set of runs.

    table       one row per run, in a readable order; `analysis.columns` documents its columns
    skipped     files that are no records, with the reason
    unfinished  attempts without a record
    keeps_disturbed
                whether the times of disturbed runs count like all others; see `with_disturbed`
    """

    table: pd.DataFrame
    skipped: tuple[Unreadable, ...]
    unfinished: tuple[Path, ...]
    _rows: RecordRows
    _outcomes: Mapping[int, Outcome]  # by place in the table, where they differ from the record's
    _load: Callable[[Path], RunRecord]
    keeps_disturbed: bool = False

    @functools.cached_property
    def with_disturbed(self) -> "Results":
        """The same runs, with runs that carry a flag of `analysis.flags.DISTURBED` counted like all others.

        For times only in a paired comparison, because background load during a round changes both of its sides; and for
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
        """Values per run that a table cannot hold, in the order of the table; empty where unknown.

        `file` (of the record), `spec` and `environment` (JSON; environment None if unknown), `step_s` (seconds of every
        stored step, warm-up included), `cut` (index of the first timed step), `own_s` (per rank, seconds per step
        outside collectives) and `rank_peak_bytes` (per rank, peak allocated over steady steps).
        """
        cells = {FILE: self._files} | {name: self._traces.column(name) for name in TRACES}
        frame = {name.removeprefix("trace_"): _list_values(column) for name, column in cells.items()}
        return pd.DataFrame(frame, dtype=object)

    @functools.cached_property
    def summary(self) -> pd.DataFrame:
        """One row per configuration, machine, environment class and kind of evidence (`analysis.summary`)."""
        return summarise(self.table, describe_variants(self.specs), keep_disturbed=self.keeps_disturbed)

    @functools.cached_property
    def specs(self) -> dict[str, RunSpec]:
        """Specs by config_id."""
        # specs are parsed once per configuration: parsing is slow, and repeats have equal specs
        places = self.table["config_id"].drop_duplicates(keep="last").index
        texts = self._traces.column("trace_spec").take(pa.array(places)).to_pylist()
        return dict(zip(self.table["config_id"].loc[places], map(RunSpec.model_validate_json, texts), strict=True))

    def list_environments(self) -> list[str]:
        """Return the distinct environments of the runs as JSON, in the order of the table."""
        texts: list[str] = self._traces.column("trace_environment").unique().drop_null().to_pylist()
        return texts

    def get_file(self, place: int) -> Path:
        """Return the file of the record of a run of the table."""
        return Path(self._files[place].as_py())

    def record(self, row: int) -> RunRecord:
        """Read the whole record of a row of the table again, and return it with the outcome of the table."""
        record = self._load(self.get_file(row))
        return record.model_copy(update={"outcome": self._outcomes.get(row, record.outcome)})

    def runs(self, row: Row) -> Runs:
        """Return the steps behind a row of the summary; empty if n is 0 or all of its runs were disturbed."""
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
            known = self._traces.column("trace_environment")[place].as_py()
            hosts.setdefault(self.allocation(place), set()).update(json.loads(known).get("hosts", ()) if known else ())
        return hosts

    def is_disturbed(self, place: int) -> bool:
        """Return whether the times of a run of the table are excluded (`analysis.flags.DISTURBED`)."""
        return not self.keeps_disturbed and place in self._disturbed

    def window(self, place: int) -> list[float]:
        """Return the timed steps of a run of the table, in seconds and in order.

        They are scaled to add up to the window. Older records of several ranks kept no step times of single ranks, and
        their steps add up to more.
        """
        steps, cut = (self._traces.column(f"trace_{name}")[place].as_py() for name in ("step_s", "cut"))
        timed: list[float] = steps[cut:]
        total, window_s = math.fsum(timed), float(self._window_s[place])
        if not (total and window_s > 0) or math.isclose(total, window_s):
            return timed
        return [seconds * (window_s / total) for seconds in timed]

    def behind(self, row: Row) -> list[int]:
        """Return the places in the table of the runs behind a row of the summary, in the order in which they ran."""
        return self._behind.get(itemgetter(*KEY)(row), [])

    def allocation(self, place: int) -> str:
        """Return the allocation of a run of the table; the run's folder if it was outside of any job."""
        allocation: str | None = self._rows.core.column("allocation")[place].as_py()
        return allocation or str(self.get_file(place).parent)

    @functools.cached_property
    def searches(self) -> tuple[MeasuredSearch, ...]:
        """The searches whose folders hold the records."""
        return find_searches(Path(file) for file in self._files.to_pylist())

    @functools.cached_property
    def _disturbed(self) -> frozenset[int]:
        flags = enumerate(self.table["flags"].tolist())
        return frozenset(place for place, raised in flags if not set(DISTURBED).isdisjoint(str(raised).split()))

    @functools.cached_property
    def _window_s(self) -> NDArray[np.float64]:
        """Seconds of every row's window; NaN for a row without a window."""
        table = self.table
        return (table["sample_s"] * table["global_batch"] * table["n_steps"]).to_numpy(float, na_value=np.nan)

    @property
    def _files(self) -> pa.ChunkedArray:
        return self._rows.core.column(FILE)

    @functools.cached_property
    def _traces(self) -> pa.Table:
        return self._rows.traces().combine_chunks()

    @functools.cached_property
    def _behind(self) -> dict[tuple[Any, ...], list[int]]:
        rows = (cells | {"place": place} for place, cells in enumerate(list_rows(self.table[[*KEY, *ANSWERING]])))
        return {
            key: [row["place"] for row in select_answering(members, keep_disturbed=self.keeps_disturbed)]
            for key, members in group_by(rows, itemgetter(*KEY)).items()
        }


def read(paths: Iterable[str | Path], follow: Follow = lambda read, files: None) -> Results:
    """Read and judge every record at or below `paths`; `follow` is the progress callback.

    Raises UserError for a path that does not exist.
    """
    return _judge_rows(find_rows((Path(path) for path in paths), follow), read_record)


def judge_records(found: Reading) -> Results:
    """Return the results of records in memory."""
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
    """Return the run table of rows, compared with the reference runs among them (`analysis.verify`).

    Few runs are judged invalid, so their changed cells are computed from their records, which `load` reads again.
    """
    core = found.rows.core
    unverified, mismatches = judge(build_cases(core))
    # optional columns only if some run needs them, so that tables of simple sets stay small
    optional = [name for name, first in LATER.items() if core.column(name).unique().to_pylist() not in ([], [first])]
    optional += [name for name in LEARNED if core.column(name).null_count < len(core)]
    table = to_pandas(core.select([*list_columns(), *optional]))
    table["flags"] = _add_unverified_flags(core.column("flags"), unverified)
    outcomes = {
        one.place: build_invalid_outcome(one, table["config_id"].iat[one.reference], table["precision"].iat[one.place])
        for one in mismatches
    }
    changes = {place: _compute_changes(Path(core.column(FILE)[place].as_py()), load) for place in outcomes}
    _invalidate(table, changes, outcomes)
    return Results(table, found.skipped, found.unfinished, found.rows, outcomes, load)


def _compute_changes(file: Path, load: Callable[[Path], RunRecord]) -> dict[str, Any]:
    try:
        return compute_invalid_cells(load(file))
    except (OSError, Unreadable):  # the record is gone by now: none of its numbers may remain
        return {name: None for name, column in list_all_columns().items() if column.kind == "number"}


def _add_unverified_flags(raised: pa.ChunkedArray, unverified: NDArray[np.bool_]) -> pd.Series:
    """Return the flags of runs, with `unverified` added in the order of FLAGS; few distinct texts, so by dictionary."""
    encoded = raised.combine_chunks().dictionary_encode()
    known = encoded.dictionary.to_pylist()
    more = [" ".join(name for name in FLAGS if name in {*text.split(), "unverified"}) for text in known]
    places = encoded.indices.to_numpy() + len(known) * unverified
    flags: pd.Series = to_pandas(pa.array([*known, *more], pa.string()).take(pa.array(places)))
    return flags


def _invalidate(table: pd.DataFrame, changes: Mapping[int, Mapping[str, Any]], outcomes: Mapping[int, Outcome]) -> None:
    """Write the changed cells of invalid runs into the table, equal cells at once: single writes are slow."""
    single = ((place, change) for place, cells in changes.items() for change in cells.items())
    for (name, cell), group in group_by(single, itemgetter(1)).items():
        table.loc[[place for place, _ in group], name] = cell
    table.loc[list(outcomes), "outcome"] = "invalid"
    table.loc[list(outcomes), "reason"] = [outcome.reason for outcome in outcomes.values()]


def _list_values(column: pa.ChunkedArray) -> list[Any]:
    """Return plain values, lists as tuples."""
    values = column.to_pylist()
    return [tuple(value) for value in values] if pa.types.is_list(column.type) else values
