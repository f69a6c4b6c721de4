"""T5 as transformers builds it, the variants of it that may be faster, and its weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration, UMT5Config, UMT5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput

from bench.core.network import Part
from bench.core.spec import ModelSpec, RunSpec
from bench.engines.distributed.slices import TensorRanks, mark_slices
from bench.models import derived_seed
from bench.models.modules.chunked_loss import ChunkedHead
from bench.models.modules.parts import SkippedInitialisation, draw, materialise
from bench.models.t5.part import BIAS_TABLE, DIMENSIONS, EMBEDDING, STACKS, T5Part
from bench.models.t5.shape import NAMES, Shape


class ChunkedLoss:
    """A T5 or umT5 for training alone: its head, a ChunkedHead, makes the loss, and there are no logits."""

    config: Any
    encoder: Any
    decoder: Any
    lm_head: Any
    model_dim: int
    _shift_right: Any

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> Seq2SeqLMOutput:
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        decoded = self.decoder(
            input_ids=self._shift_right(labels),
            encoder_hidden_states=encoded,
            encoder_attention_mask=attention_mask,
        ).last_hidden_state
        if self.config.scale_decoder_outputs:
            decoded = decoded * self.model_dim**-0.5
        return Seq2SeqLMOutput(loss=self.lm_head(decoded, labels))


class WithChunkedLoss(ChunkedLoss, T5ForConditionalGeneration):  # type: ignore[misc]
    """A T5 with it."""


class Umt5WithChunkedLoss(ChunkedLoss, UMT5ForConditionalGeneration):  # type: ignore[misc]
    """A umT5 with it."""


KINDS: dict[tuple[bool, bool], Any] = {
    (False, False): T5ForConditionalGeneration,
    (False, True): WithChunkedLoss,
    (True, False): UMT5ForConditionalGeneration,
    (True, True): Umt5WithChunkedLoss,
}
"""What is built, by whether there is a position bias in every layer and whether the loss is chunked."""


def build(spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> torch.nn.Module:
    """Return an uninitialised T5ForConditionalGeneration, or UMT5's, in fp32, built inside `construction`.

    `construction` decides where the weights live: an engine's context, or `torch.device("meta")`.
    """
    shape = Shape.model_validate(spec.model.shape)
    kind = KINDS[shape.bias_per_layer, bool(spec.model.loss_chunk_tokens)]
    with construction or nullcontext(), SkippedInitialisation():
        model = kind(_build_config(shape, spec.model))
    if shape.separate_head:  # nothing is tied then: share what T5 always shares, as transformers does it
        for stack in (model.encoder, model.decoder):
            stack.embed_tokens.weight = model.shared.weight
    if spec.model.loss_chunk_tokens:
        model.lm_head = ChunkedHead(model.lm_head, spec.model.loss_chunk_tokens)
    if spec.activation_checkpointing:
        _enable_checkpointing(model)
    if spec.model.compile == "blocks":
        for block in (*model.encoder.block, *model.decoder.block):
            block.compile()  # in place: names of parameters, and so their weights, stay
    return model  # type: ignore[no-any-return]


def build_part(
    spec: RunSpec, part: Part, construction: AbstractContextManager[Any] | None = None, among: TensorRanks | None = None
) -> torch.nn.Module:
    """Return a part of the uninitialised model; see `bench.core.plugins.DividedFamilyBuilder`."""
    shape = Shape.model_validate(spec.model.shape)
    kind = KINDS[shape.bias_per_layer, False]

    def make() -> T5Part:
        whole = kind(_build_config(shape, spec.model))
        if spec.activation_checkpointing:
            _enable_checkpointing(whole)
        return T5Part(whole, part, shape, among)

    made = materialise(make, construction)
    made.finish(spec.model.loss_chunk_tokens)
    if among is not None:
        mark_slices(made, DIMENSIONS, among)
    return made


def _enable_checkpointing(model: Any) -> None:
    """Have every block run again in backward."""
    # the second name is the older one, deprecated where the first exists
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def find_shared(spec: RunSpec, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Return the parameters that several parts have: tables of position biases that all blocks of a stack use, and an
    embedding that is the head as well."""
    shape = Shape.model_validate(spec.model.shape)
    layers = shape.encoder_layers, shape.decoder_layers
    shared = {} if shape.separate_head else {EMBEDDING: [0, len(parts) - 1]}
    for place, stack in enumerate(STACKS):
        holders = [stage for stage, part in enumerate(parts) if part.blocks(layers)[place]]
        shared |= {} if shape.bias_per_layer else {f"{stack}.{BIAS_TABLE}": holders}
    return {name: stages for name, stages in shared.items() if len(set(stages)) > 1}


def _build_config(shape: Shape, model: ModelSpec) -> T5Config | UMT5Config:
    kind: Any = UMT5Config if shape.bias_per_layer else T5Config
    config: T5Config | UMT5Config = kind(
        **{theirs: getattr(shape, ours) for ours, theirs in NAMES.items()},
        feed_forward_proj=f"gated-{shape.activation}" if shape.gated else shape.activation,
        dropout_rate=model.dropout,
        attn_implementation=_name_attention(model),
        decoder_start_token_id=0,
        use_cache=False,
    )
    # T5Config ties whatever it is told. Said afterwards it holds: no later tie_weights() ties the head again.
    config.tie_word_embeddings = not shape.separate_head
    config.scale_decoder_outputs = not shape.separate_head
    return config


def _name_attention(model: ModelSpec) -> str:
    """Return transformers' name for the attention."""
    if model.attention != "flex":
        return model.attention
    from bench.models.modules import flex_attention

    return flex_attention.NAME


def initialise(
    module: torch.nn.Module,
    spec: RunSpec,
    whole: Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Set every weight of `module` from (spec.seed, parameter name), with T5's own standard deviations.

    Every rank draws the same. Raises ValueError for a parameter that no rule covers.
    """
    deviations = _list_standard_deviations(Shape.model_validate(spec.model.shape))
    for name, parameter in module.named_parameters():  # shared ones appear once
        owner = name.split(".")[-2]
        if owner not in deviations:
            raise ValueError(f"{name}: T5 has no rule to initialise it; known are {', '.join(deviations)}")
        with whole([parameter]), torch.no_grad():
            deviation = deviations[owner]
            if deviation is None:
                parameter.fill_(1.0)
            else:
                draw(parameter, deviation, derived_seed(spec.seed, name))


def _list_standard_deviations(shape: Shape) -> dict[str, float | None]:
    """Standard deviation of a weight by the module that owns it; None for a scale, which starts at one.

    They are those of Mesh TensorFlow's T5 in transformers, `T5PreTrainedModel._init_weights`.
    """
    from_model, from_inner, from_ff = shape.d_model**-0.5, shape.d_inner**-0.5, shape.d_ff**-0.5
    return {
        "shared": 1.0,
        "lm_head": 1.0,
        "q": (shape.d_model * shape.d_kv) ** -0.5,  # in place of scaling the scores by d_kv^-1/2
        "k": from_model,
        "v": from_model,
        "o": from_inner,
        "relative_attention_bias": from_model,
        "wi": from_model,
        "wi_0": from_model,
        "wi_1": from_model,
        "wo": from_ff,
        "layer_norm": None,
        "final_layer_norm": None,
    }
