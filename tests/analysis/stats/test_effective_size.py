import numpy as np
import pytest
from simulated import PROCESSES, ar1, slowdown

from analysis.stats.intervals import describe_window
from bench.core.statistics import autocorrelation, effective_size, median_bounds, series_interval, signs


def test_effective_size_of_four_steps_computed_by_hand() -> None:
    # The centred values are -1.5, -0.5, 0.5 and 1.5, their sum of squares is 5.
    # Autocovariances: 0.75 - 0.25 + 0.75 at lag 1, -1.5 at lag 2, -2.25 at lag 3.
    series = np.array([1.0, 2.0, 3.0, 4.0])
    assert autocorrelation(series) == pytest.approx([1, 0.25, -0.3, -0.45])
    assert effective_size(series) == pytest.approx(4 / (2 * 1.25 - 1)), "the second pair is negative and ends the sum"


def test_pairs_of_autocorrelations_decrease_and_end_at_the_first_negative_pair() -> None:
    for series in ar1(0.6)(np.random.default_rng(0), 200, 31):
        correlation, total, last = autocorrelation(series), 0.0, np.inf
        for lag in range(0, 30, 2):
            pair = correlation[lag] + correlation[lag + 1]
            if pair <= 0:
                break
            last = min(last, pair)
            total += last
        assert effective_size(series) == pytest.approx(min(31 / (2 * total - 1), 31))


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("of_signs", [True, False], ids=["median", "mean"])
def test_effective_size_matches_the_known_autocorrelation_of_a_process(coefficient: float, of_signs: bool) -> None:
    series = ar1(coefficient)(np.random.default_rng(1), 400, 4000)
    sizes = effective_size(signs(series) if of_signs else series)
    assert np.median(4000 / sizes) == pytest.approx(slowdown(coefficient, of_signs), rel=0.06)


def test_alternating_and_constant_steps_count_fully() -> None:
    assert effective_size(np.array([1.0, 2.0] * 20)) == 40
    assert effective_size(np.full(9, 0.1)) == 9
    assert effective_size(np.array([3.0])) == 1


def test_an_outlier_does_not_change_the_effective_size_for_the_median() -> None:
    series = ar1(0.5)(np.random.default_rng(2), 1, 500)[0]
    spoilt = np.where(np.arange(500) == np.argmax(series), 1e6, series)
    assert effective_size(signs(spoilt)) == effective_size(signs(series))


def test_run_is_few_below_twenty_effective_steps_if_its_median_has_an_interval() -> None:
    def few(steps: np.ndarray) -> bool:
        return describe_window(tuple(steps.tolist())).few

    rng = np.random.default_rng(3)
    assert few(np.full(19, 0.1))
    assert not few(np.full(20, 0.1))
    assert not few(np.full(5, 0.1)), "without an interval there is no note on it"
    assert not few(PROCESSES["independent, lognormal"].draw(rng, 1, 60)[0])
    alike = PROCESSES["AR(1) 0.8"].draw(rng, 1, 60)[0]
    assert few(alike)
    assert series_interval(alike) is not None


@pytest.mark.parametrize(
    ("lowest", "highest", "least", "most"), [(6, 10, 0.6, 0.9), (10, 15, 0.8, 0.92), (20, 200, 0.92, 0.96)]
)
def test_coverage_of_the_median_by_effective_size(lowest: int, highest: int, least: float, most: float) -> None:
    """Coverage is the share of simulated series whose interval contains the true median. It is computed over all noise
    processes, for usual window lengths (numbers of timed steps). The process `slow drift` is excluded, because no
    interval covers its median."""
    held: list[np.ndarray] = []
    for name, process in PROCESSES.items():
        for n in (20, 30, 60, 100) if name != "slow drift" else ():
            series = process.draw(np.random.default_rng(n), 400, n)
            low, high, _ = median_bounds(series)
            size = effective_size(signs(series))
            shown = np.isfinite(low) & (lowest <= size) & (size < highest)
            held.append(((low <= process.median) & (process.median <= high))[shown])
    assert least <= np.concatenate(held).mean() <= most
