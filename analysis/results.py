"""Results: the run table of a set of records, with the specs and step times that its rows were computed from."""

import dataclasses
import functools
import json
import logging
import math
from collections import Counter
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
from analysis.reading import FoundRows, find_rows
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
from analysis.summary import ANSWERING, KEY, Row, compute_seed_means, list_last_outcomes, select_answering, summarise
from analysis.table import group_by, list_rows, to_pandas
from analysis.verify import build_invalid_outcome, judge
from bench.core.errors import make_printable
from bench.core.record import Outcome, RunRecord
from bench.core.spec import RunSpec, config_id
from bench.core.store import Unreadable, read_record

_log = logging.getLogger(__name__)

Runs = dict[str, list[float]]
"""Timed steps of the runs that a summary row combines: the seconds of the steps in order, by allocation.

An allocation is one start of a Slurm job. Runs of one allocation are not independent, so their steps are joined. A run
outside of any job counts as an allocation of its own, named after its folder.
"""


@dataclass(frozen=True)
class Results:
    """A set of runs: the run table, and access to the records and step times behind its rows.

    table       the run table: one row per run, sorted by study, model, ranks and so on (see `analysis.columns`)
    skipped     files that could not be read as records, with the reason
    unfinished  folders of attempts (tries at a run) that have no record yet
    copies      number of records that were left out, because they are copies of another record
    keeps_disturbed
                True if the times of disturbed runs count like all others; see `with_disturbed`
    """

    table: pd.DataFrame
    skipped: tuple[Unreadable, ...]
    unfinished: tuple[Path, ...]
    _rows: RecordRows
    _outcomes: Mapping[int, Outcome]  # by row number, for runs whose outcome differs from that in the record
    _load: Callable[[Path], RunRecord]
    copies: int = 0
    keeps_disturbed: bool = False

    def __repr__(self) -> str:
        return f"<Results: {self.describe()}>"

    def describe(self) -> str:
        """Return the numbers of runs and configurations, and how often each flag was raised, in one line."""
        counts = Counter(flag for flags in self.table["flags"] for flag in str(flags).split())
        flags = ", ".join(f"{count:,} {flag}" for flag, count in counts.most_common())
        ok, configurations = int((self.table["outcome"] == "ok").sum()), len(self.configurations)
        runs = f"{len(self.table):,} runs of {configurations:,} configurations, {ok:,} ok"
        other = {"unreadable": len(self.skipped), "unfinished": len(self.unfinished), "copies left out": self.copies}
        return "; ".join([runs, f"flags: {flags or 'none'}", *(f"{n:,} {name}" for name, n in other.items() if n)])

    @functools.cached_property
    def with_disturbed(self) -> "Results":
        """The same runs, but the times of disturbed runs (flags in `analysis.flags.DISTURBED`, such as `busy`) count
        like all others.

        Use these results for times in a paired comparison, because background load then affects both compared
        configurations. Use them also for values that background load does not change, such as bytes moved.
        """
        return dataclasses.replace(self, keeps_disturbed=True)

    def take(self, places: Sequence[int]) -> "Results":
        """Return results of the runs with these row numbers only. Outcomes and flags of these runs do not change,
        although some of them depend on a comparison with other runs of the whole set."""
        outcomes = {new: self._outcomes[old] for new, old in enumerate(places) if old in self._outcomes}
        table, rows = self.table.iloc[list(places)].reset_index(drop=True), pa.array(places, pa.int64())
        return dataclasses.replace(self, table=table, _rows=self._rows.take(rows), _outcomes=outcomes)

    @functools.cached_property
    def traces(self) -> pd.DataFrame:
        """Values per run that do not fit into the run table, with one row per run in the order of the run table.
        Unknown values are empty.

        `file` is the path of the record. `spec` and `environment` are JSON texts; the environment may be None. `step_s`
        holds the seconds of every recorded step, warm-up included, and `cut` is the index of the first timed step.
        `own_s` holds the seconds per step that each rank spends outside collectives. `rank_peak_bytes` holds each
        rank's peak of allocated bytes after warm-up.
        """
        cells = {FILE: self._files} | {name: self._traces.column(name) for name in TRACES}
        frame = {name.removeprefix("trace_"): _list_values(column) for name, column in cells.items()}
        return pd.DataFrame(frame, dtype=object)

    @functools.cached_property
    def summary(self) -> pd.DataFrame:
        """The summary table (`analysis.summary`). It has a row for each combination of configuration, machine,
        environment class (hash of device and software versions) and evidence (measured, rehearsed or only predicted).
        """
        variants = describe_variants(self.configurations)
        return summarise(self.pooled_table, variants, keep_disturbed=self.keeps_disturbed)

    @functools.cached_property
    def specs(self) -> dict[str, RunSpec]:
        """The spec (settings) of each run, as a mapping from config_id to spec."""
        # one spec is parsed per configuration, because parsing is slow and repeats have equal specs
        places = self.table["config_id"].drop_duplicates(keep="last").index
        texts = self._traces.column("trace_spec").take(pa.array(places)).to_pylist()
        return dict(zip(self.table["config_id"].loc[places], map(RunSpec.model_validate_json, texts), strict=True))

    @functools.cached_property
    def configuration_ids(self) -> dict[str, str]:
        """Mapping from the config_id of a training to the config_id that the summary uses for the training's
        configuration. Runs that are not trainings have no entry.

        Trainings that differ only in their seed are repeats of one configuration. The summary uses the config_id of the
        training with the lowest seed.
        """
        if "learning_rate" not in self.table:  # no run is a training, so no spec has to be parsed
            return {}
        trainings = {one: spec for one, spec in self.specs.items() if spec.learning.tokens is not None}
        groups = group_by(trainings, lambda one: config_id(_drop_seed(trainings[one])))
        first = [min(members, key=lambda one: trainings[one].seed) for members in groups.values()]
        return {one: lowest for lowest, members in zip(first, groups.values(), strict=True) for one in members}

    @functools.cached_property
    def configurations(self) -> dict[str, RunSpec]:
        """The spec of each configuration, by the config_id that the summary uses. Trainings have seed 0 here, because
        trainings that differ only in their seed are one configuration."""
        return {
            one: _drop_seed(spec) if one in self.configuration_ids else spec
            for one, spec in self.specs.items()
            if self.configuration_ids.get(one, one) == one
        }

    @property
    def pooled_table(self) -> pd.DataFrame:
        """The run table, in which trainings that differ only in their seed have the same config_id. The summary is
        computed from this table, so that such trainings count as repeats of one configuration."""
        if not self.configuration_ids:
            return self.table
        return self.table.assign(config_id=self.table["config_id"].replace(self.configuration_ids))

    def find_losses(self, row: Row) -> dict[int, float]:
        """Return the final held-out loss of each seed, for the trainings that a summary row combines. If a seed has
        several repeats, the mean of their losses is returned. Disturbed runs are included, because their losses are
        valid."""
        places = self.with_disturbed.behind(row)
        return compute_seed_means(list_rows(self.table[["seed", "validation_loss"]].iloc[places]), "validation_loss")

    def list_data(self, row: Row) -> list[str]:
        """Return the distinct hashes of the data of the runs that a summary row combines, sorted. Equal files have
        equal hashes; data without files have none."""
        hashes = self._rows.core.column("run_data")
        return sorted({hashes[place].as_py() for place in self.with_disturbed.behind(row)} - {""})

    def list_environments(self) -> list[str]:
        """Return the distinct environments of the runs as JSON texts, in the order of the run table."""
        texts: list[str] = self._traces.column("trace_environment").unique().drop_null().to_pylist()
        return texts

    def get_file(self, place: int) -> Path:
        """Return the path of the record of the run in row number `place`."""
        return Path(self._files[place].as_py())

    def list_places(self) -> dict[Path, int]:
        """Return the row number of each run in the run table, by the run's folder."""
        return {Path(file).parent: place for place, file in enumerate(self._files.to_pylist())}

    @property
    def deviating(self) -> frozenset[int]:
        """Row numbers of the runs that ended `ok`, but are `invalid` because they deviate from a reference run."""
        return frozenset(self._outcomes)

    def get_start(self, place: int) -> str:
        """Return the start of the run in row number `place`, in UTC as ISO 8601; empty if it is unknown."""
        return str(self._rows.core.column("run_started_at")[place].as_py())

    def record(self, row: int) -> RunRecord:
        """Read the complete record of the run in row number `row` of the run table. The outcome of the run table
        replaces the outcome in the record, because the run may have been judged invalid later."""
        record = self._load(self.get_file(row))
        return record.model_copy(update={"outcome": self._outcomes.get(row, record.outcome)})

    def runs(self, row: Row) -> Runs:
        """Return the timed steps of the runs that a summary row combines. Empty if no run ended ok (n is 0), or if all
        runs were disturbed."""
        found: Runs = {}
        for place in self.list_timed(row):
            if steps := self.window(place):
                found.setdefault(self.allocation(place), []).extend(steps)
        return found

    def list_timed(self, row: Row) -> list[int]:
        """Return the row numbers of the runs that a summary row combines, without runs whose times are excluded."""
        return [place for place in self.behind(row) if not self.is_disturbed(place)]

    def find_hosts(self, row: Row) -> dict[str, set[str]]:
        """Return the host names of each allocation, for the runs that a summary row combines. Runs whose times are
        excluded are skipped."""
        hosts: dict[str, set[str]] = {}
        for place in self.list_timed(row):
            known = self._traces.column("trace_environment")[place].as_py()
            hosts.setdefault(self.allocation(place), set()).update(json.loads(known).get("hosts", ()) if known else ())
        return hosts

    def is_disturbed(self, place: int) -> bool:
        """Return True if the times of the run in row number `place` are excluded (`analysis.flags.DISTURBED`)."""
        return not self.keeps_disturbed and place in self._disturbed

    def window(self, place: int) -> list[float]:
        """Return the times of the timed steps of the run in row number `place`, in seconds and in order.

        The times are scaled so that their sum equals the duration of the window of timed steps. This matters for a
        record of version 1 with several ranks, if the record's file `steps.parquet` is lost. The remaining step times
        are maxima over ranks, and the sum of these maxima exceeds the duration.
        """
        steps, cut = (self._traces.column(f"trace_{name}")[place].as_py() for name in ("step_s", "cut"))
        timed: list[float] = steps[cut:]
        total, window_s = math.fsum(timed), float(self._window_s[place])
        if not (total and window_s > 0) or math.isclose(total, window_s):
            return timed
        return [seconds * (window_s / total) for seconds in timed]

    def behind(self, row: Row) -> list[int]:
        """Return the row numbers of the runs that a summary row combines, in the order in which they ran."""
        return self._behind.get(itemgetter(*KEY)(row), [])

    def list_excluded(self, row: Row) -> list[int]:
        """Return the row numbers of the runs of a configuration that ended ok, but whose times are excluded."""
        found = self._behind_with_disturbed.get(itemgetter(*KEY)(row), [])
        return [place for place in found if self.is_disturbed(place)]

    def list_outcomes(self, row: Row) -> list[str]:
        """Return the outcome of each repeat of a configuration; `drill` for a run with an injected fault."""
        return self._last_outcomes.get(itemgetter(*KEY)(row), [])

    def allocation(self, place: int) -> str:
        """Return the allocation of the run in row number `place`, or the folder of a run outside of any job."""
        allocation: str | None = self._rows.core.column("allocation")[place].as_py()
        return allocation or str(self.get_file(place).parent)

    @functools.cached_property
    def searches(self) -> tuple[MeasuredSearch, ...]:
        """The searches (of `zeroscale search`) whose study folders contain records of this set."""
        return find_searches(Path(file) for file in self._files.to_pylist())

    @functools.cached_property
    def _disturbed(self) -> frozenset[int]:
        flags = enumerate(self.table["flags"].tolist())
        return frozenset(place for place, raised in flags if not set(DISTURBED).isdisjoint(str(raised).split()))

    @functools.cached_property
    def _window_s(self) -> NDArray[np.float64]:
        """Duration of the timed steps of each run in seconds, shape (rows,); NaN for a run without timed steps."""
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
        return self._select_places(keep_disturbed=self.keeps_disturbed)

    @functools.cached_property
    def _behind_with_disturbed(self) -> dict[tuple[Any, ...], list[int]]:
        return self._select_places(keep_disturbed=True)

    @functools.cached_property
    def _last_outcomes(self) -> dict[tuple[Any, ...], list[str]]:
        rows = list_rows(self.pooled_table[[*KEY, *ANSWERING]])
        return {key: list_last_outcomes(members) for key, members in group_by(rows, itemgetter(*KEY)).items()}

    def _select_places(self, *, keep_disturbed: bool) -> dict[tuple[Any, ...], list[int]]:
        table = self.pooled_table[[*KEY, *ANSWERING]]
        rows = (cells | {"place": place} for place, cells in enumerate(list_rows(table)))
        return {
            key: [row["place"] for row in select_answering(members, keep_disturbed=keep_disturbed)]
            for key, members in group_by(rows, itemgetter(*KEY)).items()
        }


def read(paths: Iterable[str | Path], follow: Follow = lambda read, files: None) -> Results:
    """Return the results of all records at or below `paths`. `follow` is the progress callback.

    Raise UserError for a path that does not exist.
    """
    return _judge_rows(find_rows((Path(path) for path in paths), follow), read_record)


def judge_records(records: Mapping[str, RunRecord]) -> Results:
    """Return the run table and verdicts of records in memory, by path. `read` does the same for files."""
    known = list_all_columns()
    cells = [build_row(RecordFile(path), record, known) for path, record in records.items()]
    rows = split_table(pa.Table.from_pylist(cells, build_schema()))
    return _judge_rows(FoundRows(rows, (), ()), lambda path: records[str(path)])


_MOST_WARNED = 3
"""Maximum number of skipped files, and of attempts without a record, that a warning names."""


def warn(found: FoundRows | Results) -> None:
    """Log warnings on skipped files, on attempts (tries at a run) without a record, and on copies of records. The
    first two warnings also name the first few files or attempts."""
    files = len(found.skipped) + len(found.rows.core if isinstance(found, FoundRows) else found.table)
    skipped = f"skipped, because they are not readable records: {len(found.skipped)} of {files} files"
    unfinished = f"attempts without a record: {len(found.unfinished)}"
    for text, things in ((skipped, found.skipped), (unfinished, found.unfinished)):
        if things:
            _log.warning(text)
        for thing in things[:_MOST_WARNED]:
            _log.warning("  %s", make_printable(str(thing)))
        if len(things) > _MOST_WARNED:
            _log.warning("  … and %d more", len(things) - _MOST_WARNED)
    if found.copies:
        _log.warning("left out, because they are copies of other records: %d", found.copies)


def _drop_seed(spec: RunSpec) -> RunSpec:
    """Return the spec with seed 0."""
    return spec.model_copy(update={"seed": 0})


def _judge_rows(found: FoundRows, load: Callable[[Path], RunRecord]) -> Results:
    """Return the results for the rows of a set of runs. First, the losses and gradient norms of the runs are compared
    with those of runs of the reference engine in the same set (`analysis.verify`). A run whose values deviate is judged
    invalid.

    Few runs are judged invalid. For these, `load` reads the record again, to find the cells of the run table that
    change. Times, for example, become empty.
    """
    core = found.rows.core
    unverified, mismatches = judge(build_cases(core))
    # optional columns are added only if some run needs them, so that tables of simple sets stay small
    optional = [name for name, first in LATER.items() if core.column(name).unique().to_pylist() not in ([], [first])]
    optional += [name for name in LEARNED if core.column(name).null_count < len(core)]
    table = to_pandas(core.select([*list_columns(), *optional]))
    table.loc[unverified, "flags"] = table.loc[unverified, "flags"].map(_add_unverified)
    outcomes = {
        one.place: build_invalid_outcome(one, table["config_id"].iat[one.reference], table["precision"].iat[one.place])
        for one in mismatches
    }
    changes = {place: _compute_changes(Path(core.column(FILE)[place].as_py()), load) for place in outcomes}
    _invalidate(table, changes, outcomes)
    return Results(table, found.skipped, found.unfinished, found.rows, outcomes, load, found.copies)


def _compute_changes(file: Path, load: Callable[[Path], RunRecord]) -> dict[str, Any]:
    try:
        return compute_invalid_cells(load(file))
    except (OSError, Unreadable):
        # the record was deleted: all numbers are removed, because it is unknown which are invalid
        return {name: None for name, column in list_all_columns().items() if column.kind == "number"}


@functools.cache  # there are few distinct texts
def _add_unverified(raised: str) -> str:
    """Return the flags `raised` with the flag `unverified`, in the order of FLAGS."""
    return " ".join(name for name in FLAGS if name in {*raised.split(), "unverified"})


def _invalidate(table: pd.DataFrame, changes: Mapping[int, Mapping[str, Any]], outcomes: Mapping[int, Outcome]) -> None:
    """Write the changed cells of invalid runs into the run table. All cells of a column that get the same value are
    written together, because single writes are slow."""
    single = ((place, change) for place, cells in changes.items() for change in cells.items())
    for (name, cell), group in group_by(single, itemgetter(1)).items():
        table.loc[[place for place, _ in group], name] = cell
    table.loc[list(outcomes), "outcome"] = "invalid"
    table.loc[list(outcomes), "reason"] = [outcome.reason for outcome in outcomes.values()]


def _list_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of an Arrow column as Python values, lists as tuples."""
    values = column.to_pylist()
    return [tuple(value) for value in values] if pa.types.is_list(column.type) else values
