"""The T5 family: T5 and T5 v1.1 (arXiv 1910.10683) and mT5 (arXiv 2010.11934), as transformers builds them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from bench.errors import UserError
from bench.models import derived_seed
from bench.spec import Frozen, Positive, Precision, RunSpec

if TYPE_CHECKING:
    from torch.nn import Module, Parameter


Activation = Literal["relu", "gelu_new", "silu"]
Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Far more than anybody trains: predictions go through them one by one."""


class Shape(Frozen):
    """The sizes of a T5. `heads` × `d_kv` need not be `d_model`."""

    d_model: Positive
    d_kv: Positive  # per head
    d_ff: Positive
    encoder_layers: Layers
    decoder_layers: Layers
    heads: Positive
    vocab: Positive
    gated: bool  # a third feed-forward matrix, as in v1.1 and mT5
    activation: Activation
    separate_head: bool  # false: the head is the embedding, its input scaled by d_model^-1/2, as in the first T5
    relative_attention_buckets: Positive = 32
    relative_attention_max_distance: Positive = 128  # tokens

    @property
    def d_inner(self) -> int:
        """Width of queries, keys and values over all heads."""
        return self.heads * self.d_kv

    @model_validator(mode="after")
    def _buckets_cover_distances(self) -> Self:
        buckets, distance = self.relative_attention_buckets, self.relative_attention_max_distance
        if buckets < 4:  # the encoder halves them for the direction, and again for exact and logarithmic ones
            raise ValueError(f"relative_attention_buckets={buckets} is below 4; give at least 4")
        if distance <= buckets // 2:  # nearer ones have a bucket each, and there would be nothing left to cover
            raise ValueError(
                f"relative_attention_max_distance={distance} is not above half of relative_attention_buckets="
                f"{buckets}; raise the first or lower the second"
            )
        return self


NAMES = {  # ours: transformers'
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
    """Return the Shape of a Hugging Face config.json of model_type t5 or mt5; raise UserError for any other.

    Only sizes are read: dropout and precision belong to the spec, and weights are always random.
    """
    if not isinstance(config, dict):
        raise UserError("config.json", "not an object of names and values", "give the complete config.json")
    kind = config.get("model_type")
    if kind not in ("t5", "mt5"):  # umt5 has a position bias in every layer
        raise UserError(f"model_type={kind}", "not of the T5 family built here", "give a config of t5 or mt5")
    sizes = {ours: config[theirs] for ours, theirs in NAMES.items() if config.get(theirs) is not None}
    sizes = {"decoder_layers": sizes.get("encoder_layers"), **sizes}  # transformers' default
    missing = [NAMES[ours] for ours in NAMES if ours not in sizes and Shape.model_fields[ours].is_required()]
    if missing:
        raise UserError(f"{kind} config", f"lacks {', '.join(missing)}", "give the complete config.json")
    form = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    *gate, activation = str(form).split("-")
    activation = "gelu_new" if form == "gated-gelu" else activation  # as transformers reads it
    if gate not in ([], ["gated"]) or activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise UserError(f"feed_forward_proj={form}", "unknown", f"choose from {known}, plain or after gated-")
    # transformers 5 writes tie_word_embeddings=true into every file, whatever the model has. Every mT5 has a head
    # of its own; for a T5, scale_decoder_outputs then keeps what the file it was read from had said.
    untied = False in (config.get("tie_word_embeddings"), config.get("scale_decoder_outputs"))
    separate = kind == "mt5" or untied
    form_and_head = {"gated": bool(gate), "activation": activation, "separate_head": separate}
    return Shape.model_validate(sizes | form_and_head)


def token_kinds(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of tokens that a sample holds."""
    return "encoder", "decoder"


def parameter_count(shape: Shape) -> int:
    """Return the trainable parameters, those shared counted once."""
    attention = 4 * shape.d_model * shape.d_inner
    feed_forward = (3 if shape.gated else 2) * shape.d_model * shape.d_ff
    encoder_block = attention + feed_forward + 2 * shape.d_model  # a norm before each sub-layer
    decoder_block = 2 * attention + feed_forward + 3 * shape.d_model
    stacks = shape.encoder_layers * encoder_block + shape.decoder_layers * decoder_block
    ends = 2 * (shape.relative_attention_buckets * shape.heads + shape.d_model)  # per stack: bias, last norm
    return stacks + ends + (2 if shape.separate_head else 1) * shape.vocab * shape.d_model


def training_flops(shape: Shape, encoder: int, decoder: int) -> int:
    """Return the matmul FLOPs of forward and backward for one sample of `encoder` and `decoder` tokens.

    A multiply and an add are two FLOPs; element-wise work is left out; attention is counted over the full square,
    masked or not, and once, although fused kernels compute scores again in backward (the convention of PaLM,
    arXiv 2204.02311, appendix B). Backward has two matmuls, each as large, for every one of forward.
    """
    head = 2 * decoder * shape.d_model * shape.vocab
    return 3 * (_blocks_flops(shape, encoder, decoder) + head)


def recomputed_flops(
    shape: Shape, encoder: int, decoder: int, *, dropout: float = 0.0, precision: Precision = "bf16"
) -> int:
    """Return the matmul FLOPs for one sample that checkpointing every block adds to `training_flops`.

    torch stops a recomputation at the last tensor that backward needs. That is the input of the block's last
    matmul, which is not run again, unless something behind it keeps a tensor as well: the mask of dropout, or the
    clamp with which transformers guards fp16 activations. Assumes weights in `precision`, not autocast.
    """
    forward = _blocks_flops(shape, encoder, decoder)
    if dropout > 0 or precision == "fp16":
        return forward
    rows = shape.encoder_layers * encoder + shape.decoder_layers * decoder
    return forward - 2 * rows * shape.d_ff * shape.d_model


def _blocks_flops(shape: Shape, encoder: int, decoder: int) -> int:
    """Matmul FLOPs of all blocks in one forward pass."""
    projection = 2 * shape.d_model * shape.d_inner  # per token; query, key, value and output are one each
    feed_forward = 2 * (3 if shape.gated else 2) * shape.d_model * shape.d_ff  # per token
    pair = 2 * 2 * shape.d_inner  # per query and key: the score, the weighted value
    encoder_block = encoder * (4 * projection + feed_forward) + encoder * encoder * pair
    self_attention = decoder * 4 * projection + decoder * decoder * pair
    cross_attention = (2 * decoder + 2 * encoder) * projection + decoder * encoder * pair
    decoder_block = self_attention + cross_attention + decoder * feed_forward
    return shape.encoder_layers * encoder_block + shape.decoder_layers * decoder_block


def build(spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> "Module":
    """Return an uninitialised T5ForConditionalGeneration in fp32, built inside `construction`.

    `construction` decides where the weights live: an engine's context, or `torch.device("meta")`.
    """
    from bench.models.modules import t5

    return t5.build(spec, construction)


def initialise(
    module: "Module",
    spec: RunSpec,
    whole: Callable[[Sequence["Parameter"]], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Set every weight of `module` from (spec.seed, parameter name), with T5's own standard deviations.

    Numbers are drawn in fp32 on the parameter's device and rounded to its type, so bf16 weights are the rounded
    fp32 ones. Every rank draws the same. Raises ValueError for a parameter that no rule covers.
    """
    import torch

    deviations = _standard_deviations(Shape.model_validate(spec.model.shape))
    for name, parameter in module.named_parameters():  # shared ones appear once
        owner = name.split(".")[-2]
        if owner not in deviations:
            raise ValueError(f"{name}: T5 has no rule to initialise it; known are {', '.join(deviations)}")
        with whole([parameter]), torch.no_grad():
            _fill(parameter, deviations[owner], derived_seed(spec.seed, name))


def _standard_deviations(shape: Shape) -> dict[str, float | None]:
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


def _fill(parameter: "Parameter", deviation: float | None, seed: int) -> None:
    """Fill one whole parameter, piece by piece, so that no second copy of it in fp32 raises the peak of memory."""
    import torch

    if deviation is None:
        parameter.fill_(1.0)
        return
    generator = torch.Generator(parameter.device).manual_seed(seed)
    for piece in parameter.view(-1).split(2**24):
        drawn = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        piece.copy_(drawn.normal_(0.0, deviation, generator=generator))
