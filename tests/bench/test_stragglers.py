import pytest

from bench.core.quantities import find_slow_links, find_slow_ranks


@pytest.mark.parametrize(
    ("outside_s", "slow"),
    [
        ((0.1, 0.1, 0.25, 0.1), [2]),
        ((0.1, 0.25), [1]),  # if there are two ranks, each is compared with the other
        ((0.1, 0.3, 0.1, 0.2), [1, 3]),
        ((1.0, 1.2, 1.0), []),  # 20 % is not more than 20 %
        ((1.0, 1.21, 1.0), [1]),
        ((0.010, 0.030, 0.010), []),  # three times as long, but only 20 ms longer
        ((0.010, 0.031, 0.010), [1]),
        ((0.1, 0.1, 0.01), []),  # a fast rank delays no other
        ((5.0,), []),
        ((), []),
    ],
)
def test_slow_rank_exceeds_other_ranks_by_20_percent_and_20_ms(outside_s: tuple, slow: list) -> None:
    assert find_slow_ranks(outside_s) == slow


@pytest.mark.parametrize(
    ("outside_s", "parts", "slow"),
    [
        ((0.1, 0.1, 0.5, 0.5), 2, []),  # the second pipeline stage takes longer on all ranks that hold this stage
        ((0.1, 0.1, 0.5, 0.7), 2, [3]),
        ((0.2, 0.1, 0.5, 0.5), 2, [0]),
        ((0.1, 0.1, 0.1, 0.5), 4, []),  # each rank has its own pipeline stage
    ],
)
def test_rank_is_compared_with_ranks_of_the_same_pipeline_part(outside_s: tuple, parts: int, slow: list) -> None:
    assert find_slow_ranks(outside_s, parts) == slow


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ((9.0, 9.0, 4.0, 9.0), [2]),
        ((9.0, 9.0, 4.5, 9.0), []),  # half is not below half
        ((9.0, 4.0), []),  # below 6.5, not below 3.25
        ((9.0, None, 9.0, 4.0), [3]),
        ((None, None), []),
        ((), []),
    ],
)
def test_slow_link_has_less_than_half_of_the_median_rate(rates: tuple, slow: list) -> None:
    assert find_slow_links(rates) == slow
