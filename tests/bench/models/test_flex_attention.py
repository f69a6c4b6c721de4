"""flex_attention computes T5's attention. Here it runs uncompiled, since its kernels need a GPU to train."""

from collections.abc import Iterator

import pytest
import torch
from test_t5 import SMALL, initialised, spec_of
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

pytestmark = pytest.mark.thorough


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Make torch forget what it compiled: a later test would count its fake tensors."""
    yield
    torch._dynamo.reset()


@pytest.mark.processes  # a C++ compiler
@pytest.mark.usefixtures("forgotten")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_sample_of_a_batch_gets_the_position_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers' own function the second sample is an IndexError here, and reads past the bias on a GPU."""
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    tokens = torch.arange(36).reshape(3, 12) % 96
    with torch.no_grad():
        expected, found = (
            initialised(spec_of(SMALL, {"attention": attention})).encoder(input_ids=tokens).last_hidden_state
            for attention in ("sdpa", "flex")
        )
    torch.testing.assert_close(found, expected)
