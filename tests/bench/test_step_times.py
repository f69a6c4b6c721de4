"""Tests of the step times of a run, which are computed from the times at which each rank completes each step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core.spec import MeasureSpec
from bench.core.steps import compute_step_s, list_block_lengths


def test_delay_recovered_in_the_next_step_counts_once() -> None:
    """The first rank completes its two steps at 1 s and 3 s, and the second rank at 2 s and 3 s.

    A step ends with its slowest rank, so the step times are 2 s and 1 s, 3 s in total.
    """
    assert compute_step_s([[1, 2], [2, 1]], [2]) == [2, 1]


def test_step_times_start_again_at_every_block() -> None:
    assert compute_step_s([[1, 2], [2, 1]], [1, 1]) == [2, 2]


def test_step_times_of_one_rank_are_its_own() -> None:
    assert compute_step_s([[3], [1], [2]], [2, 1]) == [3, 1, 2]


def test_no_steps_have_no_step_times() -> None:
    assert compute_step_s(np.zeros((0, 4)), []) == []


@given(st.integers(1, 6), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_steps_of_a_block_add_up_to_its_slowest_rank(ranks: int, blocks: list[int], seed: int) -> None:
    own = np.random.default_rng(seed).lognormal(sigma=0.5, size=(sum(blocks), ranks))
    steps = np.array(compute_step_s(own, blocks))
    starts = np.cumsum([0, *blocks[:-1]])
    expected = [own[start : start + n].sum(axis=0).max() for start, n in zip(starts, blocks, strict=True)]
    assert np.add.reduceat(steps, starts) == pytest.approx(expected)
    assert (steps > 0).all()


@pytest.mark.parametrize(
    ("steps", "cut", "lengths"),
    [
        (20, 10, [5, 5, 5, 5]),
        (19, 12, [5, 5, 2, 5, 2]),  # warm-up and window both end within a block
        (7, 0, [5, 2]),  # the run ended within its warm-up
        (7, 7, [5, 2]),
        (0, 0, []),
    ],
)
def test_blocks_end_with_the_warm_up_and_with_the_window(steps: int, cut: int, lengths: list[int]) -> None:
    assert list_block_lengths(steps, cut, MeasureSpec(block_steps=5)) == lengths
