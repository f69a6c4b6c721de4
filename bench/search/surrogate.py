"""What measured trials say of the others: a Gaussian process over how far runs are from their predictions.

The cost of a candidate is its prediction and a deviation; the deviation has a part that all share (the machine is
slower than its file says), a part by each field alone (a technique is), and a part of the combination. Values of a
field that are numbers are the nearer the fewer values lie between them; others are equal or not. Scales and
noises count by how likely they make the measured deviations, and by what is usual (Rasmussen & Williams, Gaussian
Processes for Machine Learning, 2006, sections 2.2 and 5.4.1).
"""

import importlib
import json
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.search.space import Values

Array = NDArray[np.float64]

_THREADS = "OPENBLAS_NUM_THREADS"


def _import_on_one_thread(name: str) -> Any:
    """Return a part of scipy, its linear algebra on one thread: where others use the machine, several wait for each
    other fifty times as long as the work takes. What is started later does not inherit it."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = before or "1"
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            del os.environ[_THREADS]


_linalg, _special = _import_on_one_thread("scipy.linalg"), _import_on_one_thread("scipy.special")

_SHARED = 0.5  # standard deviation of the part that all share, in log: by e^0.5 in either direction
_SCALES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)  # of the rest, in log …
_USUAL_SCALE, _UNPREDICTED_SCALE = 0.25, 1.0  # … usually this; where some points have no prediction this …
_DECADES = 0.5  # … give or take so many powers of ten
_NOISES = (0.005, 0.02, 0.06)  # between two runs of one point, in log
_REACH = 0.5  # of the range of a field, over which combinations forget each other
_LEAST_WEIGHT = 0.05  # of a scale and noise beside the likeliest that is counted on at all
_MOST_FITTED = 150  # results by which scale and noise are chosen: more change little and cost much


class _Setting(NamedTuple):
    """A scale and a noise, and how much of the belief is theirs."""

    scale: float
    noise: float
    weight: float


class Belief(NamedTuple):
    """What is believed of each candidate's cost."""

    mean: Array
    deviation: Array


class Surrogate:
    """Beliefs about candidates, from their predicted costs and what was measured of some of them."""

    def __init__(
        self, values: Sequence[Values], predicted: Sequence[float | None], by_ratio: Collection[str] = ()
    ) -> None:
        """`by_ratio`: fields whose values are as far apart as their logarithms; of other fields, neighbouring values
        are equally far apart."""
        known = [cost for cost in predicted if cost is not None]
        middle = float(np.median(known)) if known else 0.0
        self.predicted = np.array([middle if cost is None else cost for cost in predicted])
        self._usual_scale = _USUAL_SCALE if len(known) == len(predicted) else _UNPREDICTED_SCALE
        self._codes = _encode(values, by_ratio)

    def believe(self, tried: Sequence[int], costs: Sequence[float], noises: Sequence[float] = ()) -> Belief:
        """Return what is believed of all candidates, those with the numbers `tried` having had these `costs`. `noises`
        are deviations that single trials have beyond what all of them have; empty: none has."""
        everything = np.arange(len(self.predicted))
        if not len(tried):
            spread = math.hypot(_SHARED, self._usual_scale)
            return Belief(self.predicted.copy(), np.full(len(everything), spread))
        first, second = np.zeros(len(everything)), np.zeros(len(everything))
        for setting in self._fit(tried, costs, noises):
            mean, across = self._condition(tried, costs, noises, everything, setting)
            variance = np.maximum(_SHARED**2 + setting.scale**2 - (across**2).sum(axis=0), 1e-12)
            first += setting.weight * mean
            second += setting.weight * (variance + mean**2)
        return Belief(first, np.sqrt(np.maximum(second - first**2, 1e-12)))

    def draw(
        self,
        tried: Sequence[int],
        costs: Sequence[float],
        noises: Sequence[float],
        of: NDArray[np.int64],
        count: int,
        generator: np.random.Generator,
    ) -> Array:
        """Draw the costs of some candidates together, about `count` times: an array of (draws, candidates)."""
        drawn = []
        for setting in self._fit(tried, costs, noises):
            mean, across = self._condition(tried, costs, noises, of, setting)
            covariance = self._covariance(of, of, setting.scale) - across.T @ across
            factor = _linalg.cholesky(covariance + 1e-9 * np.eye(len(of)), lower=True)
            drawn.append(mean + generator.standard_normal((round(setting.weight * count), len(of))) @ factor.T)
        return np.concatenate(drawn)

    def _condition(
        self,
        tried: Sequence[int],
        costs: Sequence[float],
        noises: Sequence[float],
        of: NDArray[np.int64],
        setting: _Setting,
    ) -> tuple[Array, Array]:
        """Return the mean of some candidates, and what the trials take from their covariance."""
        at, deviation = np.array(tried), np.array(costs) - self.predicted[list(tried)]
        own = self._covariance(at, at, setting.scale) + setting.noise**2 * np.eye(len(at))
        if len(noises):
            own += np.diag(np.square(noises))
        factor = _linalg.cholesky(own, lower=True, overwrite_a=True)
        across: Array = _linalg.solve_triangular(factor, self._covariance(at, of, setting.scale), lower=True)
        mean: Array = across.T @ _linalg.solve_triangular(factor, deviation, lower=True)
        return self.predicted[of] + mean, across

    def _fit(self, tried: Sequence[int], costs: Sequence[float], noises: Sequence[float]) -> list[_Setting]:
        """Return scales and noises by how likely they make the deviations of the trials without noise of their own; of
        many trials the likeliest alone."""
        if any(noises):
            sound = [place for place, noise in enumerate(noises) if not noise]
            tried, costs = [tried[place] for place in sound], [costs[place] for place in sound]
        if not len(tried):
            return [_Setting(self._usual_scale, _NOISES[1], 1.0)]
        at = np.array(tried)[-_MOST_FITTED:]
        deviation = np.array(costs)[-_MOST_FITTED:] - self.predicted[at]
        spreads, axes = _linalg.eigh(self._covariance(at, at, 1.0) - _SHARED**2)
        deviation, alike = axes.T @ deviation, axes.sum(axis=0)  # along the axes: what is measured, what all share
        likelihoods: dict[tuple[float, float], float] = {}
        for scale in _SCALES:
            usual = -0.5 * (math.log10(scale / self._usual_scale) / _DECADES) ** 2
            for noise in _NOISES:
                variance = scale**2 * np.maximum(spreads, 0.0) + noise**2
                shared = 1 + _SHARED**2 * float((alike**2 / variance).sum())  # Sherman and Morrison's formula
                explained = _SHARED**2 * float((alike * deviation / variance).sum()) ** 2 / shared
                misfit = float((deviation**2 / variance).sum()) - explained
                log_determinant = float(np.log(variance).sum()) + math.log(shared)
                likelihoods[scale, noise] = usual - 0.5 * (misfit + log_determinant)
        best = max(likelihoods.values())
        weights = {setting: math.exp(likelihood - best) for setting, likelihood in likelihoods.items()}
        least = _LEAST_WEIGHT if len(tried) <= _MOST_FITTED else 1.0
        kept = {setting: weight for setting, weight in weights.items() if weight >= least}
        return [_Setting(scale, noise, weight / sum(kept.values())) for (scale, noise), weight in kept.items()]

    def _covariance(self, rows: NDArray[np.int64], columns: NDArray[np.int64], scale: float) -> Array:
        """Return the prior covariance of deviations between candidates."""
        apart, fields = np.zeros((len(rows), len(columns))), max(len(self._codes), 1)
        for codes in self._codes:
            apart += np.take(codes.distance[codes.level[rows]], codes.level[columns], axis=1)
        covariance: Array = np.exp(apart * (-1 / _REACH))
        apart *= -1 / fields
        covariance += apart  # with 1: the mean over fields of what each alone has in common
        covariance *= 0.5 * scale**2
        covariance += 0.5 * scale**2 + _SHARED**2
        return covariance


def compute_expected_gains(belief: Belief, best: float) -> Array:
    """Return by how much each candidate is expected to improve on the cost `best`, 0 where it does not (Mockus's
    expected improvement)."""
    z = (best - belief.mean) / belief.deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gains: Array = belief.deviation * (z * _special.ndtr(z) + density)
    return gains


class _FieldCodes(NamedTuple):
    """A field of every candidate: which of its levels, and how far these are from each other, between 0 and 1."""

    level: NDArray[np.int64]
    distance: Array  # of (levels, levels)


def _encode(values: Sequence[Values], by_ratio: Collection[str]) -> list[_FieldCodes]:
    keys = list(dict.fromkeys(key for one in values for key in one))
    return [
        codes for key in keys if (codes := _encode_field([one.get(key) for one in values], by_ratio=key in by_ratio))
    ]


def _encode_field(column: Sequence[Any], *, by_ratio: bool) -> _FieldCodes | None:
    """Return the codes of a field; None of one that does not vary."""
    numbers = sorted({float(value) for value in column if _is_number(value)})
    texts = list(dict.fromkeys(_format_level(value) for value in column if not _is_number(value)))
    count = len(numbers) + len(texts)
    if count < 2:
        return None
    distance = 1 - np.eye(count)
    places = np.linspace(0, 1, len(numbers))
    if by_ratio and len(numbers) > 1:
        places = np.log(np.array(numbers) / numbers[0]) / math.log(numbers[-1] / numbers[0])
    distance[: len(numbers), : len(numbers)] = np.abs(places[:, None] - places[None, :])
    levels: dict[float | str, int] = dict(zip([*numbers, *texts], range(count), strict=True))
    return _FieldCodes(
        np.array([levels[float(value) if _is_number(value) else _format_level(value)] for value in column]), distance
    )


def _format_level(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
