"""What measured trials say of the others: a Gaussian process over how far runs are from their predictions.

The cost of a candidate is its prediction and a deviation; the deviation has a part that all share (the machine is
slower than its file says), a part by each field alone (a technique is), and a part of the combination. Values of a
field that are numbers are the nearer the fewer values lie between them; others are equal or not. Scale and noise are
those under which the measured deviations are likeliest, weighed by what is usual (Rasmussen & Williams, Gaussian
Processes for Machine Learning, 2006, sections 2.2 and 5.4.1).
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

from bench.search.space import Values

Array = NDArray[np.float64]

_SHARED = 0.5  # standard deviation of the part that all share, in log: by e^0.5 in either direction
_SCALES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)  # of the rest, in log …
_USUAL_SCALE, _DECADES = 0.25, 0.5  # … usually this, give or take so many powers of ten
_NOISES = (0.005, 0.02, 0.06)  # between two runs of one point, in log
_REACH = 0.5  # of the range of a field, over which combinations forget each other
_MOST_FITTED = 150  # results by which scale and noise are chosen: more change little and cost much


class Belief(NamedTuple):
    """What is believed of each candidate's cost."""

    mean: Array
    deviation: Array


class Surrogate:
    """Beliefs about candidates, from their predicted costs and what was measured of some of them."""

    def __init__(self, values: Sequence[Values], predicted: Sequence[float | None]) -> None:
        known = [cost for cost in predicted if cost is not None]
        middle = float(np.median(known)) if known else 0.0
        self.predicted = np.array([middle if cost is None else cost for cost in predicted])
        self._codes = _encode(values)

    def believe(self, tried: Sequence[int], costs: Sequence[float]) -> Belief:
        """Return what is believed of all candidates, those with the numbers `tried` having had these `costs`."""
        everything = np.arange(len(self.predicted))
        if not len(tried):
            spread = math.hypot(_SHARED, _USUAL_SCALE)
            return Belief(self.predicted.copy(), np.full(len(everything), spread))
        mean, across, scale = self._condition(tried, costs, everything)
        variance = _SHARED**2 + scale**2 - (across**2).sum(axis=0)
        return Belief(mean, np.sqrt(np.maximum(variance, 1e-12)))

    def draw(
        self,
        tried: Sequence[int],
        costs: Sequence[float],
        of: NDArray[np.int64],
        count: int,
        generator: np.random.Generator,
    ) -> Array:
        """Draw the costs of some candidates together, `count` times: an array of (count, candidates)."""
        mean, across, scale = self._condition(tried, costs, of)
        covariance = self._covariance(of, of, scale) - across.T @ across
        factor = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(of)))
        drawn: Array = mean + generator.standard_normal((count, len(of))) @ factor.T
        return drawn

    def _condition(
        self, tried: Sequence[int], costs: Sequence[float], of: NDArray[np.int64]
    ) -> tuple[Array, Array, float]:
        """Return the mean of some candidates, what the trials take from their covariance, and its scale."""
        at, deviation = np.array(tried), np.array(costs) - self.predicted[list(tried)]
        scale, noise = self._fit(at[-_MOST_FITTED:], deviation[-_MOST_FITTED:])
        factor = scipy.linalg.cholesky(
            self._covariance(at, at, scale) + noise**2 * np.eye(len(at)), lower=True, overwrite_a=True
        )
        across: Array = scipy.linalg.solve_triangular(factor, self._covariance(at, of, scale), lower=True)
        mean: Array = across.T @ scipy.linalg.solve_triangular(factor, deviation, lower=True)
        return self.predicted[of] + mean, across, scale

    def _fit(self, at: NDArray[np.int64], deviation: Array) -> tuple[float, float]:
        """Return the scale and the noise under which deviations are likeliest."""
        unit = self._covariance(at, at, 1.0) - _SHARED**2
        best, likeliest = (_USUAL_SCALE, _NOISES[1]), -math.inf
        for scale in _SCALES:
            usual = -0.5 * (math.log10(scale / _USUAL_SCALE) / _DECADES) ** 2
            for noise in _NOISES:
                covariance = _SHARED**2 + scale**2 * unit + noise**2 * np.eye(len(at))
                factor = scipy.linalg.cholesky(covariance, lower=True, overwrite_a=True)
                whitened = scipy.linalg.solve_triangular(factor, deviation, lower=True)
                likelihood = usual - 0.5 * float(whitened @ whitened) - float(np.log(np.diag(factor)).sum())
                if likelihood > likeliest:
                    best, likeliest = (scale, noise), likelihood
        return best

    def _covariance(self, rows: NDArray[np.int64], columns: NDArray[np.int64], scale: float) -> Array:
        """Return the prior covariance of deviations between candidates."""
        apart, alone = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
        for codes in self._codes:
            here, there = codes.place[rows][:, None], codes.place[columns][None, :]
            same = codes.category[rows][:, None] == codes.category[columns][None, :]
            distance = np.where(same, np.abs(here - there), 1.0)
            apart += distance
            alone += 1 - distance
        alone /= max(len(self._codes), 1)
        covariance: Array = _SHARED**2 + scale**2 * (0.5 * alone + 0.5 * np.exp(-apart / _REACH))
        return covariance


def compute_expected_gains(belief: Belief, best: float) -> Array:
    """Return by how much each candidate is expected to improve on the cost `best`, 0 where it does not (Mockus's
    expected improvement)."""
    z = (best - belief.mean) / belief.deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gains: Array = belief.deviation * (z * scipy.special.ndtr(z) + density)
    return gains


class _FieldCodes(NamedTuple):
    """A field of every candidate: what it is, and for numbers where between the least and the greatest."""

    category: NDArray[np.int64]
    place: Array


def _encode(values: Sequence[Values]) -> list[_FieldCodes]:
    keys = list(dict.fromkeys(key for one in values for key in one))
    return [codes for key in keys if (codes := _encode_field([one.get(key) for one in values]))]


def _encode_field(column: Sequence[Any]) -> _FieldCodes | None:
    """Return the codes of a field; None of one that does not vary. All numbers are one category."""
    numbers = sorted({float(value) for value in column if _is_number(value)})
    kinds = ["number" if _is_number(value) else json.dumps(value, sort_keys=True) for value in column]
    categories = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    if len(numbers) < 2 and len(categories) < 2:
        return None
    place = {number: index / max(len(numbers) - 1, 1) for index, number in enumerate(numbers)}
    return _FieldCodes(
        np.array([categories[kind] for kind in kinds]),
        np.array([place[float(value)] if _is_number(value) else 0.0 for value in column]),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
