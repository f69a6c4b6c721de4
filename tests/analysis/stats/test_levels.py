"""Variances by level, and what to buy next, beside histories whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.stats.levels import LevelRun, LevelVariances, advise, find_variances


def drawn(seed: int, hosts: float, runs: float, within: float, sets: int = 6, each: int = 4) -> list[LevelRun]:
    """Allocations on sets of nodes; the numbers are standard deviations."""
    rng = np.random.default_rng(seed)
    return [
        LevelRun((f"node{place}",), level + runs * rng.standard_normal() + within * rng.standard_normal(), within**2)
        for place, level in enumerate(hosts * rng.standard_normal(sets))
        for _ in range(each)
    ]


@pytest.mark.parametrize("truth", [(0.02, 0.01, 0.005), (0.0, 0.01, 0.01), (0.03, 0.002, 0.0)])
def test_variances_by_level_are_on_average_what_they_truly_are(truth: tuple[float, float, float]) -> None:
    found = [known for seed in range(300) if (known := find_variances(drawn(seed, *truth)))]
    hosts, runs, within = (
        np.mean([getattr(one, name) or 0.0 for one in found]) for name in ("hosts", "runs", "within")
    )
    assert hosts == pytest.approx(truth[0] ** 2, rel=0.15, abs=3e-5)
    assert runs == pytest.approx(truth[1] ** 2, rel=0.15, abs=1e-5)
    assert within == pytest.approx(truth[2] ** 2)


def test_variances_by_hand() -> None:
    """Two sets of nodes, two runs on each: 0 and 2, 4 and 6; nothing within."""
    runs = [LevelRun((host,), log, 0.0) for host, log in (("a", 0.0), ("a", 2.0), ("b", 4.0), ("b", 6.0))]
    found = find_variances(runs)
    assert found is not None
    same, apart = 2.0, 2 * 4 + 2 * 4  # mean squares, of 2 and 1 degrees of freedom
    assert (found.runs, found.hosts) == (pytest.approx(same), pytest.approx((apart - same) / 2))


def test_nodes_that_were_always_the_same_or_always_others_are_no_level_of_their_own() -> None:
    for hosts in ((("a",),) * 4, (("a",), ("b",), ("c",), ("d",)), ((),) * 4):
        found = find_variances([LevelRun(one, log, 0.0) for one, log in zip(hosts, (0, 1, 2, 3), strict=True)])
        assert found is not None
        assert (found.hosts, found.runs) == (None, pytest.approx(np.var([0, 1, 2, 3], ddof=1)))
    assert find_variances([LevelRun(("a",), 0.0, 0.0)]) is None


def test_more_allocations_where_these_differ_and_longer_windows_where_steps_do() -> None:
    among = LevelVariances(None, 0.01**2, 0.002**2, 1, 3)
    bought = advise(among, 0.02)
    assert bought.purchase == "allocations"
    n = 3 + int(bought.amount)
    assert 2 * stats.t.ppf(0.975, n - 1) * math.sqrt(among.total / n) <= math.log1p(0.02)
    assert 2 * stats.t.ppf(0.975, n - 2) * math.sqrt(among.total / (n - 1)) > math.log1p(0.02)
    steps = advise(LevelVariances(None, 0.001**2, 0.01**2, 1, 8), 0.016)
    assert steps.purchase == "longer windows"
    assert 1 < steps.amount < 2
    assert advise(LevelVariances(0.02**2, 0.001**2, 0.001**2, 2, 6), 0.02).purchase == "other nodes"
    assert advise(among, 0.5).purchase == "enough"


def test_what_was_bought_brings_the_width_more_often_than_not() -> None:
    """From six allocations to as many as were advised, whose noise is then measured anew."""
    kept = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        first = [LevelRun((), 0.01 * rng.standard_normal(), 0.0) for _ in range(6)]
        known = find_variances(first)
        assert known is not None
        bought = advise(known, 0.012)
        more = [LevelRun((), 0.01 * rng.standard_normal(), 0.0) for _ in range(int(bought.amount))]
        again = find_variances([*first, *more])
        assert again is not None
        kept.append(advise(again, 0.012).width <= 0.0135)
    assert np.mean(kept) >= 0.6
