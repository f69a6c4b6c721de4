import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.stats.intervals import Interval, repeats_interval


@pytest.mark.parametrize(("n", "level"), [(2, 0.5), (3, 0.75), (5, 0.9375)])
def test_interval_of_fewer_than_six_repeats_is_their_range(n: int, level: float) -> None:
    # The median lies outside of the range only if all n values lie above it or all lie below: probability 2 / 2^n.
    assert repeats_interval(list(range(n))) == Interval(0, n - 1, "range of repeats", level, n)


def test_a_single_repeat_has_no_interval() -> None:
    assert repeats_interval([1.0]) is None
    assert repeats_interval([]) is None


@given(st.integers(6, 200))
def test_interval_from_six_repeats_on_equals_scipys_quantile_test(n: int) -> None:
    values = np.random.default_rng(n).lognormal(size=n)
    theirs = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    assert repeats_interval(values.tolist()) == Interval(theirs.low, theirs.high, "between repeats", 0.95, n)
