"""A decoder-only model's part on one of several tensor-parallel ranks: heads, feed-forward widths and vocabulary are
divided."""

from typing import Any

from torch import nn

from bench.distributed.slices import OwnTokensEmbedding, SlicedEmbedding, SummedLinear, TensorRanks, cut_weights
from bench.models.gpt.decoder import Decoder, FeedForward, SelfAttention

DIMENSIONS = {
    "qkv_proj": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1,
    "embed_tokens": 0, "lm_head": 0,
}  # fmt: skip
"""Of each sliced weight, by the module that owns it. Norms and learned positions are whole."""


def slice_part(part: nn.Module, among: TensorRanks) -> None:
    """Keep this rank's slices of a part without memory, and exchange where its sub-layers begin and end."""
    cut_weights(part, DIMENSIONS, among)

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = arguments
        return among.enter(states), *others

    for module in list(part.modules()):
        if isinstance(module, SelfAttention | FeedForward):
            module.register_forward_pre_hook(enter)
            _sum_at_the_end(module, among)
        elif isinstance(module, Decoder):
            _slice_embeddings(module, among)


def _sum_at_the_end(sub_layer: Any, among: TensorRanks) -> None:
    if isinstance(sub_layer, SelfAttention):
        sub_layer.heads //= among.ranks
        sub_layer.o_proj = SummedLinear(sub_layer.o_proj, among)
    else:
        sub_layer.down_proj = SummedLinear(sub_layer.down_proj, among)


def _slice_embeddings(decoder: Any, among: TensorRanks) -> None:
    decoder.among = among
    if hasattr(decoder, "embed_tokens"):
        decoder.embed_tokens = SlicedEmbedding(decoder.embed_tokens, among)
    if hasattr(decoder, "embed_positions"):
        decoder.embed_positions = OwnTokensEmbedding(decoder.embed_positions, among)
