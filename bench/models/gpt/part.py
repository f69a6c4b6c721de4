"""A part of a decoder-only model for a pipeline: one tensor of states goes from part to part."""

from torch import Tensor, nn

from bench.distributed.slices import TensorRanks, compute_sliced_loss
from bench.models.gpt.decoder import CausalLanguageModel
from bench.models.gpt.shape import Shape
from bench.models.gpt.slices import slice_part
from bench.models.modules.chunked_loss import ChunkedHead
from bench.models.modules.parts import NumberedBlocks
from bench.spec import ModelSpec
from bench.units import Part

EMBEDDING = "model.embed_tokens.weight"


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
