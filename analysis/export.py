"""Export of records as runs of TensorBoard or MLflow, and export of a search's trials for Optuna's dashboard."""

import datetime
import hashlib
import importlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from analysis.metrics import load_metrics
from analysis.results import Results
from analysis.summary import Row
from analysis.table import group_by, list_rows
from bench.core.errors import UserError
from bench.core.files import open_folder
from bench.core.point_fields import flatten
from bench.core.quantities import OBJECTIVES, QUANTITIES
from bench.core.record import RunRecord
from bench.sweep import definition
from bench.sweep.policy import TrialResult
from bench.sweep.search.proposers import keeps_constraints
from bench.sweep.snapshot import read_trial_results


def import_library(module: str, package: str, extra: str) -> ModuleType:
    """Import the library that an export format needs. Raise UserError if the library is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--to {extra}", f"{package} is not installed", f"pip install 'zeroscale[{extra}]'") from error


Parameter = str | bool | int | float

_TAGS = (
    "config_id", "environment_id", "device", "machine", "allocation", "repeat", "attempt", "study", "evidence",
    "outcome", "reason", "flags", "notes", "slowest_rank", "slowest_host", "slowest_link_node",
)  # fmt: skip
_SERIES = ("step_s", "data_wait_s", "loss", "gradient_norm")


class ExportedRun(NamedTuple):
    """The exported values of one record. Unknown values are omitted."""

    study: str
    name: str  # unique within the study
    parameters: dict[str, Parameter]  # fields of the spec, as named on the command line
    metrics: dict[str, float]  # values of all metrics in the run table
    series: dict[str, list[tuple[int, float]]]  # (step, value) pairs by quantity, warm-up included
    tags: dict[str, str]
    ok: bool
    started_s: float  # Unix time; 0 if unknown
    seconds: float  # known duration from the start to the last step


def list_exported_runs(results: Results) -> list[ExportedRun]:
    """Return an exported run for each row of the run table. Raise UserError if two exported runs would have the same
    name, because one would overwrite the other."""
    found = [_build_run(row, results.record(place)) for place, row in enumerate(list_rows(results.table))]
    # Exports of two records with one name would overwrite each other.
    (name, times), *_ = Counter((run.study, run.name) for run in found).most_common(1) or [(("", ""), 0)]
    if times > 1:
        raise UserError("/".join(name), f"{times} records have this name", "export their folders one by one")
    return found


def _build_run(row: Row, record: RunRecord) -> ExportedRun:
    steps = record.observations.steps if record.observations else None
    phases = record.observations.phases_s if record.observations else {}
    place, which = f"{row['nodes']}x{row['devices_per_node']}", f"{row['config_id']}.{row['repeat']}.{row['attempt']}"
    series = {name: [(n, one) for n, one in enumerate(getattr(steps, name, ())) if one is not None] for name in _SERIES}
    known = [(re.sub(r"^(engine|data)\.options\.", r"\1.", name), value) for name, value in flatten(record.spec)]
    parameters = {key: one if isinstance(one, Parameter) else str(one) for key, one in known if one is not None}
    tags = {name: str(row[name]) for name in _TAGS if row[name] not in (None, "")}
    return ExportedRun(
        study=_clean_name(row["study"]),
        name=_clean_name(f"{row['model']}-{row['engine']}-{place}-micro{row['micro']}-{row['machine']}-{which}"),
        parameters=parameters,
        metrics={name: float(row[name]) for name in load_metrics() if row[name] is not None},
        series={name: pairs for name, pairs in series.items() if pairs},
        tags=tags | ({"cut": str(steps.cut)} if steps else {}),
        ok=row["outcome"] == "ok",
        started_s=_parse_unix_time(record.circumstance.started_at),
        seconds=sum(phases.values()) + sum(steps.step_s if steps else ()),
    )


def _clean_name(text: str) -> str:
    """Return a text from a record with an underscore in place of each character that is unsafe in a path."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text).lstrip(".") or "_"


def _parse_unix_time(started_at: str) -> float:
    try:
        return datetime.datetime.fromisoformat(started_at).timestamp()
    except ValueError:
        return 0.0


_EVENTS = "events.out.tfevents.*"


def write_tensorboard(runs: Sequence[ExportedRun], out: Path) -> int:
    """Write TensorBoard event files of `runs` below the folder `out`, and return the number of runs. Earlier exports of
    the same runs are replaced."""
    tensorboardx = import_library("tensorboardX", "tensorboardX", "tensorboard")
    out.mkdir(parents=True, exist_ok=True)
    # All runs are written to a temporary folder first, so that a failure leaves an older export intact.
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as aside:
        for run in runs:
            with tensorboardx.SummaryWriter(str(Path(aside, run.study, run.name))) as writer:
                _write_run(writer, run)
        for run in runs:
            _replace_events(out / run.study / run.name, Path(aside, run.study, run.name))
    return len(runs)


def _write_run(writer: Any, run: ExportedRun) -> None:
    summary = import_library("tensorboardX.summary", "tensorboardX", "tensorboard")
    quantities = {f"run/{name}": value for name, value in run.metrics.items()}
    for part in summary.hparams(run.parameters, quantities):
        writer.file_writer.add_summary(part, walltime=run.started_s)
    for name, value in quantities.items():
        writer.add_scalar(name, value, 0, walltime=run.started_s)
    for name, series in run.series.items():
        for step, value in series:
            writer.add_scalar(f"steps/{name}", value, step, walltime=run.started_s)
    for name, text in run.tags.items():
        # TensorBoard renders Markdown, so a text from a record is indented as a code block
        block = "".join(f"    {line}\n" for line in text.splitlines())
        writer.add_text(name, block, 0, walltime=run.started_s)


def _replace_events(folder: Path, new: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # New files are moved in before older ones are deleted, so that a reader never finds an empty folder.
    kept = {file.replace(folder / file.name).name for file in new.glob(_EVENTS)}
    for path in folder.glob(_EVENTS):
        if path.name not in kept:
            path.unlink()


_NAME, _DIGEST = "zeroscale.run", "zeroscale.digest"
_PER_BATCH = 1000  # MLflow accepts this many metrics in one call; parameters and tags are limited to 100
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 needs this to use a folder as its store
}


def write_mlflow(runs: Sequence[ExportedRun], out: Path) -> int:
    """Write `runs` into the MLflow store at `out`, and return the number of new or changed runs.

    The earlier export of a changed run is moved to MLflow's trash.
    """
    with _set_environment(_ENVIRONMENT):
        mlflow = import_library("mlflow", "mlflow-skinny", "mlflow")
        out.mkdir(parents=True, exist_ok=True)
        client = mlflow.MlflowClient(out.resolve().as_uri())
        written = 0
        for study in dict.fromkeys(run.study for run in runs):
            experiment, there = _open_experiment(client, study)
            for run in runs:
                if run.study == study and _delete_outdated(client, there.get(run.name, []), _hash_run(run)):
                    _log_run(mlflow, client, experiment, run)
                    written += 1
    return written


@contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _open_experiment(client: Any, study: str) -> tuple[str, dict[str, list[Any]]]:
    """Return the id of the MLflow experiment of a study. Also return the runs of earlier exports in this experiment, by
    name. The experiment is created if it does not exist."""
    known = client.get_experiment_by_name(study)
    experiment: str = known.experiment_id if known else client.create_experiment(study)
    there = (run for run in _list_stored_runs(client, experiment) if _NAME in run.data.tags)
    return experiment, group_by(there, lambda run: str(run.data.tags[_NAME]))


def _list_stored_runs(client: Any, experiment: str) -> Iterator[Any]:
    """Yield all runs of an MLflow experiment. The runs are requested from MLflow page by page."""
    page = client.search_runs([experiment], max_results=_PER_BATCH)
    yield from page
    while page.token:
        page = client.search_runs([experiment], max_results=_PER_BATCH, page_token=page.token)
        yield from page


def _delete_outdated(client: Any, there: Sequence[Any], digest: str) -> bool:
    """Return False if a run has exactly one earlier export, with the same content (`digest`). Otherwise delete all
    earlier exports of the run (`there`), also incomplete exports, and return True."""
    if [run.data.tags.get(_DIGEST) for run in there] == [digest]:
        return False
    for run in there:
        client.delete_run(run.info.run_id)
    return True


def _hash_run(run: ExportedRun) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def _log_run(mlflow: Any, client: Any, experiment: str, run: ExportedRun) -> None:
    entities, at = mlflow.entities, int(1000 * run.started_s)
    made = client.create_run(experiment, start_time=at, run_name=run.name, tags={_NAME: run.name, **run.tags})
    numbers = [entities.Metric(f"run/{name}", value, at, 0) for name, value in run.metrics.items()]
    for name, series in run.series.items():
        numbers += [entities.Metric(f"steps/{name}", value, at, step) for step, value in series]
    for start in range(0, len(numbers), _PER_BATCH):
        client.log_batch(made.info.run_id, metrics=numbers[start : start + _PER_BATCH])
    for name, value in run.parameters.items():
        client.log_param(made.info.run_id, name, value)
    # The end time is that of the record, not of the export, so that runs keep their order in the dashboard.
    client.set_terminated(made.info.run_id, "FINISHED" if run.ok else "FAILED", at + int(1000 * run.seconds))
    client.set_tag(made.info.run_id, _DIGEST, _hash_run(run))  # last, since it marks the run as complete


def write_journal(paths: Sequence[Path], out: Path) -> int:
    """Write the searches of study folders into an Optuna journal at `out`, and return the number of trials.

    Each search becomes an Optuna study. An existing file is replaced. Raise UserError for a folder without a search,
    and for an archive that contains only records.
    """
    optuna: Any = import_library("optuna", "optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as aside:
        file, journal = Path(aside, out.name), optuna.storages.journal
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(file)))
        written = 0
        for path in paths:
            with open_folder(path) as folder:
                written += _write_study(optuna, storage, path, folder)
        file.replace(out)
    return written


def _write_study(optuna: Any, storage: Any, path: Path, folder: Path) -> int:
    """Write the search in `folder` into an Optuna study, and return the number of trials. `path` is the folder as the
    user wrote it, for error messages."""
    sweep = definition.find_search(definition.read(folder)) if (folder / definition.FOLDER).is_dir() else None
    section = sweep.search.study.search if sweep and sweep.search else None
    if sweep is None or section is None:
        rule = f"contains no definition of a search, which `zeroscale search` writes into {definition.FOLDER}/"
        remedy = "give the folder of a search, or an archive of it by `zeroscale pack --whole`"
        raise UserError(str(path), rule if folder.is_dir() else "no such folder", remedy)
    direction = "minimize" if OBJECTIVES[section.objective] == "least" else "maximize"
    study = optuna.create_study(study_name=sweep.study, storage=storage, direction=direction)
    results = read_trial_results(folder, sweep)
    kinds = {
        key: optuna.distributions.CategoricalDistribution([_simplify(one) for one in dimension.values])
        if dimension.values is not None
        else optuna.distributions.FloatDistribution(dimension.from_, dimension.to, log=dimension.log)
        for key, dimension in section.space.items()
    }
    for result in results:
        value = result.quantities.get(section.objective) if result.quantities else None
        kept = keeps_constraints(section, result)
        study.add_trial(_build_trial(optuna, result, value if kept else None, kinds))
    return len(results)


def _build_trial(optuna: Any, result: TrialResult, value: float | None, kinds: Mapping[str, Any]) -> Any:
    """Return an Optuna trial. Its state is RUNNING if the trial has no outcome yet, FAIL if it has an outcome but no
    `value` of the objective, and otherwise COMPLETE. `kinds` holds the Optuna distribution of each searched key."""
    states, values = optuna.trial.TrialState, result.trial.values
    failed = states.FAIL if result.outcome else states.RUNNING
    measured = {name: result.quantities.get(name) for name in QUANTITIES} if result.quantities else {}
    attributes = {"point": result.trial.point.line, "outcome": result.outcome, "why": result.trial.why, **measured}
    return optuna.trial.create_trial(
        state=failed if value is None else states.COMPLETE,
        value=value,
        params={key: _simplify(one) for key, one in values.items()},
        distributions={key: kinds[key] for key in values},
        user_attrs={name: one for name, one in attributes.items() if one not in (None, "")},
    )


def _simplify(value: Any) -> Any:
    """Return a value in a form that Optuna accepts as a categorical choice; mappings become JSON texts."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value, sort_keys=True)
