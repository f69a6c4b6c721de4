"""Error rates and power of the verdicts (slower, equal) when many configurations are compared.

  python -m tests.benchmarks.verdicts [--families 500]

A simulated family is a set of configurations with known true times and three or five repeats each. Noise is added to
the logarithm of the time. In rows marked `apart`, every repeat has its own allocation. In rows marked `within`, each
allocation has one repeat of every configuration, and all of these repeats have the same random offset. If all
configurations are equally fast, the offset's standard deviation is 3 times the noise. In the table whose true times
are spread over 30 %, the offset's standard deviation is 300 times the noise.

The statistical method was chosen with four distributions of noise: normal, t, two kinds of nodes (`30 % bad nodes`),
and normal with another width for each configuration (`unequal noise`). The other distributions were not used for this
choice, so that they test the method.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from scipy import stats

from analysis.stats.compare import EQUAL, INTEREST, judge_interval
from analysis.stats.family import Family, Noise, compute_equivalence, correct_p_values
from analysis.stats.intervals import Interval
from bench.core.statistics import LEVEL

Array = np.ndarray
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]

SIZES = (2, 5, 10, 50)
REPEATS = (3, 5)
LAYOUTS = ((3, False), (3, True), (5, False))
PAIRS = (1, 10, 50)
_MOST = 10_000  # maximum number of configurations in all families of one size


def _unequal(sigma: float) -> Draw:
    return lambda rng, shape: rng.standard_normal(shape) * np.exp(sigma * rng.standard_normal((shape[0], 1)))


def _some_noisier(part: float, times: float) -> Draw:
    return lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random((shape[0], 1)) < part, times, 1)


def serial(rng: np.random.Generator, shape: tuple[int, int], coefficient: float) -> Array:
    noise = rng.standard_normal(shape)
    for place in range(1, shape[1]):
        fresh = np.sqrt(1 - coefficient**2) * noise[:, place]
        noise[:, place] = coefficient * noise[:, place - 1] + fresh
    return noise


NOISES: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t of 3 degrees": lambda rng, shape: rng.standard_t(3, shape),
    "30 % bad nodes": lambda rng, shape: 0.1 * rng.standard_normal(shape) + 3 * (rng.random(shape) < 0.3),
    "unequal noise": _unequal(0.7),
    "two clock states": lambda rng, shape: 0.2 * rng.standard_normal(shape) + 2 * (rng.random(shape) < 0.5),
    "5 % disturbed": lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.05, 8, 1),
    "skewed": lambda rng, shape: rng.gamma(0.3, size=shape),
    "a third 4× noisier": _some_noisier(0.33, 4),
    "a tenth 5× noisier": _some_noisier(0.1, 5),
    "serial 0.6": lambda rng, shape: serial(rng, shape, 0.6),
}
"""Noise distributions by name. The last one, `serial 0.6`, is autocorrelated from repeat to repeat. With such noise, no
method that uses only the repeats can control the error rate, so it shows the limits of the tests."""


class Found(NamedTuple):
    """Results of verdicts, as means over simulated families (sets of configurations) whose true times differ. The
    verdict on a configuration is whether it is slower than the one that was measured as fastest. All configurations
    that are not called slower are ties, except the fastest itself."""

    ties: float
    farthest: float  # largest true slowdown of a tie, relative to the truly fastest, in per cent
    best_kept: float  # % of families in which the truly fastest was measured as fastest or tied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=500)
    count = parser.parse_args().families
    tables = (
        spread(count // 10), power(count // 2), measure_bias_by_size(count // 2), pairs(count), equal(count),
        equal_to_best(count), alike(count),
    )  # fmt: skip
    for row in itertools.chain(*tables):
        print(row, flush=True)


def alike(count: int, names: Iterable[str] = NOISES) -> Iterable[str]:
    """Yield the lines of a table: the per cent of families (sets of configurations) in which at least one configuration
    is wrongly called slower. All configurations of a family are equally fast. At most `count` families are simulated
    per cell."""
    yield f"\nconfigurations alike: % of families with one called slower\n{'':<20}{'n':>3}  {format_sizes(SIZES)}"
    for name in names:
        for repeats, blocked in LAYOUTS:
            shares = [wrong(name, size, repeats, count, blocked=blocked) for size in SIZES]
            yield f"{name:<20}{repeats:>3}  {format_shares(shares)}  {'within' if blocked else 'apart'}"


def wrong(name: str, size: int, repeats: int, count: int, *, blocked: bool) -> float:
    """Return the per cent of simulated families in which at least one configuration is called slower than the fastest.
    All `size` configurations of a family are truly equally fast. `name` is a noise distribution. If `blocked` is true,
    each allocation has one repeat of every configuration."""
    rng = np.random.default_rng([*name.encode(), size, repeats, blocked])
    count = min(count, _MOST // size)
    families = (family(NOISES[name](rng, (size, repeats)), rng, blocked=blocked) for _ in range(count))
    return 100 * float(np.mean([any(slower(one)) for one in families]))


def family(noise: Array, rng: np.random.Generator, *, blocked: bool) -> Family:
    shared = 3 * rng.standard_normal(noise.shape[1]) if blocked else 0
    return Family(list(noise + shared), blocked=blocked)


def slower(one: Family) -> list[bool]:
    """Return one bool per configuration: True if it is called slower than the configuration measured as fastest."""
    gaps = [one.gap(place, one.lead) for place in range(one.means.size)]
    return [gap.value > gap.margin for gap in gaps]


def pairs(count: int) -> Iterable[str]:
    """Yield the lines of a table: the per cent of sets in which at least one pair of configurations is wrongly called
    different. A set has 1, 10 or 50 pairs, all of them truly equal. At most `count` sets are simulated per cell."""
    yield f"\npairs alike, apart: % of sets with one called different\n{'':<20}{'n':>3}  {format_sizes(PAIRS)}"
    for name, draw in NOISES.items():
        for repeats in REPEATS:
            rng = np.random.default_rng([*name.encode(), repeats])
            sets = [
                [_told_pairs(draw(rng, (2 * size, repeats))) for _ in range(min(count, _MOST // size))]
                for size in PAIRS
            ]
            shares = [100 * float(np.mean([min(p_values) <= 0.05 for p_values in one])) for one in sets]
            yield f"{name:<20}{repeats:>3}  {format_shares(shares)}"


def _told_pairs(times: Array) -> list[float]:
    """Return the p-value of each difference between two configurations: rows 0 and 1, rows 2 and 3, and so on. The
    p-values are corrected for the number of pairs. `times` has shape (2 × pairs, repeats)."""
    own = stats.ttest_ind(times[::2], times[1::2], axis=1, equal_var=False).pvalue
    noises = [Noise(float(one), times.shape[1]) for one in times.var(axis=1, ddof=1)]
    gaps = (times[::2] - times[1::2]).mean(axis=1)
    return correct_p_values(gaps, list(zip(noises[::2], noises[1::2], strict=True)), own)


def equal(count: int) -> Iterable[str]:
    """Yield the lines of two tables: how often pairs of configurations are called equal within 3 %.

    In the first table, the two configurations of a pair truly differ by 3 %, so the verdict "equal" is wrong; the noise
    is 1 %. In the second table, the two configurations are truly equal, and the noise is 0.5 % or 1 %.
    """
    margin = np.log1p(0.03)
    yield f"\npairs 3 % apart, noise 1 %: % of sets with one called equal\n{'':<20}{'n':>3}  {format_sizes(PAIRS)}"
    for name, repeats in itertools.product(NOISES, REPEATS):
        shares = [called_equal(name, size, repeats, count, 0.01, margin)[0] for size in PAIRS]
        yield f"{name:<20}{repeats:>3}  {format_shares(shares)}"
    yield f"\nequal pairs, normal noise: % of pairs called equal\n{'':<20}{'n':>3}  {format_sizes(PAIRS)}"
    for noise, repeats in itertools.product((0.005, 0.01), (3, 5, 10)):
        shares = [called_equal("normal", size, repeats, count // 4, noise, 0.0)[1] for size in PAIRS]
        yield f"{f'noise {100 * noise:g} %':<20}{repeats:>3}  {format_shares(shares)}"


def called_equal(name: str, pairs: int, repeats: int, count: int, noise: float, gap: float) -> tuple[float, float]:
    """Simulate sets of pairs that truly differ by `gap` in the logarithm of the time. Return two rates in per cent: the
    share of sets with at least one pair called equal, and the share of all pairs that are called equal."""
    rng = np.random.default_rng([*name.encode(), pairs, repeats, int(1000 * noise)])
    sets = []
    for _ in range(min(count, _MOST // pairs)):
        times = noise * NOISES[name](rng, (2 * pairs, repeats))
        times[::2] += gap
        noises = [Noise(float(one), repeats) for one in times.var(axis=1, ddof=1)]
        gaps = (times[::2] - times[1::2]).mean(axis=1)
        sets.append(compute_equivalence(gaps, list(zip(noises[::2], noises[1::2], strict=True)), float(np.log1p(0.03))))
    equal_pairs = np.array(sets) <= 0.05
    return 100 * float(equal_pairs.any(axis=1).mean()), 100 * float(equal_pairs.mean())


def equal_to_best(count: int) -> Iterable[str]:
    """Yield tables of how often configurations are called equal to the fastest within 3 %.

    In each simulated family, half of the configurations truly take 3 % longer. Calling one of them equal is an error.
    For the other half, equal is the correct verdict.
    """
    sizes = SIZES[1:]  # sizes of families with several equally fast configurations
    head = f"{'':26}{'n':>3}  {format_sizes(sizes)}"
    yield f"\nhalf take 3 % longer: % of families with one of them called equal to the best\n{head}"
    for name, noise, repeats in itertools.product(NOISES, (0.005, 0.01), REPEATS):
        shares = [called_equal_to_best(name, size, repeats, count, noise)[0] for size in sizes]
        yield f"{f'{name}, {100 * noise:g} %':<26}{repeats:>3}  {format_shares(shares)}"
    yield f"\nthe others, normal noise: % of them called equal to the best\n{head}"
    for noise, repeats in itertools.product((0.005, 0.01), (3, 5, 10)):
        shares = [called_equal_to_best("normal", size, repeats, count // 4, noise)[1] for size in sizes]
        yield f"{f'noise {100 * noise:g} %':<26}{repeats:>3}  {format_shares(shares)}"


def called_equal_to_best(name: str, size: int, repeats: int, count: int, noise: float) -> tuple[float, float]:
    """Return two rates in per cent over simulated families of `size` configurations.

    The first is the share of families in which a configuration that truly differs by 3 % is called equal to the
    fastest. The second is the share of truly equal configurations that are called equal to the fastest.
    """
    rng = np.random.default_rng([*name.encode(), size, repeats, int(10_000 * noise)])
    wrongly, rightly = [], []
    for _ in range(min(count, _MOST // size)):
        truth = np.where(np.arange(size) < (size + 1) // 2, 0.0, np.log1p(INTEREST))
        compared = Family(list(truth[:, None] + noise * NOISES[name](rng, (size, repeats))))
        rivals = [place for place in range(size) if place != compared.lead]
        equal = {place for place in rivals if is_equal(compared, place)}
        wrongly.append(any(truth[place] != truth[compared.lead] for place in equal))
        rightly += [place in equal for place in rivals if truth[place] == truth[compared.lead]]
    return 100 * float(np.mean(wrongly)), 100 * float(np.mean(rightly))


def is_equal(compared: Family, place: int) -> bool:
    """Return whether the configuration at index `place` gets the verdict "equal to the fastest"."""
    gap = compared.gap(place, compared.lead)
    low, high = (float(np.exp(end)) for end in (gap.value - gap.margin, gap.value + gap.margin))
    return judge_interval(Interval(low, high, "between repeats", LEVEL, 0)) == EQUAL


def power(count: int) -> Iterable[str]:
    """Yield the lines of a table of statistical power: how often a true difference is found among many comparisons. In
    a simulated set of pairs of configurations, one pair differs by 2.5 or 5 times the noise, and all others are equal.
    Each cell has the per cent of sets in which the difference is found. At most `count` sets are simulated per cell."""
    yield f"\none pair of these differs by 2.5 and 5 times the noise: % found\n{'':<20}{'n':>3}  {format_sizes(PAIRS)}"
    for effect in (2.5, 5):
        for repeats in REPEATS:
            rng, shares = np.random.default_rng([int(10 * effect), repeats]), []
            for size in PAIRS:
                sets = rng.standard_normal((min(count, _MOST // size), 2 * size, repeats))
                sets[:, 0] += effect
                shares.append(100 * float(np.mean([_told_pairs(one)[0] <= 0.05 for one in sets])))
            yield f"{effect:<20}{repeats:>3}  {format_shares(shares)}"


def spread(count: int) -> Iterable[str]:
    """Yield the lines of a table for sets of configurations with different true times. The true times are spread evenly
    between the fastest and 30 % above it. The noise is 1 %.

    A configuration that is not called slower than the fastest is a tie. Each row has means over `count` simulated sets:
    the number of ties, the true slowdown of the slowest tie, and how often the truly fastest configuration is called
    fastest or a tie.
    """
    yield f"\nspread over 30 %, noise 1 %: ties, the farthest in %, best kept in %\n{'':<20}{'n':>3}  {'k':>4}"
    for size in (10, 50, 200):
        for repeats, blocked in LAYOUTS:
            found = told_spread(size, repeats, count, blocked=blocked)
            numbers = f"{found.ties:7.1f}{found.farthest:7.1f}{found.best_kept:7.1f}"
            yield f"{'':<20}{repeats:>3}  {size:>4}{numbers}  {'within' if blocked else 'apart'}"


def told_spread(size: int, repeats: int, count: int, *, blocked: bool) -> Found:
    rng = np.random.default_rng([size, repeats, blocked])
    ties, farthest, kept = [], [], []
    for _ in range(count):
        truth = rng.uniform(0, 0.3, size)
        compared = family(truth[:, None] + 0.01 * rng.standard_normal((size, repeats)), rng, blocked=blocked)
        left = ~np.array(slower(compared))
        ties.append(left.sum() - 1)
        farthest.append(np.expm1(truth[left].max() - truth.min()))
        kept.append(left[truth.argmin()])
    return Found(float(np.mean(ties)), 100 * float(np.mean(farthest)), 100 * float(np.mean(kept)))


def measure_bias_by_size(count: int) -> Iterable[str]:
    """Yield the lines of a table: true and estimated selection bias in per cent, by number of configurations. Because
    the fastest is selected by noisy times, its measured time is lower than its true time. The bias is this difference.
    The noise is 2 %."""
    yield "\nselection bias of the fastest, noise 2 %, n 3: true and estimated, %"
    yield f"{'':<20}{'':>3}  {format_sizes(SIZES)}"
    for name, width in (("alike", 0.0), ("spread over 5 %", 0.05), ("spread over 30 %", 0.3)):
        true, estimated = [], []
        for size in SIZES:
            rng = np.random.default_rng([size, int(100 * width)])
            found = [measure_selection_bias(rng, size, width) for _ in range(count)]
            true.append(100 * float(np.mean([one[0] for one in found])))
            estimated.append(100 * float(np.mean([one[1] for one in found])))
        yield f"{name:<20}{'':>3}  {format_shares(true)}  true\n{'':<20}{'':>3}  {format_shares(estimated)}  estimated"


def measure_selection_bias(rng: np.random.Generator, size: int, width: float) -> tuple[float, float]:
    truth = rng.uniform(0, width, size)
    one = Family(list(truth[:, None] + 0.02 * rng.standard_normal((size, 3))))
    return float(truth[one.lead] - one.means[one.lead]), one.selection_bias


def format_sizes(sizes: Iterable[int]) -> str:
    """Return the column headings of a table. Each column is for another number of configurations or pairs, and its
    heading is this number."""
    return "".join(f"{size:>7}" for size in sizes)


def format_shares(numbers: Iterable[float]) -> str:
    """Return the numbers of a table row as text, with one decimal."""
    return "".join(f"{number:7.1f}" for number in numbers)


if __name__ == "__main__":
    main()
