"""Many configurations or pairs judged together, so that all verdicts hold at once.

Each configuration has few repeats, and too few of their own to tell how much they scatter. So three things must agree
before a difference counts, on the logarithms of the times:

pooled    all repeats of the family scatter alike: one variance of many degrees of freedom (Tukey, 1953; Kramer,
          Biometrics 12, 1956, for the best; Student with Holm's correction for fixed pairs)
moderate  each configuration's own variance, drawn towards that of the others by as much as the variances resemble each
          other (Smyth, Statistical Applications in Genetics and Molecular Biology 3, 2004): noisy ones stay noisy
own       the pair alone, with its own repeats, uncorrected: Welch's test, or of the differences within allocations

The first alone calls alike configurations different where tails are heavy or some are noisier, the second where nodes
are of two kinds; `tests/benchmarks/verdicts.py` counts. Nobody can tell repeats apart that resemble each other, as of a
configuration that always ran on the same bad node.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from bench.core.statistics import LEVEL, Array, student

_LEAST_DRAWS, _MOST_DRAWS, _VALUES = 4000, 20_000, 500_000
_FREEDOMS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 40, 100, np.inf)
_LUCK_DRAWS = 1000
_CAUTION = 0.5
"""Standard errors by which the variances are taken to differ more than they seem to: where few of them are known, a
family of one scatter is otherwise assumed too easily."""
_LEAST_SHARE = 1e-6  # of the pooled variance: repeats that are equal to the last digit still scatter


class Noise(NamedTuple):
    """How the logarithms of a group's repeats, or of the differences of two groups within allocations, scatter."""

    variance: float
    n: int

    @property
    def freedom(self) -> int:
        return self.n - 1


class Gap(NamedTuple):
    """Logarithm of the ratio of two times, and how far from it the true one may lie on either side."""

    value: float
    reach: float


class Prior(NamedTuple):
    """What the variances of a family have in common; `freedom` is infinite where they are all the same."""

    variance: float
    freedom: float


class Family:
    """Configurations that are compared with each other, whichever pairs of them the data suggest.

    All intervals of a family hold together at `level`. `logs` are the logarithms of each configuration's times, one per
    allocation; where `blocked`, the first of all of them are of one allocation, and so the second ….
    """

    def __init__(self, logs: Sequence[Array], level: float = LEVEL, *, blocked: bool = False) -> None:
        self._logs, self._blocked, self._level = [np.asarray(one, float) for one in logs], blocked, level
        self.means = np.array([one.mean() for one in self._logs])
        noises = _within_blocks(np.array(self._logs)) if blocked else [_noise(one) for one in self._logs]
        self._counts = np.array([one.n for one in noises])
        count = len(noises)
        freedom = (count - 1) * int(self._counts[0] - 1) if blocked else int((self._counts - 1).sum())
        self._shares = [one.variance / one.n for one in noises]
        self._pooled = _pooled(noises)
        self._range = _range_quantile(level, count, freedom)
        known = prior(noises)
        self._moderate = np.array([_moderate(one, known)[0] for one in noises])
        self._critical = _critical(tuple(sorted(self._counts.tolist())), _rounded(known.freedom), level)

    @property
    def lead(self) -> int:
        """The place of the fastest as measured."""
        return int(self.means.argmin())

    @functools.cached_property
    def luck(self) -> float:
        """How much faster than it truly is the fastest seems, as a logarithm: the fastest of several alike as measured
        is also one that was lucky.

        Drawn from the means, each drawn towards the others by as much as noise explains their differences (James and
        Stein's estimate), with the pooled noise on top.
        """
        errors = np.sqrt(self._pooled / self._counts)
        scatter = float(self.means.var(ddof=1)) if self.means.size > 1 else 0.0
        kept = max(1 - float((errors**2).mean()) / scatter, 0.0) if scatter else 0.0
        centres = self.means.mean() + np.sqrt(kept) * (self.means - self.means.mean())
        noise = errors * np.random.default_rng(0).standard_normal((_LUCK_DRAWS, errors.size))
        lead = (centres + noise).argmin(axis=1)[:, None]
        return max(-float(np.take_along_axis(noise, lead, axis=1).mean()), 0.0)

    def gap(self, one: int, other: int) -> Gap:
        """Return the gap of one to the other, with a reach that holds for all pairs together."""
        shares = 1 / self._counts[[one, other]]
        pooled = self._range * np.sqrt(self._pooled * shares.sum() / 2)
        moderate = self._critical * np.sqrt((self._moderate[[one, other]] * shares).sum())
        own = self._own_reach(one, other)
        return Gap(float(self.means[one] - self.means[other]), float(max(pooled, moderate, own)))

    def _own_reach(self, one: int, other: int) -> float:
        """Return the reach of the pair alone."""
        if self._blocked:
            noise = _noise(self._logs[one] - self._logs[other])
            share, freedom = noise.variance / noise.n, float(noise.freedom)
        else:
            sides = [self._shares[one], self._shares[other]]
            share, freedom = sum(sides), satterthwaite(sides, [self._counts[one] - 1, self._counts[other] - 1])
        return float(student(np.asarray(freedom), self._level) * np.sqrt(share))


def corrected(gaps: Sequence[float], noises: Sequence[Sequence[Noise]], own: Sequence[float]) -> list[float]:
    """Return p-values of pairs that were chosen beforehand, corrected for their number.

    `gaps` are the logarithms of the ratios; `noises` those of both sides or, of a pair within allocations, of its
    differences; `own` the p-values of each pair alone.
    """
    pooled, moderate = np.ones(len(gaps)), np.ones(len(gaps))
    for kind in (1, 2):
        places = [place for place, sides in enumerate(noises) if len(sides) == kind]
        members = [one for place in places for one in noises[place]]
        if not members:
            continue
        variance, known = _pooled(members), prior(members)
        freedom = sum(one.freedom for one in members)
        for place in places:
            sides = noises[place]
            pooled[place] = compute_chance(gaps[place], [variance / one.n for one in sides], freedom)
            drawn = [_moderate(one, known) for one in sides]
            shares = [each / one.n for (each, _), one in zip(drawn, sides, strict=True)]
            own_freedom = satterthwaite(shares, [each for _, each in drawn])
            moderate[place] = compute_chance(gaps[place], shares, min(freedom, own_freedom))
    return [max(found) for found in zip(holm(pooled), holm(moderate), own, strict=True)]


def equivalent(gaps: Sequence[float], noises: Sequence[Sequence[Noise]], margin: float) -> list[float]:
    """Return p-values, corrected for the number of pairs, of true gaps that are as wide as `margin` or wider, for pairs
    that were chosen beforehand: two one-sided tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15,
    1987), by the three ways of this module. A small one shows that two sides do not differ by that much."""
    left = [margin - abs(gap) for gap in gaps]
    own = [compute_pair_chance(one, sides) for one, sides in zip(left, noises, strict=True)]
    return [
        min(chance / 2, 1.0) if one > 0 else 1.0 for one, chance in zip(left, corrected(left, noises, own), strict=True)
    ]


def compute_pair_chance(gap: float, sides: Sequence[Noise]) -> float:
    """Return the probability of a gap so wide where there is none, by the repeats of this pair alone."""
    shares = [one.variance / one.n for one in sides]
    return compute_chance(gap, shares, satterthwaite(shares, [one.freedom for one in sides]))


def holm(chances: Sequence[float] | Array) -> list[float]:
    """Return p-values corrected for their number: the k-th smallest of m times m - k + 1, never below a smaller one's
    (Holm, Scandinavian Journal of Statistics 6, 1979), which scipy has not."""
    found, least = [1.0] * len(chances), 0.0
    for done, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        least = max(least, min(1.0, float((len(chances) - done) * chances[index])))
        found[index] = least
    return found


def prior(noises: Sequence[Noise]) -> Prior:
    """Return what the variances have in common, as Smyth (2004, section 6.2) estimates it from their logarithms."""
    pooled, halves = _pooled(noises), np.array([one.freedom for one in noises]) / 2
    if len(noises) < 2 or pooled == 0:
        return Prior(pooled, np.inf)
    logs = np.log([max(one.variance, _LEAST_SHARE * pooled) for one in noises])
    logs = logs - scipy.special.digamma(halves) + np.log(halves)
    expected = scipy.special.polygamma(1, halves)
    kurtosis = scipy.special.polygamma(3, halves) / expected**2 + 3
    error = np.mean(expected * np.sqrt((kurtosis - 1) / len(noises)))
    left = max(float(logs.var(ddof=1) - expected.mean()), 0.0) + _CAUTION * float(error)
    freedom = 2 * _inverse_trigamma(left)
    if not np.isfinite(freedom):
        return Prior(pooled, np.inf)
    centre = logs.mean() + scipy.special.digamma(freedom / 2) - np.log(freedom / 2)
    return Prior(float(np.exp(centre)), freedom)


def _noise(logs: Array) -> Noise:
    return Noise(float(logs.var(ddof=1)), logs.size)


def _within_blocks(logs: Array) -> list[Noise]:
    """Return the scatter of each configuration beside the mean of all in its allocation."""
    count = len(logs)
    spread = (logs - logs.mean(axis=0)).var(axis=1, ddof=1) * count / max(count - 1, 1)
    return [Noise(float(one), logs.shape[1]) for one in spread]


def _pooled(noises: Sequence[Noise]) -> float:
    return sum(one.variance * one.freedom for one in noises) / sum(one.freedom for one in noises)


def _moderate(noise: Noise, known: Prior) -> tuple[float, float]:
    """Return a variance drawn towards what is known of the others, and its degrees of freedom."""
    if not np.isfinite(known.freedom):
        return known.variance, np.inf
    freedom = known.freedom + noise.freedom
    return (known.freedom * known.variance + noise.freedom * noise.variance) / freedom, freedom


def satterthwaite(shares: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of estimated variances (Biometrics Bulletin 2, 1946), as Welch's test
    has them."""
    spare = sum(share**2 / freedom for share, freedom in zip(shares, freedoms, strict=True))
    return sum(shares) ** 2 / spare if spare else np.inf


def compute_chance(gap: float, shares: Sequence[float], freedom: float) -> float:
    """Return the probability of a gap so wide where there is none; `shares` are the variances of the means."""
    error = float(np.sqrt(sum(shares)))
    if error == 0:
        return float(gap == 0)
    return float(2 * scipy.special.stdtr(freedom, -abs(gap) / error))


@functools.lru_cache(maxsize=512)
def _range_quantile(level: float, count: int, freedom: int) -> float:
    """Return the quantile of the studentized range of `count` values; drawn, for scipy takes up to a second for one."""
    rng = np.random.default_rng(0)
    ranges = [np.ptp(rng.standard_normal((rows, count)), axis=1) for rows in _portions(count)]
    whole = np.concatenate(ranges)
    return float(np.quantile(whole / np.sqrt(rng.chisquare(freedom, whole.size) / freedom), level))


def _rounded(freedom: float) -> float:
    """Return the next lower of the degrees of freedom for which a quantile is drawn."""
    return max((one for one in _FREEDOMS if one <= freedom), default=_FREEDOMS[0])


@functools.lru_cache(maxsize=512)
def _critical(counts: tuple[int, ...], freedom: float, level: float) -> float:
    """Return how many moderate standard errors the gap of any of several alike configurations to the fastest of them
    stays below, with probability `level`; drawn, always from the same seed."""
    rng, repeats = np.random.default_rng(0), np.array(counts)
    largest = [_drawn_largest(rng, repeats, freedom, rows).max(axis=1) for rows in _portions(repeats.size)]
    return float(np.quantile(np.concatenate(largest), level))


def _portions(count: int) -> list[int]:
    """Return how many families of `count` configurations are drawn at a time, in memory that a laptop has."""
    draws, most = min(max(_VALUES // count, _LEAST_DRAWS), _MOST_DRAWS), max(_VALUES // count, 1)
    return [min(most, draws - done) for done in range(0, draws, most)]


def _drawn_largest(rng: np.random.Generator, repeats: NDArray[np.int64], freedom: float, rows: int) -> Array:
    """Return, for each configuration of each of `rows` families, its gap to the fastest in moderate standard errors."""
    shape = (rows, repeats.size)
    finite = np.isfinite(freedom)
    true = freedom / rng.chisquare(freedom, shape) if finite else np.ones(shape)
    means = rng.standard_normal(shape) * np.sqrt(true / repeats)
    own = true * rng.chisquare(repeats - 1, shape) / (repeats - 1)
    moderate = (freedom + (repeats - 1) * own) / (freedom + repeats - 1) if finite else np.ones(shape)
    shares = moderate / repeats
    lead = means.argmin(axis=1)[:, None]
    gaps = means - np.take_along_axis(means, lead, axis=1)
    largest: Array = gaps / np.sqrt(shares + np.take_along_axis(shares, lead, axis=1))
    return largest


def _inverse_trigamma(value: float) -> float:
    """Return the x at which the trigamma function is `value`, by Newton's method on its reciprocal (Smyth, 2004,
    appendix); infinite for zero."""
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
