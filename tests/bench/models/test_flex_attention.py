"""flex_attention computes the same as T5's own attention. It runs uncompiled here, because its kernels can train only
on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from test_t5 import SMALL, initialised, spec_of
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

pytestmark = pytest.mark.thorough


@pytest.fixture
def clear_compiled_code() -> Iterator[None]:
    """Clear torch's compiled code. Otherwise a later test would count its fake tensors."""
    yield
    torch._dynamo.reset()


@pytest.mark.processes  # runs a C++ compiler
@pytest.mark.usefixtures("clear_compiled_code")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_adds_the_position_bias_to_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has three samples. With transformers' own flex attention, the second sample raises an IndexError on a
    CPU, and reads beyond the bias on a GPU."""
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    tokens = torch.arange(36).reshape(3, 12) % 96
    with torch.no_grad():
        expected, found = (
            initialised(spec_of(SMALL, {"attention": attention})).encoder(input_ids=tokens).last_hidden_state
            for attention in ("sdpa", "flex")
        )
    torch.testing.assert_close(found, expected)
