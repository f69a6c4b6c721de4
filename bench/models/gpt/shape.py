"""Sizes and traits of a decoder-only model, and the network that they make."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bench import objectives
from bench.core.errors import UserError
from bench.core.network import Activation, Attention, Mlp, Stack, Stacks
from bench.core.spec import Frozen, Positive, RunSpec

__all__ = ["MODEL_TYPES", "RotaryScaling", "Shape", "check", "from_hugging_face", "stacks", "token_kinds", "vocabulary"]

Config = Mapping[str, Any]

GPT2 = {"width": "n_embd", "layers": "n_layer", "heads": "n_head", "vocab": "vocab_size", "positions": "n_positions"}
LLAMA = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
GPT2_POSITIONS, LLAMA_POSITIONS = 1024, 2048
"""As transformers' classes have it where a file says nothing."""
USUAL: dict[str, dict[str, Any]] = {  # as it is built here, by model type
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
}
Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Far more than anybody trains: predictions go through them one by one."""


def traits_of(config: Any) -> dict[str, Any]:
    """Return the fields of a Shape; UserError for a model type or a trait that is not built here."""
    if not isinstance(config, dict):
        raise UserError("config.json", "not an object of names and values", "give the complete config.json")
    kind = config.get("model_type")
    if kind not in _READERS:
        raise UserError(f"model_type={kind}", "not of the family built here", f"give one of {', '.join(MODEL_TYPES)}")
    for name, usual in USUAL[kind].items():
        if config.get(name, usual) != usual:
            raise UserError(f"{name}={config[name]}", f"this {kind} is not built here", _GENERAL)
    return _READERS[kind](config)


def _gpt2(config: Config) -> dict[str, Any]:
    found = _sizes(GPT2, {"n_positions": GPT2_POSITIONS, **config})
    return found | {
        "inner": config.get("n_inner") or 4 * found["width"],
        "activation": _known("activation_function", config.get("activation_function", "gelu_new")),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "separate_head": not config.get("tie_word_embeddings", True),
    }


def _llama(config: Config) -> dict[str, Any]:
    found = _sizes(LLAMA, {"max_position_embeddings": LLAMA_POSITIONS, **config})
    base, scaling = _rotation(config)
    return found | {
        "head_width": config.get("head_dim"),
        "key_heads": config.get("num_key_value_heads"),
        "norm": "rms",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "silu",
        "gated": True,
        "biases": False,
        "fused": False,
        "separate_head": not config.get("tie_word_embeddings", False),
        "scaled_residuals": False,
        "rotary_base": base,
        "rotary_scaling": scaling,
    }


_READERS: dict[str, Callable[[Config], dict[str, Any]]] = {"gpt2": _gpt2, "llama": _llama}
MODEL_TYPES = tuple(_READERS)
_GENERAL = "choose model.family=hugging_face"


def _sizes(names: Mapping[str, str], config: Config) -> dict[str, Any]:
    missing = [theirs for theirs in names.values() if config.get(theirs) is None]
    if missing:
        raise UserError(
            f"{config['model_type']} config", f"lacks {', '.join(missing)}", "give the complete config.json"
        )
    return {ours: config[theirs] for ours, theirs in names.items()}


def _known(name: str, activation: Any) -> str:
    if activation not in ("gelu_new", "gelu"):
        raise UserError(f"{name}={activation}", "unknown", f"choose from gelu_new, gelu, or {_GENERAL}")
    return str(activation)


def _rotation(config: Config) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling; a file of transformers 5 has both in one place, an older one in two."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise UserError(f"rope_type={kind}", "this rotation is not built here", _GENERAL)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    positions = {"original_positions": given.get("original_max_position_embeddings")}
    return base, {name: given.get(name) for name in names} | positions


class RotaryScaling(Frozen):
    """Slower rotation of the dimensions that turn slowly, for longer texts than were trained on first, as Llama 3.1 has
    it (`rope_type=llama3` in transformers)."""

    factor: float = Field(gt=1)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_positions: Positive

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"low_freq_factor={low} is not below high_freq_factor={high}; lower it")
        return self


class Shape(Frozen):
    """The sizes and traits of a decoder-only model: what is not given is as in GPT-2."""

    width: Positive = Field(description="elements of a token's state")
    layers: Layers
    heads: Positive
    inner: Positive = Field(description="between the matrices of an MLP")
    vocab: Positive
    positions: Positive = Field(description="tokens that a sample has at most")
    head_width: Positive | None = Field(None, description="elements of a head; None: width ÷ heads")
    key_heads: Positive | None = Field(
        None, description="heads of keys and values, each for a group of those of queries; None: `heads`"
    )
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["gelu_new", "gelu", "silu"] = Field("gelu_new", description="gelu_new: its tanh form")
    gated: bool = Field(False, description="a third matrix in an MLP")
    biases: bool = Field(True, description="of all matrices but the head")
    fused: bool = Field(True, description="one matrix for queries, keys and values")
    separate_head: bool = Field(False, description="the head is a matrix of its own, not the embedding")
    scaled_residuals: bool = Field(True, description="what ends a sub-layer starts smaller by the root of their number")
    rotary_base: float | None = Field(None, gt=0, description="positions by rotation, not by a learned table")
    rotary_scaling: RotaryScaling | None = None

    @property
    def d_head(self) -> int:
        """Elements of a query, key or value."""
        return self.head_width or self.width // self.heads

    @model_validator(mode="after")
    def _divided(self) -> Self:
        if not self.head_width and self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; give a divisor, or head_width")
        if self.heads % (self.key_heads or self.heads):
            raise ValueError(f"key_heads={self.key_heads} does not divide heads={self.heads}; give a divisor")
        if self.fused and self.key_heads not in (None, self.heads):
            raise ValueError(
                f"key_heads={self.key_heads} with fused=true: one matrix has as many of each; set it false"
            )
        return self

    @model_validator(mode="after")
    def _rotated(self) -> Self:
        if self.rotary_base is not None and self.d_head % 2:
            raise ValueError(f"head_width={self.d_head} is odd, and a rotation turns pairs; give an even one")
        if self.rotary_scaling is not None and self.rotary_base is None:
            raise ValueError("rotary_scaling comes without rotary_base; give it, or leave the scaling out")
        return self


def from_hugging_face(config: dict[str, Any]) -> Shape:
    """Return the Shape of a Hugging Face config.json of model_type gpt2 or llama; raise UserError for any other.

    Only sizes are read: dropout and precision belong to the spec, and weights are always random.
    """
    return Shape.model_validate(traits_of(config))


def check(shape: Shape, spec: RunSpec) -> None:
    """Raise UserError for what `build` cannot build."""
    tokens = spec.sequence["tokens"]
    if tokens > shape.positions:
        rule = f"the model has {shape.positions} positions"
        raise UserError(f"sequence.tokens={tokens}", rule, "shorten it, or raise model.shape.positions")
    if spec.model.attention == "flex":
        raise UserError("model.attention=flex", "family gpt has no position bias to add", "set model.attention=sdpa")
    reduction = objectives.load(spec.objective).REDUCTION
    if spec.model.loss_chunk_tokens and reduction != "mean":
        rule = f"a chunked loss is a mean, and objective={spec.objective} takes a {reduction}"
        raise UserError(f"model.loss_chunk_tokens={spec.model.loss_chunk_tokens}", rule, "leave it out")


def token_kinds(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of tokens that a sample holds."""
    return ("tokens",)


def vocabulary(shape: Shape) -> int:
    """Return the number of tokens that the model knows."""
    return shape.vocab


def stacks(shape: Shape) -> Stacks:
    """Return the network, module for module as `build` makes it."""
    attention = Attention(
        shape.heads,
        shape.d_head,
        causal=True,
        fused=shape.fused,
        biases=shape.biases,
        key_heads=shape.key_heads,
        rotary=shape.rotary_base is not None,
    )
    kernel: Activation = "silu" if shape.activation == "silu" else "gelu"  # torch's own does both forms of gelu
    mlp = Mlp(shape.inner, kernel, gated=shape.gated, biases=shape.biases)
    learned = shape.positions if shape.rotary_base is None else 0
    return Stacks(
        vocab=shape.vocab,
        width=shape.width,
        stacks=(Stack("decoder", "tokens", shape.layers, (attention, mlp), positions=learned),),
        tied=not shape.separate_head,
        norm="layer" if shape.norm == "layer" else "rms_wide",
        full_loss=True,
        discarded=0 if shape.separate_head else shape.vocab * shape.width,  # a head that is tied
    )
