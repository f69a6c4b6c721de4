"""Conversion of each record to a row of an Arrow table. A row holds the cells of the run table, traces (lists of values
by step or rank), and the data for verification.

The analysis needs nothing else from a record. So each record is read once, in one of several processes, and its row is
cached (`analysis.reading.consolidated`). A row from the cache has the same values as a row computed from the record.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis import verify
from analysis.columns import Column, Kind, list_all_columns
from analysis.flags import list_flags, list_notes
from bench.core.engine_facts import SUMMED_STEPS
from bench.core.record import Observations, Outcome, RunRecord
from bench.core.spec import RunSpec

FILE, SIZE, CHANGED = "file", "file_size", "file_changed_ns"
TRACES = {
    "trace_spec": pa.large_string(), "trace_environment": pa.large_string(), "trace_step_s": pa.list_(pa.float64()),
    "trace_cut": pa.int64(), "trace_own_s": pa.list_(pa.float64()), "trace_rank_peak_bytes": pa.list_(pa.int64()),
}  # fmt: skip
"""Arrow types of the trace columns, which hold lists and long texts per run. Their contents are documented in
`analysis.results.Results.traces`."""

_FILE = {FILE: pa.string(), SIZE: pa.int64(), CHANGED: pa.int64()}
_STARTED = {"run_started_at": pa.string()}
_DATA = {"run_data": pa.string()}
"""Hash of the text from which the run's samples were made. Empty if the data have no hash, such as random tokens."""
_CASE = {
    "case_reference": pa.bool_(), "case_question": pa.string(), "case_norms": pa.list_(pa.float64()),
    "case_summed": pa.bool_(), "case_unsteady": pa.bool_(),
    "case_losses": pa.list_(pa.float64()), "case_updates": pa.int64(),
    "case_tolerance": pa.float64(),
}  # fmt: skip
"""Arrow types of the verification columns. They are the fields of `analysis.verify.VerificationCase`."""
_TYPES: Mapping[Kind, pa.DataType] = {
    "text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "truth": pa.bool_(),
}  # fmt: skip
_latest_spec: list[tuple[RunSpec, str]] = []  # the latest spec with its JSON text; at most one entry
_INVALID = Outcome(kind="invalid")
_PLACE = (
    "study", "model", "nodes", "devices_per_node", "precision", "engine", "micro", "accumulation", "config_id",
    "repeat", "attempt", FILE,
)  # fmt: skip


class RecordFile(NamedTuple):
    """Path of a `record.json`, with its size in bytes and the time of its last change (ctime, in ns). Size and time
    reveal later changes of the file."""

    path: str
    size: int = 0
    changed_ns: int = 0


class RecordRows(NamedTuple):
    """Rows of a set of records. Traces, which are lists of values by step or rank, are loaded on demand, because they
    take most of the memory and are seldom needed."""

    core: pa.Table  # columns of the file, the run table and verification
    traces: Callable[[], pa.Table]

    def whole(self) -> pa.Table:
        """Return one table with all columns, traces included."""
        traces = self.traces()
        return pa.table([*self.core.columns, *traces.columns], pa.schema([*self.core.schema, *traces.schema]))

    def take(self, places: "pa.Array") -> "RecordRows":
        """Return the rows with these indices, in this order."""
        return RecordRows(self.core.take(places), lambda: self.traces().take(places))


def split_table(table: pa.Table) -> RecordRows:
    """Return the rows of a table that has all columns of `build_schema`, with the trace columns separated from the
    others."""
    traces = table.select(list(TRACES))
    return RecordRows(table.drop_columns(list(TRACES)), lambda: traces)


def join_rows(parts: Sequence[RecordRows]) -> RecordRows:
    """Return the rows of all sets in `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    known = parts or [split_table(build_schema().empty_table())]
    return RecordRows(
        pa.concat_tables([part.core for part in known]), lambda: pa.concat_tables([part.traces() for part in known])
    )


def sort_places(core: pa.Table) -> "pa.Array":
    """Return the row indices in the order of the run table: by study, model, ranks and so on. Paths contain hashes, so
    an order by path would not help readers."""
    return pc.sort_indices(core, sort_keys=[(name, "ascending") for name in _PLACE])


def select_distinct(core: pa.Table) -> "pa.Array":
    """Return the indices of the rows without copies. Of several copies of one record, the first is kept.

    Rows with the same start, engine, precision and numbers are copies, because two runs with the same start and the
    same step times do not exist. Names of hosts, models and studies are not compared, because `zeroscale pack` replaces
    these names. Rows without step times are copies only if they also have the same `config_id`. A row without a start
    and without step times is always kept.
    """
    place, untimed = pa.array(range(len(core)), pa.int64()), pc.is_null(core.column("step_s"))
    unknown = pc.and_(pc.equal(core.column("run_started_at"), ""), untimed)
    rows = core.append_column("place", place).append_column("unknown", pc.if_else(unknown, place, -1))
    rows = rows.append_column("untimed_id", pc.if_else(untimed, core.column("config_id"), None))
    # Few rows are alike in these columns, and only such rows are compared in all numbers, which is slow.
    few = [*_STARTED, "engine", "precision", "repeat", "attempt", "step_s", "untimed_id", "unknown"]
    alike = rows.group_by(few, use_threads=False).aggregate([("place", "list")]).column("place_list").combine_chunks()
    sizes = pc.list_value_length(alike)
    single, several = (pc.list_flatten(alike.filter(test(sizes, 1))) for test in (pc.equal, pc.greater))
    numbers = [name for name, column in list_all_columns().items() if column.kind != "text"]
    first = rows.take(several).group_by([*few, *numbers], use_threads=False).aggregate([("place", "min")])
    places = pa.concat_arrays([single, first.column("place_min").combine_chunks()])
    return places.take(pc.sort_indices(places))


def build_schema() -> pa.Schema:
    """Return the names and types of the columns of a row."""
    cells = {name: _TYPES[column.kind] for name, column in list_all_columns().items()}
    return pa.schema(_FILE | _STARTED | _DATA | cells | _CASE | TRACES)


def build_row(file: RecordFile, record: RunRecord, known: Mapping[str, Column]) -> dict[str, Any]:
    """Return the row of a record. `known` holds the columns of the run table by name.

    Raises ArithmeticError or ValueError if a number of the record does not fit its column.
    """
    spec, text = _share_spec(record.spec)
    if spec is not record.spec:
        record = record.model_copy(update={"spec": spec})
    cells, case = _compute_cells(record, known), verify.build_case(record)
    return {
        **dict(zip(_FILE, file, strict=True)),
        "run_started_at": record.circumstance.started_at,
        "run_data": _get_data_hash(record.observations),
        **cells,
        **{name: getattr(case, name.removeprefix("case_")) for name in _CASE},
        **_build_traces(record, text),
    }


def _get_data_hash(observed: Observations | None) -> str:
    data = observed.data if observed else {}
    # `zeroscale pack` replaces all facts about the data by a name for them
    return str((data.get("corpus") or {}).get("sha256") or data.get("content") or "")


def build_cases(core: pa.Table) -> verify.VerificationCases:
    """Return the data that are needed to compare losses and gradient norms with those of the reference engine, as
    arrays with one entry per row."""
    question = core.column("case_question").combine_chunks().dictionary_encode().indices
    known = question.is_valid().to_numpy(zero_copy_only=False)
    norm_tolerance = [verify.NORM_TOLERANCE[name] for name in core.column("precision").to_pylist()]
    losses = np.full((len(core), verify.STEPS), np.nan)
    losses[known] = _to_matrix(core.column("case_losses"), verify.STEPS)
    return verify.VerificationCases(
        ok=pc.equal(core.column("outcome"), "ok").to_numpy(),
        reference=core.column("case_reference").to_numpy(),
        question=question.fill_null(-1).to_numpy(),
        norms=_to_matrix(core.column("case_norms"), SUMMED_STEPS),
        summed=core.column("case_summed").to_numpy(),
        unsteady=core.column("case_unsteady").to_numpy(),
        norm_tolerance=np.array(norm_tolerance, float),
        losses=losses,
        updates=core.column("case_updates").to_numpy(),
        tolerance=core.column("case_tolerance").to_numpy(),
    )


def _to_matrix(lists: pa.ChunkedArray, width: int) -> Any:
    """Return a matrix with a row for each list of `width` numbers; empty lists are skipped."""
    return lists.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _compute_cells(record: RunRecord, known: Mapping[str, Column]) -> dict[str, Any]:
    cells = {name: column.value(record) for name, column in known.items()}
    cells["flags"], cells["notes"] = " ".join(list_flags(record)), " ".join(list_notes(record))
    for name, cell in cells.items():
        if type(cell) is not float and cell is not None and known[name].kind == "number":
            cells[name] = float(cell)
    return cells


def compute_invalid_cells(record: RunRecord) -> dict[str, Any]:
    """Return the cells of a run's row in the run table that change if the run is judged invalid, with their new values.
    Cells with times and rates become empty. Empty cells stay empty."""
    known = list_all_columns()
    cells = _compute_cells(record, known)
    shown = {name: column for name, column in known.items() if cells[name] is not None and name != "outcome"}
    invalid = _compute_cells(record.model_copy(update={"outcome": _INVALID}), shown)
    return {name: cell for name, cell in invalid.items() if cell != cells[name]}


def _share_spec(spec: RunSpec) -> tuple[RunSpec, str]:
    """Return a spec and its JSON text. If the spec equals the spec of the previous record, return the previous spec
    object and its text instead.

    Records of repeats follow each other, so most specs equal the previous spec. The cache
    `analysis.observed.remember_latest` recognises equal specs only if they are the same object.
    """
    if not _latest_spec or _latest_spec[0][0] != spec:
        _latest_spec[:] = [(spec, spec.model_dump_json())]
    return _latest_spec[0]


def _build_traces(record: RunRecord, spec: str) -> dict[str, Any]:
    observed = record.observations
    steps = observed.steps if observed else None
    return {
        "trace_spec": spec,
        "trace_environment": record.environment.model_dump_json() if record.environment else None,
        "trace_step_s": steps.step_s if steps else (),
        "trace_cut": steps.cut if steps else 0,
        "trace_own_s": observed.outside_collectives_s if observed else (),
        "trace_rank_peak_bytes": tuple(rank.peak_allocated_bytes for rank in observed.memory) if observed else (),
    }
