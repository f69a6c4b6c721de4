"""A search's trials as Optuna's journal, which optuna-dashboard opens."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.export import import_library
from bench.errors import UserError
from bench.quantities import OBJECTIVES, QUANTITIES
from bench.search.proposers import keeps_constraints
from bench.sweep import definition
from bench.sweep.policy import TrialResult
from bench.sweep.snapshot import read_trial_results


def write_journal(paths: Sequence[Path], out: Path) -> int:
    """Write the searches in study folders into the file `out`, a study each; return how many trials. An older file is
    replaced. UserError for a folder without a search."""
    optuna: Any = import_library("optuna", "optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as aside:
        file, journal = Path(aside, out.name), optuna.storages.journal
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(file)))
        written = sum(_write_study(optuna, storage, path) for path in paths)
        file.replace(out)
    return written


def _write_study(optuna: Any, storage: Any, folder: Path) -> int:
    sweep = definition.find_search(definition.read(folder))
    section = sweep.search.study.search if sweep and sweep.search else None
    if sweep is None or section is None:
        raise UserError(str(folder), "holds no search", "give the folder of one")
    way = "minimize" if OBJECTIVES[section.objective] == "least" else "maximize"
    study = optuna.create_study(study_name=sweep.study, storage=storage, direction=way)
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
    """Return a trial as Optuna keeps it; one without an answer runs still, and one without a value has failed."""
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
    """Return a value as Optuna takes it among choices: a mapping as its text."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value, sort_keys=True)
