"""Tests that T5 with torch's flex_attention computes the same as with its own attention. flex_attention is not compiled
here, because compiled kernels support training only on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from test_t5 import SMALL, initialised, spec_of
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

pytestmark = pytest.mark.thorough


@pytest.fixture
def clear_compiled_code() -> Iterator[None]:
    """Clear torch's compiled code after the test. Otherwise its fake tensors would count as memory in a later test."""
    yield
    torch._dynamo.reset()


@pytest.mark.processes  # runs a C++ compiler
@pytest.mark.usefixtures("clear_compiled_code")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_adds_the_position_bias_to_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has three samples. transformers' own flex attention fails from the second sample on: it raises an
    IndexError on a CPU, and reads beyond the end of the position bias on a GPU."""
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    tokens = torch.arange(36).reshape(3, 12) % 96
    with torch.no_grad():
        expected, found = (
            initialised(spec_of(SMALL, {"attention": attention})).encoder(input_ids=tokens).last_hidden_state
            for attention in ("sdpa", "flex")
        )
    torch.testing.assert_close(found, expected)
