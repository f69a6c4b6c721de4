"""The universal scalability law on curves whose parameters are known."""

import math

import numpy as np
import pytest
from clusters import asked, measured
from records import results
from scipy import optimize

from analysis.scaling.curves import build_curves
from analysis.scaling.time_per_sample import Pace
from analysis.scaling.usl import LawFit, fit_law

NODES = (1, 2, 4, 8, 16)
RATE, CONTENTION, COHERENCY = 50.0, 0.05, 0.004
PEAK = math.sqrt((1 - CONTENTION) / COHERENCY)  # 15.4 nodes


def seconds(n: float, contention: float = CONTENTION, coherency: float = COHERENCY) -> float:
    """Of a sample."""
    return (1 + contention * (n - 1) + coherency * n * (n - 1)) / (RATE * n)


def drawn(rng: np.random.Generator, spread: float = 0.02, runs: int = 3, **law: float) -> dict[int, Pace]:
    """Allocations whose logarithms are normal."""
    return {
        n: Pace({str(i): [seconds(n, **law) * np.exp(spread * rng.standard_normal())] for i in range(runs)})
        for n in NODES
    }


def told(points: dict[int, Pace]) -> LawFit:
    found = fit_law(points)
    assert found is not None
    return found


def test_an_exact_curve_gives_its_parameters_back() -> None:
    found = told({n: Pace({"only": [seconds(n)] * 30}) for n in NODES})
    assert found.rate.value == pytest.approx(RATE)
    assert found.contention.value == pytest.approx(CONTENTION)
    assert found.coherency.value == pytest.approx(COHERENCY)
    assert found.measured == NODES
    assert found.misfit is None, "steps that are all alike tell no error"
    assert found.at(4) == pytest.approx(1 / seconds(4))


def test_the_peak_is_where_the_law_is_highest() -> None:
    found = told(drawn(np.random.default_rng(0)))
    assert found.peak is not None
    top = optimize.minimize_scalar(lambda n: -found.at(n), bounds=(1, 200), method="bounded")
    assert found.peak.value == pytest.approx(top.x, rel=1e-4)


def test_four_node_counts_are_too_few() -> None:
    points = drawn(np.random.default_rng(0))
    assert fit_law({n: points[n] for n in NODES[:4]}) is None


def test_it_is_the_least_squares_of_the_logarithms() -> None:
    points = drawn(np.random.default_rng(5))
    found = told(points)

    def residuals(parameters: np.ndarray) -> list[float]:
        rate, contention, coherency = parameters
        law = {n: (1 + contention * (n - 1) + coherency * n * (n - 1)) / (rate * n) for n in NODES}
        return [math.log(points[n].typical / law[n]) for n in NODES]

    other = optimize.least_squares(residuals, (40, 0.1, 0.01), bounds=(0, np.inf), xtol=1e-12).x
    assert (found.rate.value, found.contention.value, found.coherency.value) == pytest.approx(tuple(other), rel=0.05)


def test_an_unsure_point_pulls_less() -> None:
    def scattered(spread: float) -> dict[int, Pace]:
        steps = np.exp(spread * np.random.default_rng(1).standard_normal(400))
        off = {n: Pace({"only": list(1.2 * seconds(n) * steps)}) for n in (16,)}
        sure = np.exp(0.01 * np.random.default_rng(2).standard_normal(400))
        return {n: Pace({"only": list(seconds(n) * sure)}) for n in NODES} | off

    assert abs(told(scattered(0.5)).coherency.value - COHERENCY) < abs(
        told(scattered(0.01)).coherency.value - COHERENCY
    )


def test_the_same_runs_give_the_same_intervals() -> None:
    points = drawn(np.random.default_rng(0))
    assert fit_law(points) == fit_law(points)


def test_where_crosstalk_may_be_nothing_there_is_no_peak() -> None:
    found = told(drawn(np.random.default_rng(2), coherency=0.0))
    assert found.coherency.interval is not None
    assert found.coherency.interval.low == 0
    assert found.peak is None


def test_nodes_that_bring_nothing_wait_for_each_other_all_the_time() -> None:
    found = told({n: Pace({"only": [0.02] * 30}) for n in NODES})
    assert (found.rate.value, found.contention.value) == (pytest.approx(50), pytest.approx(1))
    assert found.coherency.value == pytest.approx(0, abs=1e-9)


def test_where_every_node_hurts_the_peak_is_one() -> None:
    found = told({n: Pace({"only": [0.02 * (1 + 0.1 * (n - 1))] * 30}) for n in NODES})
    assert found.peak is None, "one run each tells no peak"
    three = {n: Pace({str(i): [0.02 * (1 + 0.1 * (n - 1)) * (1 + 0.001 * i)] for i in range(3)}) for n in NODES}
    hurt = told(three).peak
    assert hurt is not None
    assert hurt.value == 1


def test_the_rate_of_one_node_may_stay_open() -> None:
    """Seconds that grow as n - 1 are all crosstalk: of one node there would be none."""
    assert fit_law({n: Pace({"only": [0.1 * (n - 1)] * 30}) for n in (2, 4, 8, 16, 32)}) is None


def test_of_three_allocations_each_the_interval_is_between_repeats_else_there_is_none() -> None:
    found = told(drawn(np.random.default_rng(0)))
    assert found.coherency.interval is not None
    assert found.coherency.interval[2:] == ("between repeats", 0.95, 15)
    single = [record for n in NODES for record in measured(asked(n, samples=64), [64 * seconds(n)])]
    (curve,) = build_curves(results(*single))
    assert curve.fit is not None
    assert curve.fit.coherency.value == pytest.approx(COHERENCY, rel=0.1)
    assert (curve.fit.coherency.interval, curve.fit.peak) == (None, None), "nobody knows what other runs would give"


def _covered(truth: dict[str, float], rounds: int = 150) -> tuple[dict[str, float], float]:
    """Return how often the intervals of laws that are not rejected cover the truth, and how often one is rejected."""
    rng = np.random.default_rng(11)
    found = [told(drawn(rng)) for _ in range(rounds)]
    kept = [one for one in found if not one.rejected]
    inside = {
        name: [
            estimate is not None and estimate.interval.low <= value <= estimate.interval.high
            for one in kept
            for estimate in [getattr(one, name)]
        ]
        for name, value in truth.items()
    }
    return {name: float(np.mean(held)) for name, held in inside.items()}, 1 - len(kept) / rounds


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    truth = {"rate": RATE, "contention": CONTENTION, "coherency": COHERENCY, "peak": PEAK}
    inside, rejected = _covered(truth)
    assert rejected <= 0.04
    for name, covered in inside.items():
        assert covered >= 0.92, name


def test_a_peak_is_seldom_seen_where_there_is_none() -> None:
    rng = np.random.default_rng(12)
    seen = sum(told(drawn(rng, coherency=0.0)).peak is not None for _ in range(150))
    assert seen / 150 <= 0.06


def test_a_law_that_does_not_fit_is_rejected() -> None:
    """The first hop costs a third and nothing after it: no curve of the law turns so sharply."""
    rng = np.random.default_rng(4)
    found = fit_law({n: Pace({str(i): [seconds(n) * (1.3 if n > 1 else 1) * np.exp(0.01 * rng.standard_normal())]
                          for i in range(3)}) for n in NODES})  # fmt: skip
    assert found is not None
    assert found.rejected
    assert (found.contention.interval, found.peak) == (None, None)
