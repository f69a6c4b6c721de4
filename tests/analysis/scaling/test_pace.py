"""Tests of ratios of seconds per sample between two configurations. The uncertainty of a ratio comes from the scatter
between runs or between single steps. Other tests check the coverage of the ratio's interval."""

import numpy as np
import pytest

from analysis.scaling import Pace, compare_paces, scaled


def pace(*runs: float, names: str = "") -> Pace:
    return Pace({f"{names}{i}": [seconds] * 7 for i, seconds in enumerate(runs)})


def test_typical_time_is_the_geometric_mean_of_the_runs_means() -> None:
    assert Pace({"a": [1.0, 2.0, 3.0], "b": [8.0]}).typical == pytest.approx(4.0)


def test_shared_allocations_are_compared_pairwise() -> None:
    """Within each allocation the two configurations differ by 4 to 6 %, and allocations differ by up to 60 %. The
    difference is detected only if the configurations ran in the same allocations."""
    ours, theirs = (1.0, 1.3, 0.8), (1.05, 1.36, 0.85)
    assert (
        compare_paces(pace(*ours), pace(*theirs)).p_value
        < 0.05
        < compare_paces(pace(*ours, names="other"), pace(*theirs)).p_value
    )


def test_unshared_allocations_are_excluded_if_three_are_shared() -> None:
    ours, theirs = pace(1.0, 1.3, 0.8, 9.0), pace(1.05, 1.36, 0.85)
    shared = compare_paces(pace(1.0, 1.3, 0.8), theirs)
    assert compare_paces(ours, theirs) == shared
    assert shared.runs == (3, 3)
    assert compare_paces(ours, pace(1.05, 1.36, 0.85, names="other")).runs == (4, 3)


def test_two_shared_allocations_are_too_few_for_a_pairwise_comparison() -> None:
    ours, theirs = pace(1.0, 1.1, 1.2), pace(1.3, 1.4)
    assert compare_paces(ours, theirs).unit == "step"
    assert compare_paces(ours, Pace({**theirs.runs, "elsewhere": [1.5] * 7})).unit == "run"


def test_intervals_of_ratios_have_their_nominal_coverage() -> None:
    rng, rounds = np.random.default_rng(3), 400
    drawn = np.exp(0.03 * rng.standard_normal((rounds, 2, 3))) * [[8.0], [5.0]]
    told = [scaled(compare_paces(pace(*ours), pace(*theirs, names="other")), 1 / 2).interval for ours, theirs in drawn]
    covered = np.mean([interval.low <= 0.8 <= interval.high for interval in told if interval])
    assert 0.93 <= covered <= 0.98
