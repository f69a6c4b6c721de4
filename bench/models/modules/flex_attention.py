"""T5's attention by torch's flex_attention, which adds the position bias inside its kernel.

transformers has such an attention too, but reads the bias, which is one for all samples, at the number of the sample
(5.23, integrations/flex_attention.py, score_mod): from the second sample on that is past its end.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.masking_utils import flex_attention_mask

NAME = "flex_attention_with_position_bias"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention, shape (samples, queries, heads, d_kv). `query`, `key` and `value` are (samples, heads,
    tokens, d_kv), `attention_mask` is a BlockMask or None, `position_bias` (1, heads, queries, keys)."""
    assert position_bias is not None  # T5 has it in every layer, if only zeros
    bias = position_bias[0]

    def biased(score: Any, sample: Any, head: Any, row: Any, column: Any) -> Any:
        return score + bias[head, row, column]

    attended: Any = compile_friendly_flex_attention(
        query, key, value, training=module.training, score_mod=biased, block_mask=attention_mask, scale=scaling
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, flex_attention_mask)
