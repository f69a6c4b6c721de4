"""A part of a decoder-only model: for a pipeline, where one tensor of states goes from part to part, and for one of
several tensor-parallel ranks, among which heads, feed-forward widths and vocabulary are divided.
"""

from typing import Any

from torch import Tensor, nn

from bench.core.network import Part
from bench.core.spec import ModelSpec
from bench.engines.distributed.slices import (
    OwnTokensEmbedding,
    SlicedEmbedding,
    SummedLinear,
    TensorRanks,
    compute_sliced_loss,
    cut_weights,
)
from bench.models.gpt.decoder import CausalLanguageModel, Decoder, FeedForward, SelfAttention
from bench.models.gpt.shape import Shape
from bench.models.modules.chunked_loss import ChunkedHead
from bench.models.modules.parts import NumberedBlocks

DIMENSIONS = {
    "qkv_proj": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1,
    "embed_tokens": 0, "lm_head": 0,
}  # fmt: skip
"""Of each sliced weight, by the module that owns it. Norms and learned positions are whole."""
EMBEDDING = "model.embed_tokens.weight"


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


class DecoderPart(CausalLanguageModel):
    """Some units of a decoder-only model; where its head is the embedding, the last part has that as well."""

    def __init__(
        self, shape: Shape, model: ModelSpec, part: Part, among: TensorRanks | None, *, checkpointing: bool,
        reduction: str,
    ) -> None:  # fmt: skip
        """`among` are those who share each matrix with this rank."""
        unchunked = model.model_copy(update={"loss_chunk_tokens": None})
        super().__init__(shape, unchunked, checkpointing=checkpointing, reduction=reduction)
        self.part, self.tied = part, not shape.separate_head
        [blocks] = part.blocks([shape.layers])
        self.ends_stack = shape.layers - 1 in blocks
        self.model.layers = NumberedBlocks(self.model.layers, blocks)  # type: ignore[assignment]
        if not part.first and not (part.last and self.tied):
            del self.model.embed_tokens
        if not part.first and shape.rotary_base is None:
            del self.model.embed_positions
        if not self.ends_stack:
            del self.model.norm
        if not part.last:
            del self.lm_head
        if among is not None:
            slice_part(self, among)

    def finish(self, loss_chunk_tokens: int | None) -> None:
        """Tie the head, and give it its loss, now that the parameters have memory."""
        if not self.part.last:
            return
        assert isinstance(self.lm_head, nn.Linear)
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]
        if loss_chunk_tokens:
            self.lm_head = ChunkedHead(self.lm_head, loss_chunk_tokens)

    def forward(  # type: ignore[override]
        self, *states: Tensor, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor]:
        current = self.model.embed(input_ids, position_ids) if self.part.first else states[0]
        current = self.model.run_layers(current, position_ids)
        if self.ends_stack:
            current = self.model.norm(current)
        return self.loss(current, labels) if self.part.last else (current,)

    def compute_loss(self, states: Tensor, following: Tensor) -> Tensor:
        if (among := self.model.among) is None:
            return super().compute_loss(states, following)
        logits = self.lm_head(among.enter(states)).flatten(0, 1)
        return compute_sliced_loss(logits, following.flatten(), among, self.reduction)
