"""Sizes of a T5 model, and the description of its layers for predictions."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from bench import models, objectives
from bench.core.errors import UserError
from bench.core.network import Attention, Mlp, Stack, Stacks
from bench.core.spec import Frozen, Positive, RunSpec
from bench.models.checkpoint import STORES_HEAD

Activation = Literal["relu", "gelu_new", "silu"]
Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Number of layers. The limit is far above any trained model; it bounds the time of predictions, which loop over
layers."""


class Shape(Frozen):
    """Sizes of a T5 model. `heads` × `d_kv` may differ from `d_model`."""

    d_model: Positive
    d_kv: Positive = Field(description="elements of a query, key or value of one head")
    d_ff: Positive
    encoder_layers: Layers
    decoder_layers: Layers
    heads: Positive
    vocab: Positive
    gated: bool = Field(description="True: the feed-forward layer has a third matrix, as in v1.1 and mT5")
    activation: Activation
    separate_head: bool = Field(
        description="False: the head is the embedding. Its input is scaled by d_model^-1/2, as in v1.0, unless"
        " scaled_head is false"
    )
    scaled_head: bool = Field(
        True,
        description="False: the input of a head that is the embedding is not scaled, as in a v1.1 that transformers 5"
        " created",
    )
    relative_attention_buckets: Positive = 32
    relative_attention_max_distance: Positive = Field(
        128, description="distance in tokens from which on all pairs of tokens have the same bias"
    )
    bias_per_layer: bool = Field(
        False,
        description="True: every layer has its own position biases, as in umT5; False: all layers use the first's",
    )

    @property
    def d_inner(self) -> int:
        """Width of the queries, keys or values of all heads together."""
        return self.heads * self.d_kv

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bias_per_layer and not self.separate_head:
            raise ValueError("bias_per_layer=true with separate_head=false: no umT5 is tied; set separate_head=true")
        if self.separate_head and not self.scaled_head:
            raise ValueError(
                "scaled_head=false with separate_head=true: no separate head is scaled; remove one of both"
            )
        buckets, distance = self.relative_attention_buckets, self.relative_attention_max_distance
        if buckets < 4:  # the encoder halves the buckets by direction, and again into exact and logarithmic buckets
            raise ValueError(f"relative_attention_buckets={buckets} is below 4; give at least 4")
        # each shorter distance has its own bucket, and no bucket would be left for longer ones
        if distance <= buckets // 2:
            value = f"relative_attention_max_distance={distance}"
            rule = f"is not above half of relative_attention_buckets={buckets}"
            raise ValueError(f"{value} {rule}; raise the first or lower the second")
        return self


MODEL_TYPES = ("t5", "mt5", "umt5")
NAMES = {  # our field names and transformers' keys
    "d_model": "d_model",
    "d_kv": "d_kv",
    "d_ff": "d_ff",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "heads": "num_heads",
    "vocab": "vocab_size",
    "relative_attention_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
}


def from_hugging_face(config: dict[str, Any]) -> Shape:
    """Return the Shape of a Hugging Face config.json of model_type t5, mt5 or umt5. Raise UserError for other model
    types.

    Only sizes and the architecture are read. Dropout and precision come from the spec.
    """
    kind = models.check_model_type(config, MODEL_TYPES)
    fields = Shape.model_fields
    needed = {
        ours: theirs
        for ours, theirs in NAMES.items()
        if (fields[ours].is_required() and ours != "decoder_layers") or config.get(theirs) is not None
    }
    form = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    *gate, activation = str(form).split("-")
    activation = "gelu_new" if form == "gated-gelu" else activation  # as transformers interprets it
    sizes = models.read_sizes(config, needed)
    sizes = {"decoder_layers": sizes["encoder_layers"], **sizes}  # transformers' default
    if gate not in ([], ["gated"]) or activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise UserError(f"feed_forward_proj={form}", "unknown", f"choose from {known}, plain or after gated-")
    # transformers 5 writes tie_word_embeddings=true into every config.json, even if the head is separate. Every mT5 and
    # published umT5 has a separate head. For a T5, scale_decoder_outputs keeps the value of the original config.json.
    untied = kind != "t5" or False in (config.get("tie_word_embeddings"), config.get("scale_decoder_outputs"))
    # Without a stored head, transformers 5 ties the head and does not scale its input.
    unscaled = untied and config.get(STORES_HEAD) is False
    head = {"separate_head": untied and not unscaled, "scaled_head": not unscaled}
    form = {"gated": bool(gate), "activation": activation, "bias_per_layer": kind == "umt5"}
    return Shape.model_validate(sizes | form | head)


def check(shape: Shape, spec: RunSpec) -> None:
    """Raise UserError if the objective's loss is not a mean over tokens. transformers' T5 computes no other loss."""
    reduction = objectives.load(spec.objective).REDUCTION
    if reduction != "mean":
        rule = f"its loss is a {reduction} over tokens, and a T5's is their mean"
        raise UserError(f"objective={spec.objective}", rule, "choose another objective, or another family")


def token_kinds(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of tokens in a sample: encoder and decoder."""
    return "encoder", "decoder"


def vocabulary(shape: Shape) -> int:
    """Return the number of tokens in the vocabulary."""
    return shape.vocab


def stacks(shape: Shape) -> Stacks:
    """Return the description of the layers, as transformers builds them: an encoder, and a decoder with cross-attention
    to the encoder's output."""
    per_layer = shape.bias_per_layer
    names = ("q", "k", "v", "o")
    own = Attention(
        shape.heads, shape.d_kv, position_bias=shape.relative_attention_buckets, bias_per_layer=per_layer, names=names
    )
    cross = Attention(shape.heads, shape.d_kv, over="encoder", zero_bias=True, bias_per_layer=per_layer, names=names)
    first = ("wi_0", "wi_1") if shape.gated else ("wi",)
    mlp = Mlp(shape.d_ff, shape.activation, gated=shape.gated, inner_dropout=True, names=(*first, "wo"))
    encoder = Stack("encoder", "encoder", shape.encoder_layers, (own, mlp))
    decoder = Stack("decoder", "decoder", shape.decoder_layers, (replace(own, causal=True), cross, mlp))
    # embeddings that transformers builds and discards: each stack's own (before sharing), and a tied head
    discarded = (2 if shape.separate_head else 3) * shape.vocab * shape.d_model
    return Stacks(
        vocab=shape.vocab,
        width=shape.d_model,
        stacks=(encoder, decoder),
        tied=not shape.separate_head,
        norm="rms",
        final_dropout=True,
        clamps_fp16=True,
        discarded=discarded,
    )
