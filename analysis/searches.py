"""Searches in results folders: their trials with the results, and the importance of each searched field."""

import itertools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.importance import FieldImportance, estimate_importances
from bench.core.errors import UserError, make_printable
from bench.core.files import exists, open_folder
from bench.core.quantities import OBJECTIVES

if TYPE_CHECKING:
    from bench.core.study import SearchSection
    from bench.sweep.policy import TrialResult

_log = logging.getLogger(__name__)

_TRIALS = "trials"
_RECORD_DEPTH = 2  # a record lies two folders below its study: <study>/<configuration>/<attempt>


class SearchTrial(NamedTuple):
    """A trial of a search: one tried configuration with its result. `value` is None if the trial did not end ok or
    violates a constraint."""

    number: int
    values: Mapping[str, Any]
    line: str
    outcome: str
    value: float | None  # value of the objective
    interval: tuple[float, float] | None
    sample_s: float | None
    sample_node_s: float | None
    peak_bytes: int | None
    spent_node_hours: float  # node hours of this trial and of all earlier ones


class MeasuredSearch(NamedTuple):
    """A search with its completed trials."""

    study: str
    objective: str
    least: bool  # True if the objective is minimised
    fields: tuple[str, ...]
    trials: tuple[SearchTrial, ...]
    importances: tuple[FieldImportance, ...]  # the greatest first; empty if too few trials have a value
    constraints: tuple[str, ...] = ()  # as text, such as "peak_bytes at most 80,000,000,000"

    @property
    def answered(self) -> list[SearchTrial]:
        """The trials that have a value of the objective."""
        return [trial for trial in self.trials if trial.value is not None]

    @property
    def best(self) -> SearchTrial | None:
        """The trial with the best value of the objective; None if no trial has a value."""
        sign = 1 if self.least else -1
        return min(self.answered, key=lambda trial: sign * (trial.value or 0.0), default=None)


def find_study_folders(records: Iterable[Path]) -> list[Path]:
    """Return the study folders that contain these record files, in the order of the files."""
    return [*dict.fromkeys(file.parents[_RECORD_DEPTH] for file in records if len(file.parents) > _RECORD_DEPTH)]


def find_searches(records: Iterable[Path]) -> tuple[MeasuredSearch, ...]:
    """Return the searches of the study folders that contain these record files, in the order of the files."""
    found = (_try_to_read(folder) for folder in find_study_folders(records) if exists(folder / _TRIALS))
    return tuple(search for search in found if search and search.trials)


def _try_to_read(folder: Path) -> MeasuredSearch | None:
    """Return the search in a study folder; None, with a warning, if it cannot be read."""
    try:
        # the functions that read a sweep need plain files, so archives are unpacked
        with open_folder(folder) as plain:
            return _read_search(plain)
    except UserError as error:
        _log.warning("search not shown: %s", make_printable(str(error)))
        return None


def _read_search(folder: Path) -> MeasuredSearch | None:
    from bench.sweep import definition
    from bench.sweep.search.proposers import keeps_constraints
    from bench.sweep.snapshot import read_trial_results

    sweep = definition.find_search(definition.read(folder))
    section = sweep.search.study.search if sweep and sweep.search else None
    if sweep is None or section is None:
        return None
    results = read_trial_results(folder, sweep)
    spent = itertools.accumulate(result.node_hours for result in results)
    trials = (
        _build_trial(section, result, keeps_constraints(section, result), node_hours)
        for result, node_hours in zip(results, spent, strict=True)
        if result.outcome
    )
    least, importances = OBJECTIVES[section.objective] == "least", estimate_importances(section, results)
    bounds = tuple(f"{name} {bound}" for name, bound in section.constraints.items())
    return MeasuredSearch(
        sweep.study, section.objective, least, tuple(section.space), tuple(trials), importances, bounds
    )


def _build_trial(section: "SearchSection", result: "TrialResult", kept: bool, spent: float) -> SearchTrial:
    measured = result.quantities
    value = measured.get(section.objective) if measured and kept else None
    sample_s = measured.mean.s / measured.samples if measured else None
    return SearchTrial(
        number=result.trial.number + 1,
        values=result.trial.values,
        line=result.trial.point.line,
        outcome=str(result.outcome),
        value=value,
        interval=measured.interval(section.objective) if measured and value is not None else None,
        sample_s=sample_s,
        sample_node_s=sample_s * measured.nodes if measured and sample_s is not None else None,
        peak_bytes=measured.peak_bytes if measured else None,
        spent_node_hours=spent,
    )
