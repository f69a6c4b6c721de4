import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.data.pipeline.spans import SpanCorruption, corrupt

EOS, SENTINELS = 1, np.arange(100_000, 110_000, dtype=np.int32)
T5 = SpanCorruption(density=0.15, mean_length=3.0)

noises = st.builds(SpanCorruption, density=st.floats(0.01, 0.99), mean_length=st.floats(1, 20))
seeds = st.integers(0, 2**31)


def merged(inputs: np.ndarray, targets: np.ndarray) -> list[int]:
    """Return the original tokens, as they were before span corruption. They are restored by replacing each sentinel of
    the input by the tokens that follow the same sentinel in the target."""
    assert inputs[-1] == targets[-1] == EOS
    hidden: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in SENTINELS:
            hidden[token] = []
        else:
            hidden[list(hidden)[-1]].append(token)
    assert all(hidden.values()) and list(hidden) == list(SENTINELS[: len(hidden)])
    return [raw for token in inputs[:-1] for raw in (hidden.pop(token) if token in SENTINELS else [token])]


@given(noise=noises, length=st.integers(2, 300), seed=seeds)
def test_inputs_and_targets_merge_to_the_raw_tokens(noise: SpanCorruption, length: int, seed: int) -> None:
    tokens = np.arange(2, 2 + length, dtype=np.int32)
    mask = noise.mask(length, np.random.default_rng(seed))
    inputs, targets = corrupt(tokens, mask, SENTINELS, EOS)
    assert merged(inputs, targets) == tokens.tolist()
    assert (len(inputs), len(targets)) == noise.lengths(length)
    assert inputs.dtype == targets.dtype == np.int32


@given(noise=noises, length=st.integers(2, 300), seed=seeds)
def test_mask_has_the_computed_numbers_of_hidden_tokens_and_spans(
    noise: SpanCorruption, length: int, seed: int
) -> None:
    mask = noise.mask(length, np.random.default_rng(seed))
    starts = np.flatnonzero(np.diff(mask.astype(int)) == 1)
    assert (mask.sum(), len(starts)) == noise.counts(length)
    assert not mask[0] and mask[-1]


def test_density_and_mean_span_length_are_those_of_the_t5_paper() -> None:
    hidden, spans = T5.counts(10_000)
    assert (hidden, spans) == (1500, 500)


def test_hidden_tokens_are_spread_evenly_over_the_text() -> None:
    # T5's masks always begin with a kept span and end with a hidden span, so 20 tokens at both ends are excluded.
    random = np.random.default_rng(0)
    share = np.mean([T5.mask(300, random) for _ in range(2000)], axis=0)[20:-20]
    assert abs(share.mean() - 0.15) < 0.01
    assert abs(share[:130].mean() - share[130:].mean()) < 0.01


@pytest.mark.parametrize(
    ("encoder", "raw", "target"),
    # For 512, t5's random_spans_helper gives 568 and 114. The other values are computed by hand in the same way.
    [(512, 568, 114), (256, 284, 58), (1024, 1137, 229)],
)
def test_lengths_are_those_of_t5(encoder: int, raw: int, target: int) -> None:
    assert T5.raw_length(encoder, decoder=10_000) == raw
    assert T5.lengths(raw) == (encoder, target)


@given(noise=noises, encoder=st.integers(1, 400), decoder=st.integers(1, 400))
def test_raw_length_is_the_largest_that_fits_both(noise: SpanCorruption, encoder: int, decoder: int) -> None:
    def fits(length: int) -> bool:
        inputs, targets = noise.lengths(length)
        return inputs <= encoder and targets <= decoder

    fitting = [length for length in range(2, encoder + decoder) if fits(length)]
    assert noise.raw_length(encoder, decoder) == max(fitting, default=0)


def test_sequences_of_two_tokens_are_too_short_for_a_sample() -> None:
    assert T5.raw_length(2, 2) == 0
    assert T5.raw_length(3, 3) == 2
