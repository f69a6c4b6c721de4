"""Tests with simulated step times in the real measurement loop. They check the accuracy of a run's mean step time and
of the interval of this mean, for a measured window of fixed length."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from analysis.stats import intervals
from tests.benchmarks.processes import PROCESSES, Process
from tests.benchmarks.windows import SimulatedRun, simulate

NAMED = {process.name: process for process in PROCESSES}
SETTLING = ("recompiles", "slow heating")


@pytest.mark.parametrize(
    "process", [one for one in PROCESSES if one.kind != "background storms"], ids=lambda one: one.name
)
def test_simulated_process_has_its_stated_long_run_mean(process: Process) -> None:
    """A process is a random generator of step times. An undisturbed step takes 1 s. The attribute `slowdown` of a
    process is the ratio of its long-run mean step time to this 1 s. The mean of up to 40,000 simulated steps may differ
    from `slowdown` by at most six standard errors."""
    skipped = 2000 if process.kind in SETTLING else 0
    steps = np.fromiter(itertools.islice(process.draw(np.random.default_rng(0), 1.0), skipped, 40_000), float)
    parts = steps[: len(steps) // 38 * 38].reshape(38, -1).mean(axis=1)
    error = parts.std(ddof=1) / math.sqrt(len(parts))
    heavy = 0.01 if "Pareto" in process.name else 0.0  # infinite variance: the standard error is no bound
    assert steps.mean() == pytest.approx(process.slowdown, abs=6 * error + heavy + 1e-4)


def measured(name: str, runs: int, step_s: float = 1.0) -> Sequence[SimulatedRun]:
    return [simulate(NAMED[name], step_s, (7, number)) for number in range(runs)]


def test_bursts_bias_neither_the_mean_nor_the_length_of_a_window() -> None:
    """The simulated step times have bursts: in every 45 s, steps take 1.5 times as long for about 5 s. In an earlier
    version, the step times in a window determined the end of this window. Therefore the means of the windows were wrong
    by 1.1 to 1.8 %."""
    found = measured("5 s of 45 s half as long again", 150)
    assert {one.stopped for one in found} == {"window"}
    assert all(60 <= math.fsum(one.step_s) < 76 for one in found), "a block of 5 steps, and the step under way"
    off = np.array([one.mean_s for one in found]) / NAMED["5 s of 45 s half as long again"].slowdown - 1
    assert abs(off.mean()) < 3 * off.std() / math.sqrt(len(off))
    assert off.std() / math.sqrt(len(off)) < 0.004, "otherwise the test could not detect a bias"


@pytest.mark.parametrize("name", ["independent, 2 %", "each like the one before by 0.5, 2 %"])
def test_interval_of_a_window_covers_the_mean_of_a_stationary_process(name: str) -> None:
    known = [intervals.describe_window(one.step_s).mean for one in measured(name, 200)]
    covered = [one is not None and one.low <= 1.0 <= one.high for one in known]
    assert np.mean(covered) >= 0.90  # at a coverage of 95 %, fewer than 90 % of 200 runs have a probability of 0.1 %


def test_interval_of_a_run_misses_states_longer_than_its_window() -> None:
    """The simulated machine changes its speed every ten minutes. A measured window is shorter than ten minutes, so the
    window has only one of the two speeds. The section "What no single run can show" of docs/method.md describes this
    limitation. If this test fails, the section has to be corrected."""
    name = "6 % slower by turns, 10 min each"
    known = [intervals.describe_window(one.step_s).mean for one in measured(name, 40)]
    truth = NAMED[name].slowdown
    assert np.mean([one is not None and one.low <= truth <= one.high for one in known]) < 0.4
