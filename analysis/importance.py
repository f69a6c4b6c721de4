"""Importance of each field of a search for the search's objective, by a functional analysis of variance.

The logarithm of the objective is modelled by a Gaussian process that is fitted to the trials. Its covariance is the sum
of a constant part, a part for each field, and a part for the combination of all fields. The last two parts
decrease as the values of a field become more distant. The distance between two numbers is the number of steps between
them in the sorted list of the field's numbers. Values that are not numbers are only equal or different.

The process is computed for several candidate scales and noises. Each candidate is weighted by its marginal likelihood
and prior (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, sections 2.2 and 5.4.1).
"""

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bench.core.study import SearchSection
    from bench.sweep.policy import TrialResult

Array = NDArray[np.float64]

_THREADS = "OPENBLAS_NUM_THREADS"


def _import_on_one_thread(name: str) -> Any:
    """Import a module of scipy with its linear algebra limited to one thread.

    The reason is that several threads on a busy machine wait for each other fifty times as long as the work takes. The
    limit is an environment variable, which is restored after the import, so that later processes do not inherit it.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = before or "1"
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            del os.environ[_THREADS]


_linalg = _import_on_one_thread("scipy.linalg")

_MOST_POINTS, _DRAWS = 600, 400
_MOST_LEVELS = 8  # bins for a field with many numeric values
_LEAST_TRIALS = 6  # trials with a value; fewer cannot distinguish the fields

# scales and noises are in units of the log objective
_SHARED = 0.5  # standard deviation of the constant part: a factor of e^0.5 in either direction
_SCALES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)  # candidate standard deviations of the other parts
_USUAL_SCALE, _DECADES = 1.0, 0.5  # median and width (in powers of ten) of the log-normal prior of the scale
_NOISES = (0.005, 0.02, 0.06)  # candidate standard deviations of repeated runs of a point
_CORRELATION_LENGTH = 0.5  # of the combined part, as a fraction of the range of a field
_LEAST_WEIGHT = 0.05  # relative to the most likely setting; less likely settings are dropped
_MOST_FITTED = 150  # trials that determine scale and noise; more would change little and take long


class FieldImportance(NamedTuple):
    """Fraction of the objective's variance over the search space that a field alone explains, from 0 to 1.

    `low` and `high` bound the fraction with a posterior probability of 95 %.
    """

    field: str
    share: float
    low: float
    high: float


def estimate_importances(section: "SearchSection", results: Sequence["TrialResult"]) -> tuple[FieldImportance, ...]:
    """Return the importance of each field, the greatest first; empty if too few trials have a value of the objective.

    The method is a functional analysis of variance (Hutter, Hoos and Leyton-Brown, 2014). A Gaussian process models the
    log objective. From its posterior, functions are drawn that have a value at every point of the search space. For
    each field, a function is averaged over all other fields, which gives one mean per value of the field. The
    importance is the variance of these means, divided by the total variance of the function.
    """
    from bench.sweep.search.proposers import find_cost
    from bench.sweep.search.space import SearchSpace, format_key

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
    tried = [(places[key], cost, noises[key]) for key, cost in costs.items()]
    drawn = _Process(list(points.values())).draw(tried, _DRAWS, np.random.default_rng(section.seed))
    fields = [key for key in section.space if len({_format_level(one.get(key)) for one in points.values()}) > 1]
    found = []
    for key in fields:
        shares = explain_variance(drawn, number_levels([values.get(key) for values in points.values()]))
        low, high = np.quantile(shares, (0.025, 0.975))
        found.append(FieldImportance(key, float(shares.mean()), float(low), float(high)))
    return tuple(sorted(found, key=lambda one: -one.share))


def explain_variance(drawn: NDArray[np.float64], levels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each function the fraction of its variance that the levels of a field explain; 0 for a constant
    function. For each level, the mean of the function over the points of the level is computed. The fraction is the
    variance of these means, divided by the total variance.

    `drawn` has shape (functions, points). `levels` has shape (points,) and holds the level (number of the field's
    value) of each point.
    """
    total, counts = drawn.var(axis=1), np.bincount(levels)
    means = np.stack([drawn[:, levels == level].mean(axis=1) for level in range(len(counts))])
    between = (counts[:, None] * (means - drawn.mean(axis=1)) ** 2).sum(axis=0) / len(levels)
    shares: NDArray[np.float64] = np.divide(between, total, out=np.zeros_like(total), where=total > 0)
    return shares


def number_levels(column: Sequence[Any]) -> NDArray[np.int64]:
    """Return the level (category) of each value of a field, as a number from 0. Equal values have the same level.

    If there are more than _MOST_LEVELS different numbers, they are grouped into bins by rank.
    """
    texts = [_format_level(value) for value in column]
    if len(set(texts)) > _MOST_LEVELS and all(isinstance(value, int | float) for value in column):
        ranks = np.searchsorted(np.sort(np.array(column, dtype=float)), np.array(column, dtype=float))
        texts = [str(rank * _MOST_LEVELS // len(column)) for rank in ranks]
    known = {text: level for level, text in enumerate(dict.fromkeys(texts))}
    return np.array([known[text] for text in texts])


class _Process:
    """A Gaussian process over points of a search space. A point is one combination of values of the searched fields."""

    def __init__(self, values: Sequence[Mapping[str, Any]]) -> None:
        keys = dict.fromkeys(key for one in values for key in one)
        self._codes = [codes for key in keys if (codes := _encode_field([one.get(key) for one in values]))]
        self._points = np.arange(len(values))

    def draw(self, tried: Sequence[tuple[int, float, float]], count: int, generator: np.random.Generator) -> Array:
        """Draw functions (values of the log objective at all points) from the posterior of the Gaussian process, given
        the tried points. The result has shape (functions, points). Because of rounding, the number of functions may
        differ slightly from `count`.

        `tried` holds for each tried point its index, its cost (log objective) and its additional noise, which is 0 for
        a run without background load.
        """
        at, costs, noises = (np.array(column) for column in zip(*tried, strict=True))
        everything, drawn = self._points, []
        sound = noises == 0  # trials without extra noise; if there are enough, they alone determine scale and noise
        chosen = sound if sound.sum() >= _LEAST_TRIALS else np.full(len(at), True)
        for scale, noise, weight in self._fit(at[chosen], costs[chosen]):
            own = self._covariance(at, at, scale) + np.diag(noise**2 + noises**2)
            factor = _linalg.cholesky(own, lower=True, overwrite_a=True)
            across = _linalg.solve_triangular(factor, self._covariance(at, everything, scale), lower=True)
            mean = across.T @ _linalg.solve_triangular(factor, costs, lower=True)
            covariance = self._covariance(everything, everything, scale) - across.T @ across
            factor = _linalg.cholesky(covariance + 1e-9 * np.eye(len(everything)), lower=True)
            shape = round(weight * count), len(everything)
            drawn.append(mean + generator.standard_normal(shape) @ factor.T)
        return np.concatenate(drawn)

    def _fit(self, tried: NDArray[np.int64], costs: Array) -> list[tuple[float, float, float]]:
        """Return candidate settings of the Gaussian process as (scale, noise, weight). Scale and noise are standard
        deviations of the log objective. The weight is the posterior probability of the candidate. It is computed from
        `costs`, the values of the log objective at the points with the indices `tried`. Unlikely candidates are
        omitted, and the weights of the other candidates add up to 1. If there are more than _MOST_FITTED trials, only
        the most likely candidate is returned."""
        at, deviation = tried[-_MOST_FITTED:], costs[-_MOST_FITTED:]
        spreads, axes = _linalg.eigh(self._covariance(at, at, 1.0) - _SHARED**2)
        # costs and constant part in the eigenbasis of the covariance
        deviation, alike = axes.T @ deviation, axes.sum(axis=0)
        likelihoods: dict[tuple[float, float], float] = {}
        for scale in _SCALES:
            usual = -0.5 * (math.log10(scale / _USUAL_SCALE) / _DECADES) ** 2
            for noise in _NOISES:
                variance = scale**2 * np.maximum(spreads, 0.0) + noise**2
                shared = 1 + _SHARED**2 * float((alike**2 / variance).sum())  # by the Sherman-Morrison formula
                explained = _SHARED**2 * float((alike * deviation / variance).sum()) ** 2 / shared
                misfit = float((deviation**2 / variance).sum()) - explained
                log_determinant = float(np.log(variance).sum()) + math.log(shared)
                likelihoods[scale, noise] = usual - 0.5 * (misfit + log_determinant)
        best = max(likelihoods.values())
        weights = {setting: math.exp(likelihood - best) for setting, likelihood in likelihoods.items()}
        least = _LEAST_WEIGHT if len(tried) <= _MOST_FITTED else 1.0
        kept = {setting: weight for setting, weight in weights.items() if weight >= least}
        return [(scale, noise, weight / sum(kept.values())) for (scale, noise), weight in kept.items()]

    def _covariance(self, rows: NDArray[np.int64], columns: NDArray[np.int64], scale: float) -> Array:
        """Return the prior covariance of the log objective between points of the search space, shape (rows, columns).
        `rows` and `columns` are indices of points. `scale` is the standard deviation of the log objective without its
        constant part."""
        apart, fields = np.zeros((len(rows), len(columns))), max(len(self._codes), 1)
        for level, distance in self._codes:
            apart += np.take(distance[level[rows]], level[columns], axis=1)
        covariance: Array = np.exp(apart * (-1 / _CORRELATION_LENGTH))
        apart *= -1 / fields
        covariance += apart  # with the 1 added below: mean over fields of each field's own part, 1 - distance
        covariance *= 0.5 * scale**2
        covariance += 0.5 * scale**2 + _SHARED**2
        return covariance


def _encode_field(column: Sequence[Any]) -> tuple[NDArray[np.int64], Array] | None:
    """Return the level (numbered value) of a field at every point, shape (points,), and the distances between levels,
    which are from 0 to 1, shape (levels, levels). None if the field has the same value at all points."""
    numbers = sorted({float(value) for value in column if _is_number(value)})
    texts = list(dict.fromkeys(_format_level(value) for value in column if not _is_number(value)))
    count = len(numbers) + len(texts)
    if count < 2:
        return None
    distance = 1 - np.eye(count)
    places = np.linspace(0, 1, len(numbers))
    distance[: len(numbers), : len(numbers)] = np.abs(places[:, None] - places[None, :])
    levels: dict[float | str, int] = dict(zip([*numbers, *texts], range(count), strict=True))
    level = [levels[float(value) if _is_number(value) else _format_level(value)] for value in column]
    return np.array(level), distance


def _format_level(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
