"""The searches in results folders: their trials with what came of them, and how much each field matters."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.errors import UserError, make_printable
from bench.quantities import OBJECTIVES

if TYPE_CHECKING:
    from bench.search_section import SearchSection
    from bench.sweep.policy import TrialResult

_log = logging.getLogger(__name__)

_TRIALS, _RECORD_DEPTH = "trials", 2  # a record lies in <study>/<configuration>/<attempt>
_MOST_POINTS, _DRAWS = 600, 400
_MOST_LEVELS = 8  # of a field whose values have no end
_LEAST_TRIALS = 6  # with an answer: from fewer nothing is said of fields


class SearchTrial(NamedTuple):
    """A trial; what did not end well, or is beyond a constraint, has no `value`."""

    number: int
    values: Mapping[str, Any]
    line: str
    outcome: str
    value: float | None  # its objective
    interval: tuple[float, float] | None
    sample_s: float | None
    sample_node_s: float | None
    peak_bytes: int | None
    spent_node_hours: float  # by this trial and all before it


class FieldImportance(NamedTuple):
    """The part of the objective's variance over the space that a field alone explains, between 0 and 1; in 95 % of the
    functions that the trials allow it lies between `low` and `high`."""

    field: str
    share: float
    low: float
    high: float


class MeasuredSearch(NamedTuple):
    """A search, with its trials that have an answer."""

    study: str
    objective: str
    least: bool  # whether the least is sought
    fields: tuple[str, ...]
    trials: tuple[SearchTrial, ...]
    importances: tuple[FieldImportance, ...]  # the greatest first; empty where too few trials have an answer

    @property
    def answered(self) -> list[SearchTrial]:
        """The trials with an objective."""
        return [trial for trial in self.trials if trial.value is not None]


def find_searches(records: Iterable[Path]) -> tuple[MeasuredSearch, ...]:
    """Return the searches of the studies in whose folders records lie, in the order of these."""
    folders = dict.fromkeys(file.parents[_RECORD_DEPTH] for file in records if len(file.parents) > _RECORD_DEPTH)
    found = (_try_to_read(folder) for folder in folders if (folder / _TRIALS).is_dir())
    return tuple(search for search in found if search and search.trials)


def _try_to_read(folder: Path) -> MeasuredSearch | None:
    """Return the search in a folder; None, and why on standard error, for one that cannot be read."""
    try:
        return _read_search(folder)
    except UserError as error:
        _log.warning("its search is not shown: %s", make_printable(str(error)))
        return None


def _read_search(folder: Path) -> MeasuredSearch | None:
    from bench.search.costs import keeps_constraints
    from bench.sweep import definition
    from bench.sweep.trial_results import read_trial_results

    sweep = definition.find_search(definition.read(folder))
    section = sweep.search.study.search if sweep and sweep.search else None
    if sweep is None or section is None:
        return None
    results = read_trial_results(folder, sweep)
    trials: list[SearchTrial] = []
    spent = 0.0
    for result in results:
        spent += result.node_hours
        if result.outcome:
            trials.append(_build_trial(section, result, keeps_constraints(section, result), spent))
    return MeasuredSearch(
        sweep.study,
        section.objective,
        OBJECTIVES[section.objective] == "least",
        tuple(section.space),
        tuple(trials),
        _estimate_importances(section, results),
    )


def _build_trial(section: "SearchSection", result: "TrialResult", kept: bool, spent: float) -> SearchTrial:
    measured = result.quantities
    value = measured.get(section.objective) if measured and kept else None
    sample_s = measured.step_s / measured.samples if measured else None
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


def _estimate_importances(section: "SearchSection", results: Sequence["TrialResult"]) -> tuple[FieldImportance, ...]:
    """Return how much each field matters, by functions drawn from a Gaussian process through the trials' logarithms.

    A functional analysis of variance (Hutter, Hoos and Leyton-Brown, 2014) of each function over the space: the
    variance of its means by the field's values, over its variance.
    """
    from bench.search.costs import find_cost
    from bench.search.space import SearchSpace, format_key
    from bench.search.surrogate import Surrogate

    costs, noises = dict[str, float](), dict[str, float]()
    for one in results:
        if one.quantities and (cost := find_cost(section, one)) is not None:
            key = format_key(one.trial.values)
            costs[key], noises[key] = cost, one.quantities.noise(section.objective)
    if len(costs) < _LEAST_TRIALS:
        return ()
    space = SearchSpace(section).list_candidates(section.seed, _MOST_POINTS)
    points = {format_key(values): values for values in space}
    points |= {key: values for one in results if (key := format_key(values := one.trial.values)) in costs}
    places = {key: place for place, key in enumerate(points)}
    surrogate, everything = Surrogate(list(points.values()), [None] * len(points)), np.arange(len(points))
    drawn = surrogate.draw(
        [places[key] for key in costs],
        list(costs.values()),
        list(noises.values()),
        everything,
        _DRAWS,
        np.random.default_rng(section.seed),
    )
    fields = [key for key in section.space if len({_format_level(one.get(key)) for one in points.values()}) > 1]
    found = []
    for key in fields:
        shares = explain_variance(drawn, number_levels([values.get(key) for values in points.values()]))
        low, high = np.quantile(shares, (0.025, 0.975))
        found.append(FieldImportance(key, float(shares.mean()), float(low), float(high)))
    return tuple(sorted(found, key=lambda one: -one.share))


def explain_variance(drawn: NDArray[np.float64], levels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return of each function, a row of its values at all points, which part of its variance lies between the means of
    the levels; 0 of a constant one."""
    total, counts = drawn.var(axis=1), np.bincount(levels)
    means = np.stack([drawn[:, levels == level].mean(axis=1) for level in range(len(counts))])
    between = (counts[:, None] * (means - drawn.mean(axis=1)) ** 2).sum(axis=0) / len(levels)
    shares: NDArray[np.float64] = np.divide(between, total, out=np.zeros_like(total), where=total > 0)
    return shares


def number_levels(column: Sequence[Any]) -> NDArray[np.int64]:
    """Return the level of each value: equal ones have the same; of many numbers, those that are near each other."""
    texts = [_format_level(value) for value in column]
    if len(set(texts)) > _MOST_LEVELS and all(isinstance(value, int | float) for value in column):
        ranks = np.searchsorted(np.sort(np.array(column, dtype=float)), np.array(column, dtype=float))
        texts = [str(rank * _MOST_LEVELS // len(column)) for rank in ranks]
    known = {text: level for level, text in enumerate(dict.fromkeys(texts))}
    return np.array([known[text] for text in texts])


def _format_level(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
