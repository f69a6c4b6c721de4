"""Runs in MLflow's file store: one experiment per study."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.export import import_library
from analysis.export.run import ExportedRun

_NAME, _DIGEST = "zeroscale.run", "zeroscale.digest"
_PER_BATCH = 1000  # metrics that MLflow takes at once; of parameters and tags it takes 100
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # from 3.x on it has to be asked for
}


def write(runs: Sequence[ExportedRun], out: Path) -> int:
    """Write `runs` into the store at `out` and return how many were new or had changed; of one that has, the older is
    moved to MLflow's trash."""
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
    """Set what MLflow looks for in the environment, for as long as it is used."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _open_experiment(client: Any, study: str) -> tuple[str, dict[str, list[Any]]]:
    """Return the experiment's id and the runs in it that were exported before, by name."""
    known = client.get_experiment_by_name(study)
    experiment: str = known.experiment_id if known else client.create_experiment(study)
    there: dict[str, list[Any]] = {}
    for run in _list_stored_runs(client, experiment):
        if _NAME in run.data.tags:
            there.setdefault(run.data.tags[_NAME], []).append(run)
    return experiment, there


def _list_stored_runs(client: Any, experiment: str) -> Iterator[Any]:
    """Yield all runs of an experiment, page by page."""
    page = client.search_runs([experiment], max_results=_PER_BATCH)
    yield from page
    while page.token:
        page = client.search_runs([experiment], max_results=_PER_BATCH, page_token=page.token)
        yield from page


def _delete_outdated(client: Any, there: Sequence[Any], digest: str) -> bool:
    """Whether a run has to be written; older ones of its name, whole or begun, are deleted."""
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
    client.set_terminated(made.info.run_id, "FINISHED" if run.ok else "FAILED", at + int(1000 * run.seconds))
    client.set_tag(made.info.run_id, _DIGEST, _hash_run(run))  # last: without it the run is not whole
