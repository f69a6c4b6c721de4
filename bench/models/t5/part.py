"""A part of a T5: for a pipeline, where the states of encoder and decoder go from part to part, and for one of several
tensor-parallel ranks, among which heads, feed-forward widths and vocabulary are divided.

The first part embeds the tokens of both, so there is one embedding; encoder states go on through the decoder's parts,
and autograd sums their gradients on the way back. The stacks are transformers' own, with some of their blocks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bench.core.network import Part
from bench.engines.distributed.slices import (
    SlicedEmbedding,
    SummedLinear,
    TensorRanks,
    compute_sliced_loss,
    cut_weights,
)
from bench.models.modules.chunked_loss import IGNORED, ChunkedHead
from bench.models.modules.parts import NumberedBlocks
from bench.models.t5.shape import Shape

DIMENSIONS = {
    "q": 0, "k": 0, "v": 0, "o": 1, "relative_attention_bias": 1, "wi": 0, "wi_0": 0, "wi_1": 0, "wo": 1,
    "shared": 0, "lm_head": 0,
}  # fmt: skip
"""Of each sliced weight, by the module that owns it. Norms are whole."""
OTHER_STATES = "key_value_states", "encoder_hidden_states"
"""What T5's attention, and umT5's, call the states that give keys and values in place of their own."""
EMBEDDING = "shared.weight"
STACKS = "encoder", "decoder"
BIAS_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
"""Of each stack."""
START, PADDING = 0, 0
"""Tokens: before a decoder's first one, and for a label that does not count."""


def slice_part(part: nn.Module, among: TensorRanks) -> None:
    """Keep this rank's slices of a part without memory, and exchange where its sub-layers begin and end."""
    cut_weights(part, DIMENSIONS, among)
    modules: list[tuple[str, Any]] = list(part.named_modules())
    for name, module in modules:
        kind = name.rpartition(".")[2]
        if kind in ("SelfAttention", "EncDecAttention") and hasattr(module, "q"):
            _slice_attention(module, among)
        elif kind == "DenseReluDense":
            module.wo = SummedLinear(module.wo, among)
            module.register_forward_pre_hook(_make_entrance(among), with_kwargs=True)
    if hasattr(part, "shared"):
        part.shared = SlicedEmbedding(part.shared, among)  # type: ignore[arg-type]


def _slice_attention(attention: Any, among: TensorRanks) -> None:
    attention.n_heads //= among.ranks
    attention.inner_dim //= among.ranks
    attention.o = SummedLinear(attention.o, among)
    attention.register_forward_pre_hook(_make_entrance(among), with_kwargs=True)


def _make_entrance(among: TensorRanks) -> Any:
    """Return what a sub-layer does with its arguments before its forward."""

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        states, *others = arguments
        entered = {
            name: among.enter(named[name]) if name in OTHER_STATES and named[name] is not None else named[name]
            for name in named
        }
        return (among.enter(states), *others), entered

    return enter


class T5Part(nn.Module):
    """Some units of a T5; where its head is the embedding, the last part has that as well."""

    def __init__(self, whole: Any, part: Part, shape: Shape, among: TensorRanks | None) -> None:
        """`whole` is a T5ForConditionalGeneration, or UMT5's, without memory; `among` are those who share each matrix
        with this rank."""
        super().__init__()
        self.part, self.tied, self.among = part, not shape.separate_head, among
        self.scale = shape.d_model**-0.5 if self.tied else None  # of what comes to the head
        self.encoder: Any = None
        self.decoder: Any = None
        if part.first or (part.last and self.tied):
            self.shared = whole.shared
        layers = shape.encoder_layers, shape.decoder_layers
        for name, blocks, count in zip(STACKS, part.blocks(layers), layers, strict=True):
            if blocks:
                setattr(self, name, _keep_blocks(getattr(whole, name), blocks, count, shape))
        if part.last:
            self.lm_head: nn.Module = whole.lm_head
        if among is not None:
            slice_part(self, among)

    def finish(self, loss_chunk_tokens: int | None) -> None:
        """Tie the head, and give it its loss, now that the parameters have memory."""
        if not self.part.last:
            return
        assert isinstance(self.lm_head, nn.Linear)
        if self.tied:
            self.lm_head.weight = self.shared.weight
        if loss_chunk_tokens:
            self.lm_head = ChunkedHead(self.lm_head, loss_chunk_tokens)

    def forward(
        self, *states: Tensor, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        encoded, decoded = self._embed(input_ids, labels) if self.part.first else states
        mask, causal = attention_mask, None
        if self.among is not None and self.among.sequence:
            mask, causal = _write_mask(input_ids, encoded, mask), _write_causal_mask(labels, decoded)
        if self.encoder is not None:
            encoded = self.encoder(inputs_embeds=encoded, attention_mask=mask).last_hidden_state
        if self.decoder is not None:
            decoded = self.decoder(
                inputs_embeds=decoded, attention_mask=causal, encoder_hidden_states=encoded, encoder_attention_mask=mask
            ).last_hidden_state
        return self._compute_loss(decoded, labels) if self.part.last else (encoded, decoded)

    def _embed(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The decoder sees the token before each label."""
        before = torch.full_like(labels, START)
        before[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, PADDING)
        return self.shared(input_ids), self.shared(before)

    def _compute_loss(self, decoded: Tensor, labels: Tensor) -> Tensor:
        """As transformers has it, in the run's precision, or by the head in chunks."""
        decoded = decoded if self.scale is None else decoded * self.scale
        if isinstance(self.lm_head, ChunkedHead):
            return self.lm_head(decoded, labels)  # type: ignore[no-any-return]
        if self.among is not None:
            logits = self.lm_head(self.among.enter(decoded)).flatten(0, 1)
            return compute_sliced_loss(logits, labels.flatten(), self.among, "mean")
        return nn.functional.cross_entropy(self.lm_head(decoded).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _write_mask(tokens: Tensor, states: Tensor, seen: Tensor | None) -> Tensor:
    """Return what is added to scores for all of a sample's tokens: transformers would count those of `states`, of which
    a rank has a share."""
    mask = states.new_zeros(len(tokens), 1, 1, tokens.shape[1])
    return mask if seen is None else mask.masked_fill_(seen[:, None, None] == 0, torch.finfo(states.dtype).min)


def _write_causal_mask(tokens: Tensor, states: Tensor) -> Tensor:
    """Return the same where a token sees none behind it."""
    length = tokens.shape[1]
    return states.new_full((1, 1, length, length), torch.finfo(states.dtype).min).triu_(1)


def _keep_blocks(stack: Any, blocks: range, layers: int, shape: Shape) -> Any:
    """Return the stack with some of its blocks; the table of position biases stays under the name of the first block,
    of which nothing else need be here."""
    table = None if shape.bias_per_layer else stack.block[0].layer[0].SelfAttention.relative_attention_bias
    kept = NumberedBlocks(stack.block, blocks)
    if table is not None and blocks.start > 0:
        attention = stack.block[blocks.start].layer[0].SelfAttention
        attention.has_relative_attention_bias, attention.relative_attention_bias = True, table
        owner = nn.ModuleDict({"layer": nn.ModuleDict({"0": nn.ModuleDict({"SelfAttention": nn.Module()})})})
        owner.get_submodule("layer.0.SelfAttention").relative_attention_bias = table
        kept._modules = {"0": owner, **kept._modules}  # first: names of parameters are those where they are met first
    stack.block = kept
    del stack.embed_tokens  # the first part has it
    if layers - 1 not in blocks:
        stack.final_layer_norm = nn.Identity()
    return stack
