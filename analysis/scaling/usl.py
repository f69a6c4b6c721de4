"""The universal scalability law fitted to a curve: what queueing and what crosstalk cost, and where more nodes hurt.

Samples per second at n nodes are λ n / (1 + σ (n - 1) + κ n (n - 1)), 0 ≤ σ ≤ 1, 0 ≤ κ (Gunther, Guerrilla Capacity
Planning, 2007, chapter 4). The node-seconds per sample, n over that, are (1 - σ) / λ + σ / λ n + κ / λ n (n - 1): with
these three coefficients, none of them negative, it is a fit of least squares without a starting value.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.special

from analysis.scaling.time_per_sample import IntervalEstimate, Pace
from analysis.stats.compare import LEAST_RUNS
from analysis.stats.interval import Interval, Kind
from bench.statistics import LEAST, LEVEL, Array, mean_bounds, student

LEAST_NODE_COUNTS = 5
RESAMPLES = 999
REJECTED_BELOW = 0.01
"""Probability of a misfit as large by chance below which the law is rejected: its parameters then mean nothing."""


class LawFit(NamedTuple):
    """The law's parameters. Their intervals hold if the law does; there are none without repeats, nor where the points
    stray from the law by more than these explain, for then it does not hold."""

    rate: IntervalEstimate  # λ: samples per second on one node
    contention: IntervalEstimate  # σ: part of the work that waits for its turn
    coherency: IntervalEstimate  # κ: what each pair of nodes costs
    peak: IntervalEstimate | None  # nodes beyond which more of them hurt; None: no peak within reach, for κ may be 0
    measured: tuple[int, ...]  # node counts that it rests on: a peak beyond them is extrapolated
    misfit: float | None  # χ² per degree of freedom by the points' own errors; None where those are unknown
    rejected: bool = False  # the points stray from the law by more than repeats explain

    def at(self, nodes: float) -> float:
        """Return the samples per second that the law tells for `nodes`."""
        slowed = 1 + self.contention.value * (nodes - 1) + self.coherency.value * nodes * (nodes - 1)
        return self.rate.value * nodes / slowed


class _Errors(NamedTuple):
    """Standard errors of the logarithms of the points, and what they rest on; all 1 where one is unknown or zero."""

    size: Array
    known: bool
    freedom: Array | int
    kind: Kind
    n: int


def fit_law(points: Mapping[int, Pace], seed: int = 0) -> LawFit | None:
    """Fit the law to paces by node count; None below five node counts, or where these leave the rate of one node open.

    Each point weighs by its relative error, or all alike where one is unknown. The intervals are of a parametric
    bootstrap: of the curves that the fitted law and these errors draw, wider where the points stray from it by more.
    """
    from scipy import optimize

    if len(points) < LEAST_NODE_COUNTS:
        return None
    measured = tuple(sorted(points))
    nodes, errors = np.array(measured, float), _estimate_errors([points[n] for n in measured])
    node_seconds, weights = nodes * [points[n].typical for n in measured], 1 / errors.size
    terms = np.stack([np.ones(nodes.size), nodes, nodes * (nodes - 1)], axis=1) * (weights / node_seconds)[:, None]
    found = optimize.nnls(terms, weights)[0]
    spare = nodes.size - found.size
    misfit = float(((terms @ found - weights) ** 2).sum() / spare)
    width, freedom = (max(1.0, misfit), errors.freedom) if errors.known else (misfit, spare)
    noise = np.random.default_rng(seed).standard_t(freedom, (RESAMPLES, nodes.size)) * np.sqrt(width)
    drawn = np.array([optimize.nnls(terms, sample)[0] for sample in terms @ found + noise])
    if not drawn[:, :2].any(axis=1).all():
        return None
    pairs = zip(_compute_parameters(found), _compute_parameters(drawn), strict=True)
    rate, contention, coherency, peak = (_compute_estimate(value, values, errors) for value, values in pairs)
    reached = coherency.interval is not None and coherency.interval.low > 0
    sample = LawFit(rate, contention, coherency, peak if reached else None, measured, misfit if errors.known else None)
    repeated = errors.kind == "between repeats"  # within runs nothing tells how much other runs would differ
    rejected = errors.known and repeated and float(scipy.special.fdtrc(spare, freedom, misfit)) < REJECTED_BELOW
    return sample if repeated and not rejected else _without_intervals(sample, rejected=rejected)


def _without_intervals(found: LawFit, *, rejected: bool) -> LawFit:
    """Return a fit that is a line through the points and tells nothing beyond them."""
    rate, contention, coherency = (
        one._replace(interval=None) for one in (found.rate, found.contention, found.coherency)
    )
    return found._replace(rate=rate, contention=contention, coherency=coherency, peak=None, rejected=rejected)


def _estimate_errors(paces: Sequence[Pace]) -> _Errors:
    """Between allocations where each point has enough of them, else within the runs. So few allocations tell a spread
    only together: it is taken to be the same part of the step time at every node count."""
    counts = np.array([len(pace.runs) for pace in paces])
    if counts.min() >= LEAST_RUNS:
        spare = int(counts.sum() - counts.size)
        squares = sum(float(np.var(np.log([*pace.means.values()])) * len(pace.runs)) for pace in paces)
        return _build_errors(np.sqrt(squares / spare / counts), spare, "between repeats", int(counts.sum()))
    series = [np.array([step for run in pace.runs.values() for step in run]) for pace in paces]
    reaches, freedom = np.transpose([_compute_half_width(steps) for steps in series])
    return _build_errors(
        reaches / student(freedom, LEVEL), freedom, "within the runs", sum(steps.size for steps in series)
    )


def _compute_half_width(steps: Array) -> tuple[float, float]:
    """Return half the length of the interval of a mean's logarithm, infinite where it has none, and its degrees of
    freedom."""
    if steps.size < LEAST:
        return math.inf, 1.0
    bounds = mean_bounds(steps, LEVEL)
    known = bounds.low > 0 and np.isfinite(bounds.high)
    return math.log(bounds.high / bounds.low) / 2 if known else math.inf, float(bounds.freedom)


def _build_errors(size: Array, freedom: Array | int, kind: Kind, n: int) -> _Errors:
    known = bool((np.isfinite(size) & (size > 0)).all())
    return _Errors(size if known else np.ones(size.size), known, freedom, kind, n)


def _compute_parameters(coefficients: Array) -> tuple[Array, Array, Array, Array]:
    """Return λ, σ, κ and the peak of (1 - σ) / λ, σ / λ and κ / λ along the last axis."""
    serial, waiting, crosstalk = np.moveaxis(coefficients, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        turning = np.sqrt(serial / crosstalk)  # where the law's derivative is zero
    whole = serial + waiting
    return 1 / whole, waiting / whole, crosstalk / whole, np.where(serial > 0, np.maximum(turning, 1), 1)


def _compute_estimate(value: Array, drawn: Array, errors: _Errors) -> IntervalEstimate:
    """Return the value with the drawn ones nearest to the ends of its interval, a whole one on either side of them."""
    low = float(np.quantile(drawn, (1 - LEVEL) / 2, method="lower"))
    high = float(np.quantile(drawn, (1 + LEVEL) / 2, method="higher"))
    return IntervalEstimate(float(value), Interval(low, high, errors.kind, LEVEL, errors.n))
