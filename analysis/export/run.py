"""A record as the pages of other tools know a run; pure."""

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from analysis.metrics import load_metrics
from analysis.results import Results
from analysis.summary import Row
from analysis.table import list_rows
from bench.errors import UserError
from bench.point_fields import flatten
from bench.record import RunRecord
from bench.spec import RunSpec

Parameter = str | bool | int | float

_TAGS = (
    "config_id", "environment_id", "device", "machine", "allocation", "repeat", "attempt", "study", "evidence",
    "outcome", "reason", "flags", "notes", "slowest_rank", "slowest_host", "slowest_link_node",
)  # fmt: skip
_SERIES = ("step_s", "data_wait_s", "loss", "gradient_norm")


class ExportedRun(NamedTuple):
    """What is shown of one record; what is unknown is left out."""

    study: str
    name: str  # with the study it names one record of a set
    parameters: dict[str, Parameter]  # the spec's fields, in the words of the command line
    metrics: dict[str, float]  # the run table's quantities
    series: dict[str, list[tuple[int, float]]]  # by step, warm-up included
    tags: dict[str, str]
    ok: bool
    started_s: float  # Unix time; 0 where it is unknown
    seconds: float  # from the start to the last step, as far as it is known


def list_exported_runs(results: Results) -> list[ExportedRun]:
    """Return a run for each row of the table; UserError where two of them have one name."""
    found = [_build_run(row, results.record(place)) for place, row in enumerate(list_rows(results.table))]
    (name, times), *_ = Counter((run.study, run.name) for run in found).most_common(1) or [(("", ""), 0)]
    if times > 1:
        raise UserError("/".join(name), f"{times} records have this name", "export their folders one by one")
    return found


def _build_run(row: Row, record: RunRecord) -> ExportedRun:
    steps = record.observations.steps if record.observations else None
    phases = record.observations.phases_s if record.observations else {}
    observed_series = {name: getattr(steps, name, ()) for name in _SERIES}
    tags = {name: str(row[name]) for name in _TAGS if row[name] not in (None, "")}
    return ExportedRun(
        study=_clean_name(row["study"]),
        name=_clean_name(_build_run_name(row)),
        parameters=dict(_list_parameters(record.spec)),
        metrics={name: float(row[name]) for name in load_metrics() if row[name] is not None},
        series={name: _drop_missing(values) for name, values in observed_series.items() if _drop_missing(values)},
        tags=tags | ({"cut": str(steps.cut)} if steps else {}),
        ok=row["outcome"] == "ok",
        started_s=_parse_unix_time(record.circumstance.started_at),
        seconds=sum(phases.values()) + sum(steps.step_s if steps else ()),
    )


def _build_run_name(row: Row) -> str:
    place = f"{row['nodes']}x{row['devices_per_node']}"
    which = f"{row['config_id']}.{row['repeat']}.{row['attempt']}"
    return f"{row['model']}-{row['engine']}-{place}-micro{row['micro']}-{row['machine']}-{which}"


def _clean_name(text: str) -> str:
    """Keep a name one part of a path: it comes from a record."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text).lstrip(".") or "_"


def _list_parameters(spec: RunSpec) -> Iterator[tuple[str, Parameter]]:
    for name, value in flatten(spec):
        if value is not None:
            key = name.replace("engine.options.", "engine.").replace("data.options.", "data.")
            yield key, value if isinstance(value, Parameter) else str(value)


def _drop_missing(values: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in enumerate(values) if value is not None]


def _parse_unix_time(started_at: str) -> float:
    try:
        return datetime.datetime.fromisoformat(started_at).timestamp()
    except ValueError:
        return 0.0
