"""T5 models: built with the library transformers, with faster variants of its modules, and initialised."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration, UMT5Config, UMT5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput

from bench.core.network import Part
from bench.core.plugins import Whole
from bench.core.spec import ModelSpec, RunSpec
from bench.engines.distributed.slices import TensorRanks
from bench.models import derived_seed, modules
from bench.models.checkpoint.tensors import StoredForm
from bench.models.modules import SkippedInitialisation, draw
from bench.models.modules.chunked_loss import ChunkedHead
from bench.models.t5.part import BIAS_TABLE, DIMENSIONS, EMBEDDING, STACKS, T5Part
from bench.models.t5.shape import NAMES, Shape


class ChunkedLoss:
    """T5 or umT5 whose head is a ChunkedHead, which computes the loss without returning logits. Only a forward pass
    without labels returns logits."""

    config: Any
    encoder: Any
    decoder: Any
    lm_head: Any
    model_dim: int
    _shift_right: Any

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
    ) -> Seq2SeqLMOutput:  # fmt: skip
        # each (batch, tokens of its stack, d_model)
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        decoded = self.decoder(
            input_ids=decoder_input_ids if labels is None else self._shift_right(labels),
            encoder_hidden_states=encoded,
            encoder_attention_mask=attention_mask,
        ).last_hidden_state
        if self.config.scale_decoder_outputs:
            decoded = decoded * self.model_dim**-0.5
        made = self.lm_head(decoded, labels)
        return Seq2SeqLMOutput(logits=made) if labels is None else Seq2SeqLMOutput(loss=made)


class WithChunkedLoss(ChunkedLoss, T5ForConditionalGeneration):  # type: ignore[misc]
    """T5 with a chunked loss."""


class Umt5WithChunkedLoss(ChunkedLoss, UMT5ForConditionalGeneration):  # type: ignore[misc]
    """umT5 with a chunked loss."""


KINDS: dict[tuple[bool, bool], Any] = {
    (False, False): T5ForConditionalGeneration,
    (False, True): WithChunkedLoss,
    (True, False): UMT5ForConditionalGeneration,
    (True, True): Umt5WithChunkedLoss,
}
"""Class of the model to build. The key is two booleans: True if every layer has its own position biases, and True if
the loss is chunked."""


_FLEX = "flex_attention_with_position_bias"


def build(spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> torch.nn.Module:
    """Return an uninitialised T5ForConditionalGeneration or UMT5ForConditionalGeneration, built inside the context
    `construction`. This context decides the device and dtype of the weights. It is an engine's context or
    `torch.device("meta")`. Without a context, weights are in fp32."""
    shape = Shape.model_validate(spec.model.shape)
    kind = KINDS[shape.bias_per_layer, bool(spec.model.loss_chunk_tokens)]
    with construction or nullcontext(), SkippedInitialisation():
        model = kind(_build_config(shape, spec.model))
    if shape.separate_head:  # transformers then ties no weights, but every T5 shares its embedding
        for stack in (model.encoder, model.decoder):
            stack.embed_tokens.weight = model.shared.weight
    if spec.model.loss_chunk_tokens:
        model.lm_head = ChunkedHead(model.lm_head, spec.model.loss_chunk_tokens)
    if spec.activation_checkpointing:
        _enable_checkpointing(model)
    if spec.model.compile == "blocks":
        for block in (*model.encoder.block, *model.decoder.block):
            block.compile()  # in place, so that names of parameters (and their initial weights) do not change
    return model  # type: ignore[no-any-return]


def build_part(
    spec: RunSpec, part: Part, construction: AbstractContextManager[Any] | None = None, among: TensorRanks | None = None
) -> torch.nn.Module:
    """Return a part of the uninitialised model, such as one pipeline stage. `construction` is the context in which the
    engine creates parameters. `among` are the ranks of this rank's tensor-parallel group. If they are given, the part
    has only this rank's slice of each matrix."""
    shape = Shape.model_validate(spec.model.shape)

    def make() -> T5Part:
        whole = KINDS[shape.bias_per_layer, False](_build_config(shape, spec.model))
        if spec.activation_checkpointing:
            _enable_checkpointing(whole)
        return T5Part(whole, part, shape, among)

    return modules.build_part(make, spec, construction, among, DIMENSIONS, EMBEDDING)


def _enable_checkpointing(model: Any) -> None:
    """Enable activation checkpointing: every block is recomputed in backward."""
    # the second name is older, and deprecated if the first exists
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    # transformers makes the embeddings' outputs need gradients, as only reentrant checkpoints must have; with frozen
    # embeddings the first blocks would compute gradients of their inputs that nothing reads
    model.disable_input_require_grads()


def stored_form(spec: RunSpec, name: str) -> StoredForm:
    """Return the name and layout that the parameter `name` has in checkpoints of transformers. Both are the same as in
    this model, because transformers itself builds the model."""
    return StoredForm(name)


def transformers_config(spec: RunSpec) -> Any:
    """Return the T5Config or UMT5Config of the model."""
    return _build_config(Shape.model_validate(spec.model.shape), spec.model)


def find_shared(spec: RunSpec, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Return the names of parameters that several parts share, and the indices of these parts. Such parameters are
    tables of position biases that all blocks of a stack use, and an embedding that is also the head."""
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
        attn_implementation=_register_flex_attention() if model.attention == "flex" else model.attention,
        decoder_start_token_id=0,
        use_cache=False,
    )
    # T5Config ignores these arguments and ties the head, so they are set afterwards. They also keep a later
    # tie_weights() from tying the head.
    config.tie_word_embeddings = not shape.separate_head
    config.scale_decoder_outputs = not shape.separate_head and shape.scaled_head
    return config


def _register_flex_attention() -> str:
    """Register an attention function that uses torch's flex_attention and adds the position bias inside its kernel.
    Return its name.

    transformers has a flex attention too, but it cannot be used here. It indexes the bias by the number of the sample,
    although the bias is the same for all samples (5.23, integrations/flex_attention.py, score_mod). From the second
    sample on, this index is out of range.
    """
    # imported only for models that use it
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import compile_friendly_flex_attention
    from transformers.masking_utils import flex_attention_mask

    def attend(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, position_bias: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        # query, key and value: (batch, heads, length, d_kv); attention_mask: a BlockMask or None
        assert position_bias is not None  # T5 has a bias in every layer; in some layers it is zeros
        bias = position_bias[0]  # (heads, queries, keys)

        def add_bias(score: Any, sample: Any, head: Any, row: Any, column: Any) -> Any:
            return score + bias[head, row, column]

        attended: Any = compile_friendly_flex_attention(
            query, key, value, training=module.training, score_mod=add_bias, block_mask=attention_mask, scale=scaling
        )
        return attended.transpose(1, 2).contiguous(), None  # (batch, queries, heads, d_kv)

    AttentionInterface.register(_FLEX, attend)
    AttentionMaskInterface.register(_FLEX, flex_attention_mask)
    return _FLEX


def initialise(module: torch.nn.Module, spec: RunSpec, whole: Whole = nullcontext) -> None:
    """Set every weight of `module` to values that depend only on spec.seed and the parameter's name. Standard
    deviations are T5's own. Every rank draws the same values. `whole` returns the context in which the engine makes
    given parameters whole, so that their values can be set. Raise ValueError for a parameter that no rule covers."""
    deviations = _list_standard_deviations(Shape.model_validate(spec.model.shape))
    for name, parameter in module.named_parameters():  # shared parameters appear once
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
    """Return the standard deviation of a weight's initial values, by the module that owns it. The value is None for the
    scale of a norm, which starts at one. The values are those of Mesh TensorFlow's T5, as in transformers'
    `T5PreTrainedModel._init_weights`."""
    from_model, from_inner, from_ff = shape.d_model**-0.5, shape.d_inner**-0.5, shape.d_ff**-0.5
    return {
        "shared": 1.0,
        "lm_head": 1.0,
        "q": (shape.d_model * shape.d_kv) ** -0.5,  # replaces the scaling of scores by d_kv^-1/2
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
