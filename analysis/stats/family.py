"""Multiple comparisons: verdicts on many configurations or pairs, with a limit on the probability that any of them is
wrong.

The compared configurations form a family. Each has too few repeats to estimate its own variance well. So a difference
is reported only if three tests on the logarithms of the times agree:

pooled    Assumes one variance for all repeats of the family, with many degrees of freedom. For the best configuration
          it is the Tukey-Kramer test (Tukey, 1953; Kramer, Biometrics 12, 1956). For pairs chosen beforehand it is
          Student's test with Holm's correction.
moderate  Shrinks the variance of each configuration towards the common variance (Smyth, Statistical Applications in
          Genetics and Molecular Biology 3, 2004). The shrinkage is strong if the variances resemble each other.
own       Uses only the repeats of the pair, without correction for the number of pairs: Welch's test, or the paired
          test within allocations.

`tests/benchmarks/verdicts.py` shows why all three are needed. The pooled test alone reports false differences if times
have heavy tails or unequal variances. The moderate test alone reports false differences if nodes are of two kinds, such
as fast and slow. No test recognises dependent repeats, such as those of a configuration that always ran on the same bad
node.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from bench.core.statistics import LEVEL, Array, student

# Numbers of simulated values for each quantile. Quantiles are precise to two digits, and the simulation takes less than
# a second and fits into a laptop's memory.
_LEAST_DRAWS, _MOST_DRAWS, _VALUES = 4000, 20_000, 500_000
_TABULATED_DEGREES = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 40, 100, np.inf)
"""Degrees of freedom for which critical values are simulated. Other values are rounded down to one of these, so that
cached critical values can be used for many families."""
_BIAS_DRAWS = 1000
_CAUTION = 0.5
"""Number of standard errors that are added to the estimated spread of the configurations' variances. Without this, a
family of few configurations would too easily be taken to have equal variances."""
_LEAST_SHARE = 1e-6  # smallest variance, as a fraction of the pooled one; identical repeats have a variance of 0


class Noise(NamedTuple):
    """Sample variance of `n` values. A value is the logarithm of a repeat's time, or the difference between the
    logarithms of two configurations in one allocation."""

    variance: float
    n: int

    @property
    def degrees_of_freedom(self) -> int:
        return self.n - 1


class Gap(NamedTuple):
    """Logarithm of the ratio of two times, and the margin of error of this logarithm in each direction."""

    value: float
    margin: float


class Prior(NamedTuple):
    """Common distribution of the variances of a family's configurations (a scaled inverse chi-square distribution). The
    degrees of freedom of this distribution are infinite if all variances are equal."""

    variance: float
    degrees_of_freedom: float


class Family:
    """Configurations that are compared with each other, in any pairs, also in pairs that are selected after seeing the
    data.

    The intervals of all pairs hold simultaneously with probability `level`. `logs` holds for each configuration the
    logarithms of its times, one per allocation. With `blocked`, value i of all configurations is from the same
    allocation.
    """

    def __init__(self, logs: Sequence[Array], level: float = LEVEL, *, blocked: bool = False) -> None:
        self._logs, self._blocked, self._level = [np.asarray(one, float) for one in logs], blocked, level
        self.means = np.array([one.mean() for one in self._logs])
        self._noises = _compute_block_noises(np.array(self._logs)) if blocked else list(map(compute_noise, self._logs))
        self._counts = np.array([one.n for one in self._noises])
        count = len(self._noises)
        total = (count - 1) * int(self._counts[0] - 1) if blocked else int((self._counts - 1).sum())
        self._pooled = _pool(self._noises)
        self._range = _range_quantile(level, count, total)
        known = estimate_prior(self._noises)
        self._moderate = np.array([_moderate(one, known)[0] for one in self._noises])
        below = [one for one in _TABULATED_DEGREES if one <= known.degrees_of_freedom]
        tabulated = max(below, default=_TABULATED_DEGREES[0])
        self._critical = _critical(tuple(sorted(self._counts.tolist())), tabulated, level)

    @property
    def lead(self) -> int:
        """The index of the configuration with the lowest mean."""
        return int(self.means.argmin())

    @functools.cached_property
    def selection_bias(self) -> float:
        """Estimated amount by which the fastest configuration's mean is too low because this configuration was selected
        for its low mean. The amount is a difference of logarithms, because the means are logarithms of times.

        The amount is simulated. A part of the spread of the means is noise. To remove this part, the means are first
        shrunk towards their common mean (the James-Stein estimator). Then random noise of the pooled variance is added
        to the shrunk means, and the lowest sum is selected. The amount is minus the mean noise of the selected sums.
        """
        errors = np.sqrt(self._pooled / self._counts)
        scatter = float(self.means.var(ddof=1)) if self.means.size > 1 else 0.0
        # James-Stein factor: the part of the variance of means that noise does not explain
        kept = max(1 - float((errors**2).mean()) / scatter, 0.0) if scatter else 0.0
        centres = self.means.mean() + np.sqrt(kept) * (self.means - self.means.mean())
        noise = errors * np.random.default_rng(0).standard_normal((_BIAS_DRAWS, errors.size))
        lead = (centres + noise).argmin(axis=1)[:, None]
        return max(-float(np.take_along_axis(noise, lead, axis=1).mean()), 0.0)

    def gap(self, one: int, other: int) -> Gap:
        """Return the log ratio of the times of two configurations, with a margin of error that holds for all pairs of
        the family simultaneously. `one` and `other` are indices of configurations."""
        inverse_counts = 1 / self._counts[[one, other]]
        # Tukey-Kramer: the standard error of a difference is √2 times the one in the studentized range
        pooled = self._range * np.sqrt(self._pooled * inverse_counts.sum() / 2)
        moderate = self._critical * np.sqrt((self._moderate[[one, other]] * inverse_counts).sum())
        own = self._compute_own_margin(one, other)
        return Gap(float(self.means[one] - self.means[other]), float(max(pooled, moderate, own)))

    def _compute_own_margin(self, one: int, other: int) -> float:
        """Return the margin of error of the log ratio of two configurations, from their own repeats alone. `one` and
        `other` are indices of the configurations."""
        sides = [self._noises[one], self._noises[other]]
        if self._blocked:
            sides = [compute_noise(self._logs[one] - self._logs[other])]
        variances = [side.variance / side.n for side in sides]
        degrees_of_freedom = satterthwaite(variances, [side.degrees_of_freedom for side in sides])
        return float(student(np.asarray(degrees_of_freedom), self._level) * np.sqrt(sum(variances)))


def correct_p_values(gaps: Sequence[float], noises: Sequence[Sequence[Noise]], own: Sequence[float]) -> list[float]:
    """Return the p-values of pairs that were chosen before the measurement, corrected for the number of pairs.

    `gaps` holds the logarithm of each pair's ratio. `noises` holds the noise of each pair. If both sides of a pair ran
    in the same allocations, `noises` has one entry for the pair: the noise of the differences within allocations.
    Otherwise `noises` has two entries for the pair, the noise of each side. `own` holds the p-value of each pair from
    its own repeats, without correction.
    """
    pooled, moderate = np.ones(len(gaps)), np.ones(len(gaps))
    # variances of differences (1 noise) and of single sides (2) are not comparable, so they are not pooled
    for kind in (1, 2):
        places = [place for place, sides in enumerate(noises) if len(sides) == kind]
        members = [one for place in places for one in noises[place]]
        if not members:
            continue
        variance, known = _pool(members), estimate_prior(members)
        total = sum(one.degrees_of_freedom for one in members)
        for place in places:
            sides = noises[place]
            pooled[place] = compute_p_value(gaps[place], [variance / one.n for one in sides], total)
            shrunk = [_moderate(one, known) for one in sides]
            variances = [each / one.n for (each, _), one in zip(shrunk, sides, strict=True)]
            degrees_of_freedom = min(total, satterthwaite(variances, [each for _, each in shrunk]))
            moderate[place] = compute_p_value(gaps[place], variances, degrees_of_freedom)
    return [max(found) for found in zip(holm(pooled), holm(moderate), own, strict=True)]


def compute_equivalence(gaps: Sequence[float], noises: Sequence[Sequence[Noise]], margin: float) -> list[float]:
    """Return a p-value for each pair of configurations, corrected for the number of pairs. The null hypothesis is that
    the true log ratio of a pair is at least `margin`, in either direction.

    A small p-value shows that the two sides differ by less than `margin`. `gaps` (log ratios) and `noises` are as in
    `correct_p_values`. The method is two one-sided tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics
    15, 1987). Each pair is tested with three estimates of its variance, and the largest p-value counts. The estimates
    are called pooled, moderate and own at the beginning of this module. Pairs must have been chosen before the
    measurement.
    """
    left = [margin - abs(gap) for gap in gaps]
    own = [compute_pair_p_value(one, sides) for one, sides in zip(left, noises, strict=True)]
    p_values = correct_p_values(left, noises, own)
    return [min(p_value / 2, 1.0) if one > 0 else 1.0 for one, p_value in zip(left, p_values, strict=True)]


def compute_pair_p_value(gap: float, sides: Sequence[Noise]) -> float:
    """Return the p-value of `gap`, the log ratio of one pair, from the pair's own repeats alone. `sides` holds the
    noise of each side, or only the noise of the differences within allocations."""
    variances = [one.variance / one.n for one in sides]
    return compute_p_value(gap, variances, satterthwaite(variances, [one.degrees_of_freedom for one in sides]))


def compute_p_value(gap: float, variances: Sequence[float], degrees_of_freedom: float) -> float:
    """Return the two-sided p-value of `gap`, a log ratio, by Student's t. `variances` holds the variances of the two
    means that are compared. For a comparison within allocations, it holds only the variance of the mean difference."""
    error = float(np.sqrt(sum(variances)))
    if error == 0:
        return float(gap == 0)
    return float(2 * scipy.special.stdtr(degrees_of_freedom, -abs(gap) / error))


def satterthwaite(variances: Sequence[float], degrees_of_freedom: Sequence[float]) -> float:
    """Return the effective degrees of freedom of the sum of the estimated `variances`, as in Welch's test
    (Satterthwaite, Biometrics Bulletin 2, 1946)."""
    spare = sum(variance**2 / degrees for variance, degrees in zip(variances, degrees_of_freedom, strict=True))
    return sum(variances) ** 2 / spare if spare else np.inf


def holm(p_values: Sequence[float] | Array) -> list[float]:
    """Return p-values corrected for the number m of tests (Holm, Scandinavian Journal of Statistics 6, 1979).

    The k-th smallest is multiplied by m - k + 1, and the results are made monotone. scipy does not have this
    correction.
    """
    raw = np.asarray(p_values, float)
    order = np.argsort(raw, kind="stable")
    found = np.empty_like(raw)
    found[order] = np.minimum(np.maximum.accumulate(raw[order] * np.arange(raw.size, 0, -1)), 1.0)
    return [float(one) for one in found]


def estimate_prior(noises: Sequence[Noise]) -> Prior:
    """Return the common distribution of the configurations' variances, estimated from the logarithms of these variances
    (Smyth, 2004, section 6.2)."""
    pooled, halves = _pool(noises), np.array([one.degrees_of_freedom for one in noises]) / 2
    if len(noises) < 2 or pooled == 0:
        return Prior(pooled, np.inf)
    # the logarithm of a sample variance is biased by digamma(d/2) - log(d/2), and has variance trigamma(d/2)
    logs = np.log([max(one.variance, _LEAST_SHARE * pooled) for one in noises])
    logs = logs - scipy.special.digamma(halves) + np.log(halves)
    expected = scipy.special.polygamma(1, halves)
    kurtosis = scipy.special.polygamma(3, halves) / expected**2 + 3
    error = np.mean(expected * np.sqrt((kurtosis - 1) / len(noises)))
    excess = max(float(logs.var(ddof=1) - expected.mean()), 0.0) + _CAUTION * float(error)
    degrees_of_freedom = 2 * _inverse_trigamma(excess)
    if not np.isfinite(degrees_of_freedom):
        return Prior(pooled, np.inf)
    centre = logs.mean() + scipy.special.digamma(degrees_of_freedom / 2) - np.log(degrees_of_freedom / 2)
    return Prior(float(np.exp(centre)), degrees_of_freedom)


def compute_noise(logs: Array) -> Noise:
    """Return the sample variance and the number of `logs`, which are logarithms of times."""
    return Noise(float(logs.var(ddof=1)), logs.size)


def _compute_block_noises(logs: Array) -> list[Noise]:
    """Return the noise of each configuration after the mean of each allocation is subtracted. `logs` has shape
    (configurations, allocations)."""
    count = len(logs)
    spread = (logs - logs.mean(axis=0)).var(axis=1, ddof=1) * count / max(count - 1, 1)
    return [Noise(float(one), logs.shape[1]) for one in spread]


def _pool(noises: Sequence[Noise]) -> float:
    return sum(one.variance * one.degrees_of_freedom for one in noises) / sum(one.degrees_of_freedom for one in noises)


def _moderate(noise: Noise, known: Prior) -> tuple[float, float]:
    """Return a variance shrunk towards the common distribution `known`, and its degrees of freedom."""
    if not np.isfinite(known.degrees_of_freedom):
        return known.variance, np.inf
    total = known.degrees_of_freedom + noise.degrees_of_freedom
    weighted = known.degrees_of_freedom * known.variance + noise.degrees_of_freedom * noise.variance
    return weighted / total, total


@functools.lru_cache(maxsize=512)
def _range_quantile(level: float, count: int, degrees_of_freedom: int) -> float:
    """Return the quantile at `level` of the studentized range of `count` values. The quantile is simulated, because
    scipy takes up to a second."""
    rng = np.random.default_rng(0)
    ranges = np.concatenate([np.ptp(rng.standard_normal((rows, count)), axis=1) for rows in _list_batches(count)])
    scale = np.sqrt(rng.chisquare(degrees_of_freedom, ranges.size) / degrees_of_freedom)
    return float(np.quantile(ranges / scale, level))


@functools.lru_cache(maxsize=512)
def _critical(counts: tuple[int, ...], degrees_of_freedom: float, level: float) -> float:
    """Return the critical value for the log ratio of a configuration to the fastest configuration. The critical value
    is a multiple of the standard error of this log ratio. The standard error comes from moderate variances, which are
    shrunk towards the common variance.

    If all configurations are truly equal, the largest log ratio stays below the critical value with probability
    `level`. The value is simulated from a fixed seed. `counts` holds the number of repeats of each configuration.
    `degrees_of_freedom` is a parameter of the distribution of the variances (`Prior`).
    """
    rng, repeats = np.random.default_rng(0), np.array(counts)
    largest = [_draw_gaps(rng, repeats, degrees_of_freedom, rows).max(axis=1) for rows in _list_batches(repeats.size)]
    return float(np.quantile(np.concatenate(largest), level))


def _list_batches(count: int) -> list[int]:
    """Return the number of families in each batch of a simulation. A family has `count` configurations. Simulating in
    batches bounds the memory used."""
    draws, most = min(max(_VALUES // count, _LEAST_DRAWS), _MOST_DRAWS), max(_VALUES // count, 1)
    return [min(most, draws - done) for done in range(0, draws, most)]


def _draw_gaps(rng: np.random.Generator, repeats: NDArray[np.int64], degrees_of_freedom: float, rows: int) -> Array:
    """Return simulated log ratios of configurations to the fastest configuration of their family. A family is a set of
    configurations that are compared. Each log ratio is divided by its standard error. The shape is (families,
    configurations).

    The configurations of a family have equal true times, but their variances differ. The variances are drawn from a
    scaled inverse chi-square distribution with `degrees_of_freedom`. If `degrees_of_freedom` is infinite, all variances
    are equal. `rows` is the number of families, and `repeats` holds the number of repeats of each configuration.
    """
    shape = (rows, repeats.size)
    finite = np.isfinite(degrees_of_freedom)
    true = degrees_of_freedom / rng.chisquare(degrees_of_freedom, shape) if finite else np.ones(shape)
    means = rng.standard_normal(shape) * np.sqrt(true / repeats)
    own = true * rng.chisquare(repeats - 1, shape) / (repeats - 1)
    total = degrees_of_freedom + repeats - 1
    moderate = (degrees_of_freedom + (repeats - 1) * own) / total if finite else np.ones(shape)
    variances = moderate / repeats
    lead = means.argmin(axis=1)[:, None]
    gaps = means - np.take_along_axis(means, lead, axis=1)
    largest: Array = gaps / np.sqrt(variances + np.take_along_axis(variances, lead, axis=1))
    return largest


def _inverse_trigamma(value: float) -> float:
    """Return the x at which the trigamma function equals `value`; infinite if `value` is almost zero.

    The equation is solved by Newton's method for the reciprocal of the function (Smyth, 2004, appendix).
    """
    if value < 1e-6:
        return np.inf
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(scipy.special.polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(scipy.special.polygamma(2, x))
        x += step
        if -step / x < 1e-9:
            break
    return x
