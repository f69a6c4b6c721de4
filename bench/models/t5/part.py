"""Part of a T5 model, for a pipeline or for tensor parallelism. In a pipeline, the activations of encoder and decoder
are sent from part to part. Tensor-parallel ranks divide heads, feed-forward width and vocabulary among them.

The first part embeds the tokens of both encoder and decoder, so later parts need no embedding for inputs. The encoder's
activations pass through all parts of the decoder, and autograd sums their gradients on the way back. Encoder and
decoder are transformers' own modules, reduced to some of their blocks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bench.core.network import IGNORED, Part
from bench.engines.distributed.slices import (
    SlicedEmbedding,
    SummedLinear,
    TensorRanks,
    compute_sliced_loss,
    cut_weights,
)
from bench.models.modules import NumberedBlocks
from bench.models.modules.chunked_loss import ChunkedHead
from bench.models.t5.shape import Shape

DIMENSIONS = {
    "q": 0, "k": 0, "v": 0, "o": 1, "relative_attention_bias": 1, "wi": 0, "wi_0": 0, "wi_1": 0, "wo": 1,
    "shared": 0, "lm_head": 0,
}  # fmt: skip
"""Dimension in which the weights of a module are sliced, by the module's name. Norms stay whole."""
OTHER_STATES = "key_value_states", "encoder_hidden_states"
"""Names of the argument with the states that cross-attention uses for keys and values: in T5, and in umT5."""
EMBEDDING = "shared.weight"
STACKS = "encoder", "decoder"
BIAS_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
"""Name, within a stack, of the table of position biases that all blocks of the stack share."""
START, PADDING = 0, 0
"""Ids of two tokens: the token before a decoder's first token, and the token that replaces an ignored label."""


def slice_part(part: nn.Module, among: TensorRanks) -> None:
    """Reduce the weights of a model part, which is on the meta device, to the slices of this tensor-parallel rank. Add
    the exchanges between ranks at the start and end of each sub-layer."""
    cut_weights(part, DIMENSIONS, among)

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        states, *others = arguments
        entered = {
            name: among.enter(given) if name in OTHER_STATES and given is not None else given
            for name, given in named.items()
        }
        return (among.enter(states), *others), entered

    modules: list[tuple[str, Any]] = list(part.named_modules())  # a list: the loop replaces modules
    for name, module in modules:
        kind = name.rpartition(".")[2]
        # excludes the owner of a shared table
        if kind in ("SelfAttention", "EncDecAttention") and hasattr(module, "q"):
            module.n_heads //= among.ranks
            module.inner_dim //= among.ranks
            module.o = SummedLinear(module.o, among)
            module.register_forward_pre_hook(enter, with_kwargs=True)
        elif kind == "DenseReluDense":
            module.wo = SummedLinear(module.wo, among)
            module.register_forward_pre_hook(enter, with_kwargs=True)
    if isinstance(shared := getattr(part, "shared", None), nn.Embedding):
        part.shared = SlicedEmbedding(shared, among)


class T5Part(nn.Module):
    """Consecutive units (embedding, blocks, head) of a T5. If the head is tied to the embedding, the last part also has
    the embedding."""

    def __init__(self, whole: Any, part: Part, shape: Shape, among: TensorRanks | None) -> None:
        """Arguments: `whole` is a T5ForConditionalGeneration or UMT5ForConditionalGeneration on the meta device.
        `among` are the tensor-parallel ranks that share each matrix with this rank; None if matrices are whole."""
        super().__init__()
        self.part, self.tied, self.among = part, not shape.separate_head, among
        # factor of the head's input
        self.scale = shape.d_model**-0.5 if self.tied and shape.scaled_head else None
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

    def forward(
        self, *states: Tensor, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        # each (batch, tokens of its stack, width); with sequence parallelism, only this rank's tokens
        encoded, decoded = self._embed(input_ids, labels) if self.part.first else states
        mask, causal = attention_mask, None
        if self.among is not None and self.among.sequence:
            # Masks for all tokens, (batch, 1, 1, length) and (1, 1, length, length), which are added to scores.
            # transformers itself would make them only for this rank's tokens.
            lowest, length = torch.finfo(encoded.dtype).min, labels.shape[1]
            mask = encoded.new_zeros(len(input_ids), 1, 1, input_ids.shape[1])
            if attention_mask is not None:
                mask.masked_fill_(attention_mask[:, None, None] == 0, lowest)
            causal = decoded.new_full((1, 1, length, length), lowest).triu_(1)
        if self.encoder is not None:
            encoded = self.encoder(inputs_embeds=encoded, attention_mask=mask).last_hidden_state
        if self.decoder is not None:
            decoded = self.decoder(
                inputs_embeds=decoded, attention_mask=causal, encoder_hidden_states=encoded, encoder_attention_mask=mask
            ).last_hidden_state
        return self._compute_loss(decoded, labels) if self.part.last else (encoded, decoded)

    def _embed(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedded inputs of encoder and decoder, each (batch, length, width). The decoder's input is the
        token before each label."""
        # (batch, length): labels shifted by one, as T5's `_shift_right`
        before = torch.full_like(labels, START)
        before[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, PADDING)
        return self.shared(input_ids), self.shared(before)

    def _compute_loss(self, decoded: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, 0-d. It is computed in fp32 if the head is chunked or the logits are sliced by tensor
        parallelism, and in the run's precision otherwise, as in transformers."""
        # a tied head scales its input, as in T5 v1.0
        decoded = decoded if self.scale is None else decoded * self.scale
        if isinstance(self.lm_head, ChunkedHead):
            return self.lm_head(decoded, labels)  # type: ignore[no-any-return]
        if self.among is not None:
            # (batch × length, vocabulary / ranks)
            logits = self.lm_head(self.among.enter(decoded)).flatten(0, 1)
            return compute_sliced_loss(logits, labels.flatten(), self.among, "mean")
        return nn.functional.cross_entropy(self.lm_head(decoded).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _keep_blocks(stack: Any, blocks: range, layers: int, shape: Shape) -> Any:
    """Return the stack (encoder or decoder) reduced to the blocks with indices `blocks`. `layers` is the number of all
    its blocks. All blocks of a T5 stack use one table of position biases, which belongs to block 0. The name of this
    parameter contains the index 0 even if block 0 itself is in another part of the model. In a UMT5, each block has its
    own table."""
    table = None if shape.bias_per_layer else stack.block[0].layer[0].SelfAttention.relative_attention_bias
    kept = NumberedBlocks(stack.block, blocks)
    if table is not None and blocks.start > 0:
        attention = stack.block[blocks.start].layer[0].SelfAttention
        attention.has_relative_attention_bias, attention.relative_attention_bias = True, table
        owner = nn.ModuleDict({"layer": nn.ModuleDict({"0": nn.ModuleDict({"SelfAttention": nn.Module()})})})
        owner.get_submodule("layer.0.SelfAttention").relative_attention_bias = table
        kept._modules = {"0": owner, **kept._modules}  # first, because a shared parameter gets the first of its names
    stack.block = kept
    del stack.embed_tokens  # the first part embeds the tokens of both stacks
    if layers - 1 not in blocks:
        stack.final_layer_norm = nn.Identity()
    return stack
