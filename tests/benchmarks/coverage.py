"""Coverage of confidence intervals, and false alarms and power of tests, on simulated series of step times.

  python -m tests.benchmarks.coverage [--series 2000] [--only median mean tests]

Coverage is the share of series whose 95 % interval contains the known true value. The tables of coverage for the median
and the mean have one row for each process (generator of step times) and series length. The columns are:

  n        number of steps in a series
  size     effective sample size for the median or mean, computed from the scatter of the estimates
  methods  one column for each method: its coverage, in per cent of the series for which it gives an interval
  bound    per cent of series for which the project's method gives an interval
  ≥ 20     coverage of the project's method, only for series with an estimated effective sample size of at least 20
  ≥ 200    coverage of the project's method, only for series with an estimated effective sample size of at least 200

The project's method is `taken`, from `bench.core.statistics`.

The process `slow drift` is white noise plus a slow drift with the same variance. The drift is so slow that no series is
long enough to determine the median of this process.
"""

import argparse
import itertools
import math
from collections.abc import Callable

import numpy as np
import scipy.fft
from scipy import stats

from analysis.stats.compare import ratio_of_steps
from bench.core.statistics import autocorrelation, effective_size, mean_bounds, median_bounds, signs
from tests.analysis.stats.simulated import PROCESSES, TAILED

Array = np.ndarray
Ends = tuple[Array, Array]

LENGTHS = (30, 100, 300, 1000, 3000)
NORMAL = stats.norm.ppf(0.975)
CHUNK = 500  # number of series computed at a time, limited by the memory of a laptop
SLOW = {"blocks": 2}  # number of chunks for slow methods: `blocks` takes longer than all other methods together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=("median", "mean", "tests"), default=("median", "mean", "tests"))
    args = parser.parse_args()
    if "median" in args.only:
        table("median", MEDIANS, args.series)
    if "mean" in args.only:
        table("mean", MEANS, args.series)
    if "tests" in args.only:
        tests(10 * args.series)


def table(what: str, methods: dict[str, Callable[[Array], Ends]], count: int) -> None:
    """Print one row per process and series length. It has the coverage of each method's interval for the statistic
    `what` (median or mean), over about `count` series."""
    head = "  ".join(f"{name:>9}" for name in methods)
    print(f"\n{what:<24}{'n':>5}{'size':>6}  {head}{'bound':>8}{'≥ 20':>8}{'≥ 200':>8}")
    for name, n in itertools.product(PROCESSES if what == "median" else PROCESSES | TAILED, LENGTHS):
        print(f"{name:<24}{n:>5}{row(what, name, n, methods, count)}", flush=True)


def row(what: str, name: str, n: int, methods: dict[str, Callable[[Array], Ends]], count: int) -> str:
    process = (PROCESSES | TAILED)[name]
    rng = np.random.default_rng([*name.encode(), n])
    truth = process.median if what == "median" else process.mean
    errors: list[float] = []
    sizes: list[Array] = []
    bound: dict[str, list[Array]] = {way: [] for way in methods}
    covered: dict[str, list[Array]] = {way: [] for way in methods}
    for chunk in (process.draw(rng, CHUNK, n) for _ in range(math.ceil(count / CHUNK))):
        influence = np.sign(chunk - truth) if what == "median" else chunk - truth
        errors.extend(influence.mean(axis=1) ** 2 / influence.var())
        sizes.append(effective_size(signs(chunk) if what == "median" else chunk))
        for way, method in methods.items():
            if len(sizes) <= SLOW.get(way, len(sizes)):
                low, high = method(chunk)
                bound[way].append(np.isfinite(low) & np.isfinite(high))
                covered[way].append((low <= truth) & (truth <= high))
    known = {way: np.concatenate(bound[way]) for way in methods}
    cells = "  ".join(f" {share(np.concatenate(covered[way])[known[way]], count)}" for way in methods)
    size, shown, ours = np.concatenate(sizes), known["taken"], np.concatenate(covered["taken"])
    rest = (share(ours[shown & (size >= least)], count) for least in (20, 200))
    return f"{1 / np.mean(errors):6.0f}  {cells}{100 * shown.mean():7.0f}%{''.join(rest)}"


def share(covered: Array, count: int) -> str:
    """Return the coverage in per cent as text. If fewer than 5 % of the series have an interval, return a dash.
    `covered` has one bool for each series with an interval: True if the interval contains the true value. `count` is
    the number of all series."""
    return f"{100 * covered.mean():8.1f}" if covered.size >= count / 20 else f"{'–':>8}"


def ranks(series: Array, size: Array, quantile: float | Array = NORMAL) -> Ends:
    """Return rank-based bounds of the median of each series. The bounds are order statistics, interpolated as if the
    series had `size` independent values."""
    n = series.shape[1]
    reach = quantile * n / np.sqrt(size) / 2
    ordered = np.sort(series, axis=1)
    place = np.array([(n + 1) / 2 - reach, (n + 1) / 2 + reach]) * np.ones((2, len(series))) - 1
    below = np.clip(np.floor(place).astype(int), 0, n - 2)
    part = np.clip(place - below, 0, 1)
    low, high = (
        np.take_along_axis(ordered, below[side][:, None], 1)[:, 0] * (1 - part[side])
        + np.take_along_axis(ordered, below[side][:, None] + 1, 1)[:, 0] * part[side]
        for side in (0, 1)
    )
    return np.where(place[0] < 0, -np.inf, low), np.where(place[0] < 0, np.inf, high)


def cosines(series: Array, count: int) -> Array:
    """Return the effective sample size of each series. The variance of the mean of a series is estimated from the power
    at the `count` lowest cosine frequencies of the series."""
    n = series.shape[1]
    slowest = scipy.fft.dct(series, axis=1)[:, 1 : count + 1]
    return n * series.var(axis=1) / ((slowest**2).mean(axis=1) / (2 * n))


def prewhitened(series: Array) -> Array:
    """Return the effective sample size of each series, estimated with a fitted autoregression. Akaike's criterion
    chooses its order, and Levinson's recursion fits its coefficients."""
    n, correlation = series.shape[1], autocorrelation(series)
    order = min(int(10 * math.log10(n)), n // 4)
    coefficients = np.zeros((len(series), order + 1))
    coefficients[:, 0] = 1
    error, size, best = np.ones(len(series)), np.full(len(series), float(n)), np.zeros(len(series))
    for p in range(1, order + 1):
        partial = -(coefficients[:, :p] * correlation[:, p:0:-1]).sum(axis=1) / error
        coefficients[:, 1 : p + 1] += partial[:, None] * coefficients[:, :p][:, ::-1].copy()
        error = error * (1 - partial**2)
        criterion = n * np.log(error) + 2 * p
        size = np.where(criterion < best, n * coefficients.sum(axis=1) ** 2 / error, size)
        best = np.minimum(best, criterion)
    return size


def blocks(statistic: Callable[..., Array]) -> Callable[[Array], Ends]:
    """Return a function that computes 95 % bounds of a statistic for each series. It uses the moving-block bootstrap
    (Künsch, Annals of Statistics 17, 1989)."""

    def ends(series: Array) -> Ends:
        low, high = zip(*(resampled(steps, statistic) for steps in series), strict=True)
        return np.array(low), np.array(high)

    return ends


def resampled(steps: Array, statistic: Callable[..., Array], resamples: int = 399) -> tuple[float, float]:
    """Return the 95 % block-bootstrap interval of a statistic of one series. The interval is infinite if the series
    is shorter than two blocks."""
    length = block_length(steps)
    if steps.size < 2 * length:
        return -math.inf, math.inf
    first = np.random.default_rng(0).integers(
        0, steps.size - length + 1, (resamples, math.ceil(steps.size / length), 1)
    )
    drawn = (first + np.arange(length)).reshape(resamples, -1)[:, : steps.size]
    low, high = np.quantile(statistic(steps[drawn], axis=-1), [0.025, 0.975])
    return float(low), float(high)


def block_length(steps: Array) -> int:
    """Return the number of steps per block of the bootstrap.

    For an AR(1) series of n steps with coefficient φ, the optimum is (6 n)^(1/3) (φ / (1 - φ²))^(2/3). See Andrews,
    Econometrica 59, 1991, equations 6.2 and 6.4; block resampling corresponds to his Bartlett window. φ follows from
    the effective sample size.
    """
    slowdown = steps.size / float(effective_size(steps))  # (1 + φ) / (1 - φ)
    return max(1, round(math.cbrt(6 * steps.size * ((slowdown**2 - 1) / (4 * slowdown)) ** 2)))


def scattered(series: Array, size: Array, quantile: float | Array = NORMAL) -> Ends:
    """Return bounds of each series' mean: mean ± quantile × standard error. `size` has the effective sample size of
    each series: the number of independent values whose mean would have this standard error."""
    reach = quantile * series.std(axis=1) / np.sqrt(size)
    return series.mean(axis=1) - reach, series.mean(axis=1) + reach


def usual(n: int) -> int:
    return max(2, int(0.41 * n ** (2 / 3)))  # number of cosines from Lazarus, Lewis, Stock & Watson


MEDIANS: dict[str, Callable[[Array], Ends]] = {
    "ranks": lambda x: ranks(x, np.full(len(x), x.shape[1])),
    "blocks": blocks(np.median),
    "autoregr.": lambda x: ranks(x, prewhitened(signs(x))),
    "Geyer": lambda x: ranks(x, effective_size(signs(x))),
    "n^⅔ cos": lambda x: ranks(x, cosines(signs(x), usual(x.shape[1])), stats.t.ppf(0.975, usual(x.shape[1]))),
    "taken": lambda x: median_bounds(x)[:2],
}
MEANS: dict[str, Callable[[Array], Ends]] = {
    "t": lambda x: scattered(x, np.full(len(x), x.shape[1] - 1), stats.t.ppf(0.975, x.shape[1] - 1)),
    "blocks": blocks(np.mean),
    "Geyer": lambda x: scattered(x, effective_size(x)),
    "n^⅔ cos": lambda x: scattered(x, cosines(x, usual(x.shape[1])), stats.t.ppf(0.975, usual(x.shape[1]))),
    "unskewed": lambda x: mean_bounds(x, correction=0)[:2],
    "Hall": lambda x: mean_bounds(x, correction=1)[:2],
    "taken": lambda x: mean_bounds(x)[:2],
}
RUNS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape),
    "30 % bad nodes": lambda rng, shape: 0.1 * rng.standard_normal(shape) + 3 * (rng.random(shape) < 0.3),
}


def tests(count: int) -> None:
    """Print how often Welch's test and the Mann-Whitney test call a pair of configurations different, in per cent. Both
    tests compare the means of several runs per configuration. In some pairs, the configurations are truly equal. In all
    other pairs, they truly differ by ten times the scatter.

    The significance level is 5 % for one pair, and 0.5 % for the smallest p-value among ten pairs.
    """
    print(f"\n{'runs':<16}{'a side':>6}  {'alike, 5 %':>16}  {'alike, 0.5 %':>16}  {'10 scatters apart, 0.5 %':>24}")
    print(f"{'':<22}  {'Welch   ranks':>16}  {'Welch   ranks':>16}  {'Welch   ranks':>24}")
    rng = np.random.default_rng(0)
    for name, draw in RUNS.items():
        for n in (3, 4, 5, 6, 10):
            one, other = draw(rng, (count, n)), draw(rng, (count, n))
            alike, apart = compute_p_values(one, other), compute_p_values(one + 10, other)
            limits = ((alike, 0.05, 16), (alike, 0.005, 16), (apart, 0.005, 24))
            cells = [f"{100 * np.mean(p[0] <= a):5.1f}{100 * np.mean(p[1] <= a):8.1f}".rjust(w) for p, a, w in limits]
            print(f"{name:<16}{n:>6}  {'  '.join(cells)}", flush=True)
    pairs(count // 20)


def pairs(count: int) -> None:
    """Print how often a test at a significance level of 5 % calls a truly equal pair different, in per cent. A pair has
    one run of each of two configurations. The test compares the step times of these two runs."""
    rng = np.random.default_rng(0)
    for name in ("independent, lognormal", "AR(1) 0.5, lognormal"):
        for n in (30, 100, 300, 1000):
            one, other = (np.exp(PROCESSES[name].draw(rng, count, n) / 10) for _ in range(2))
            called = np.mean([ratio_of_steps(*pair).p_value <= 0.05 for pair in zip(one, other, strict=True)])
            print(f"{n:>5} steps each, {name:<24}{100 * called:5.1f}", flush=True)


def compute_p_values(one: Array, other: Array) -> Ends:
    """Return the p-values of Welch's test and of the Mann-Whitney test, one per pair. `one` and `other` have shape
    (pairs, runs)."""
    return (
        stats.ttest_ind(one, other, axis=1, equal_var=False).pvalue,
        stats.mannwhitneyu(one, other, axis=1, method="exact").pvalue,
    )


if __name__ == "__main__":
    main()
