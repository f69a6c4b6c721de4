"""Part of a decoder-only model, for a pipeline or for tensor parallelism. In a pipeline, one tensor of activations is
sent from part to part. Tensor-parallel ranks divide heads, feed-forward width and vocabulary among them."""

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
from bench.models.modules import NumberedBlocks

DIMENSIONS = {
    "qkv_proj": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1,
    "embed_tokens": 0, "lm_head": 0,
}  # fmt: skip
"""Dimension in which the weights of a module are sliced, by the module's name. Norms and learned positions stay whole.
"""
EMBEDDING = "model.embed_tokens.weight"


def slice_part(part: nn.Module, among: TensorRanks) -> None:
    """Reduce the weights of a model part, which is on the meta device, to the slices of this tensor-parallel rank. Add
    the exchanges between ranks at the start and end of each sub-layer."""
    cut_weights(part, DIMENSIONS, among)

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = arguments
        return among.enter(states), *others

    modules: list[Any] = list(part.modules())  # a list: the loop replaces modules
    for module in modules:
        if isinstance(module, SelfAttention):
            module.register_forward_pre_hook(enter)
            module.heads //= among.ranks
            module.o_proj = SummedLinear(module.o_proj, among)
        elif isinstance(module, FeedForward):
            module.register_forward_pre_hook(enter)
            module.down_proj = SummedLinear(module.down_proj, among)
        elif isinstance(module, Decoder):
            module.among = among
            if isinstance(tokens := getattr(module, "embed_tokens", None), nn.Embedding):
                module.embed_tokens = SlicedEmbedding(tokens, among)
            if isinstance(positions := getattr(module, "embed_positions", None), nn.Embedding):
                module.embed_positions = OwnTokensEmbedding(positions, among)


class DecoderPart(CausalLanguageModel):
    """Consecutive units (embedding, blocks, head) of a decoder-only model. If the head is tied to the embedding, the
    last part also has the embedding."""

    def __init__(
        self, shape: Shape, model: ModelSpec, part: Part, among: TensorRanks | None, *, checkpointing: bool,
        reduction: str,
    ) -> None:  # fmt: skip
        """`among` are the tensor-parallel ranks over which each matrix is split, including this rank; None if matrices
        are whole."""
        unchunked = model.model_copy(update={"loss_chunk_tokens": None})  # `modules.build_part` adds the chunked head
        super().__init__(shape, unchunked, checkpointing=checkpointing, reduction=reduction)
        self.part, self.tied = part, not shape.separate_head
        [blocks] = part.blocks([shape.layers])
        self.ends_stack = shape.layers - 1 in blocks
        self.model.layers = NumberedBlocks(self.model.layers, blocks)  # type: ignore[assignment]
        # the whole model was created on the meta device; modules of other parts are dropped
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

    def forward(  # type: ignore[override]
        self, *states: Tensor, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor]:
        # states are (batch, length, width); with sequence parallelism, length has only this rank's tokens
        current = self.model.embed(input_ids, position_ids) if self.part.first else states[0]
        current = self.model.run_layers(current, position_ids)
        if self.ends_stack:
            current = self.model.norm(current)
        return self.loss(current, labels) if self.part.last else (current,)

    def compute_loss(self, states: Tensor, following: Tensor) -> Tensor:
        if (among := self.model.among) is None:
            return super().compute_loss(states, following)
        # (batch × length, vocabulary / ranks): every tensor-parallel rank has the logits of its vocabulary slice
        logits = self.lm_head(among.enter(states)).flatten(0, 1)
        return compute_sliced_loss(logits, following.flatten(), among, self.reduction)
