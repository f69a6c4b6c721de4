"""Tests of goodput, the share of time in which a job with failures makes progress. Young's and Daly's formulas for the
checkpoint interval are compared with hand calculations. The predicted goodput is compared with simulated failures and
with published rates."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from bench.predict.goodput import (
    LLAMA_3,
    OPT_175B,
    RSC_1,
    RSC_2,
    FailureTerms,
    Reliability,
    compute_checkpoint_bytes,
    compute_daly_interval,
    compute_goodput,
    compute_young_interval,
    predict_goodput,
)


def test_young_interval_equals_a_calculation_by_hand() -> None:
    assert compute_young_interval(mtbf_s=7200, write_s=100) == 1200  # √(2 · 100 · 7200)


def test_daly_interval_equals_a_calculation_by_hand() -> None:
    """The hand calculation of Daly's formula is 1200 · (1 + ⅓ · √(1/144) + ⅑ · 1/144) − 100 = 1200 + 33.333 + 0.926 −
    100."""
    assert compute_daly_interval(mtbf_s=7200, write_s=100) == pytest.approx(1134.259, abs=1e-3)
    # writing a checkpoint takes longer than the mean time between failures
    assert compute_daly_interval(mtbf_s=50, write_s=100) == 50


@pytest.mark.parametrize("write_s", [1, 30, 300])
@pytest.mark.parametrize("mtbf_s", [2000, 20_000, 1e6])
def test_daly_interval_has_the_highest_goodput_of_the_complete_model(write_s: float, mtbf_s: float) -> None:
    reliability = Reliability(mtbf_s, write_s, 600)
    best = minimize_scalar(
        lambda log_s: -compute_goodput(reliability, math.exp(log_s)), bounds=(0, math.log(mtbf_s)), method="bounded",
        options={"xatol": 1e-10},
    )  # fmt: skip
    at_daly = compute_goodput(reliability, compute_daly_interval(mtbf_s, write_s))
    assert at_daly == pytest.approx(-best.fun, rel=1e-4)
    assert at_daly >= compute_goodput(reliability, compute_young_interval(mtbf_s, write_s)) - 1e-12


def simulate_goodput(reliability: Reliability, interval_s: float, stretches: int, seed: int) -> float:
    """Simulate a job with random failures and return its goodput. The job ends after `stretches` intervals of
    `interval_s` seconds, each followed by a checkpoint. A failure repeats the current interval."""
    draw = np.random.default_rng(seed)
    clock_s, next_failure_s = 0.0, draw.exponential(reliability.mtbf_s)

    def advance(length_s: float) -> bool:
        """Advance the clock by `length_s`, or only to the next failure if it comes earlier. Return True if no failure
        occurred."""
        nonlocal clock_s, next_failure_s
        if clock_s + length_s <= next_failure_s:
            clock_s += length_s
            return True
        clock_s = next_failure_s
        next_failure_s = clock_s + draw.exponential(reliability.mtbf_s)
        return False

    for _ in range(stretches):
        while not advance(interval_s + reliability.write_s):
            while not advance(reliability.restart_s):
                pass
    return stretches * interval_s / clock_s


@pytest.mark.parametrize(
    ("reliability", "interval_s"),
    [
        (Reliability(10_000, 60, 600), 1000),
        (Reliability(3600, 120, 900), 800),  # an unreliable machine: a little more than half of the time is progress
        (Reliability(50_000, 20, 300), 1400),
    ],
)
def test_formula_agrees_with_simulated_failures(reliability: Reliability, interval_s: float) -> None:
    simulated = [simulate_goodput(reliability, interval_s, 20_000, seed) for seed in range(5)]
    tolerance = 4 * float(np.std(simulated, ddof=1)) / math.sqrt(len(simulated)) + 1e-4
    assert compute_goodput(reliability, interval_s) == pytest.approx(float(np.mean(simulated)), abs=tolerance)


def test_published_failure_rates_equal_a_calculation_by_hand() -> None:
    hours = {one: one.device_mtbf_s / 3600 for one in (LLAMA_3, OPT_175B, RSC_1, RSC_2)}
    assert hours[LLAMA_3] / 16_384 == pytest.approx(54 * 24 / 419)  # one failure in 3.09 h
    assert hours[RSC_1] / 16_384 == pytest.approx(1.8, abs=0.01)  # as the source states
    assert hours[OPT_175B] / 992 == pytest.approx(13.7, abs=0.02)
    assert hours[RSC_2] / 8 == pytest.approx(24_000 / 2.34)


def test_predicted_goodput_of_llama_3_is_above_90_percent_as_published() -> None:
    """The paper of Llama 3 reports more than 90 % effective training time. A checkpoint of the 405e9 parameters has
    5.67e12 bytes, and the storage of Meta's cluster sustains 2e12 bytes/s."""
    size = compute_checkpoint_bytes(405_000_000_000, "bf16")
    assert size == 5.67e12
    found = predict_goodput(16_384, FailureTerms(size / 2e12))
    assert found.mtbf_s == pytest.approx(3.093 * 3600, rel=1e-3)
    assert 0.9 < found.share < 0.95
    assert found.low < found.share < found.high


def test_goodput_with_a_given_failure_rate_has_no_range() -> None:
    found = predict_goodput(64, FailureTerms(60, restart_s=300, device_mtbf_s=64 * 1e5))
    assert found.low == found.share == found.high
    assert found.mtbf_s == 1e5
    assert found.share == pytest.approx(1 - math.sqrt(2 * 60 / 1e5) - 300 / 1e5, abs=2e-3)  # first-order approximation


def test_goodput_is_zero_if_failures_are_more_frequent_than_checkpoints() -> None:
    assert predict_goodput(1, FailureTerms(1e6, device_mtbf_s=1.0)).share == 0


def test_checkpoint_has_12_bytes_per_parameter_in_fp32_and_14_in_bf16() -> None:
    assert compute_checkpoint_bytes(10, "fp32") == 120
    assert compute_checkpoint_bytes(10, "bf16") == 140
