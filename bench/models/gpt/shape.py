"""Sizes and other properties of a decoder-only model, and the description of its layers for predictions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bench import models, objectives
from bench.core.errors import UserError
from bench.core.network import Activation, Attention, Mlp, Stack, Stacks
from bench.core.spec import Frozen, Positive, RunSpec

__all__ = ["MODEL_TYPES", "RotaryScaling", "Shape", "check", "from_hugging_face", "stacks", "token_kinds", "vocabulary"]

Config = Mapping[str, Any]

MODEL_TYPES = ("gpt2", "llama")
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
"""Default numbers of positions in transformers' config classes."""
USUAL: dict[str, dict[str, Any]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
}
"""Keys of a config.json for which this family supports only one value, with this value, by model type."""
_GENERAL = "choose model.family=hugging_face"
Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Number of layers. The limit is far above any trained model; it bounds the time of predictions, which loop over
layers."""


def from_hugging_face(config: dict[str, Any]) -> "Shape":
    """Return the Shape of a Hugging Face config.json of model_type gpt2 or llama. Raise UserError for other model
    types, and for properties that this family does not support.

    Only sizes and the architecture are read. Dropout and precision come from the spec.
    """
    kind = models.check_model_type(config, MODEL_TYPES)
    for name, usual in USUAL[kind].items():
        if config.get(name, usual) != usual:
            raise UserError(f"{name}={config[name]}", f"this {kind} is not built here", _GENERAL)
    return Shape.model_validate(_read_gpt2(config) if kind == "gpt2" else _read_llama(config))


def _read_gpt2(config: Config) -> dict[str, Any]:
    found = models.read_sizes({"n_positions": GPT2_POSITIONS, **config}, GPT2)
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu"):
        remedy = f"choose from gelu_new, gelu, or {_GENERAL}"
        raise UserError(f"activation_function={activation}", "unknown", remedy)
    return found | {
        "inner": config.get("n_inner") or 4 * found["width"],
        "activation": activation,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "separate_head": not config.get("tie_word_embeddings", True),
    }


def _read_llama(config: Config) -> dict[str, Any]:
    found = models.read_sizes({"max_position_embeddings": LLAMA_POSITIONS, **config}, LLAMA)
    # transformers 5 writes rotary base and scaling under one key, older versions under two
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, scaling = rotation.get("rope_type", rotation.get("type", "default")), None
    if kind not in ("default", "llama3"):
        raise UserError(f"rope_type={kind}", "this rotation is not built here", _GENERAL)
    if kind == "llama3":
        scaling = {name: rotation.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling["original_positions"] = rotation.get("original_max_position_embeddings")
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
        "rotary_base": rotation.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "rotary_scaling": scaling,
    }


class RotaryScaling(Frozen):
    """Scaling of rotary embeddings as in Llama 3.1 (`rope_type=llama3` in transformers). Dimensions that rotate slowly
    are slowed down further, for contexts longer than in the original pre-training."""

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
    """Sizes and other properties of a decoder-only model. Defaults are those of GPT-2."""

    width: Positive = Field(description="elements of a token's hidden state")
    layers: Layers
    heads: Positive
    inner: Positive = Field(description="elements between the two matrices of an MLP")
    vocab: Positive
    positions: Positive = Field(description="maximum number of tokens in a sample")
    head_width: Positive | None = Field(
        None, description="elements of a query, key or value of one head; None: width ÷ heads"
    )
    key_heads: Positive | None = Field(
        None, description="number of heads of keys and values (grouped-query attention); None: equal to `heads`"
    )
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["gelu_new", "gelu", "silu"] = Field(
        "gelu_new", description="activation function of the MLP; gelu_new is GELU's tanh approximation"
    )
    gated: bool = Field(False, description="True: the MLP has a third matrix, whose product scales the activation")
    biases: bool = Field(True, description="True: all matrices except the head have a bias")
    fused: bool = Field(True, description="True: queries, keys and values come from one matrix")
    separate_head: bool = Field(
        False, description="True: the head has its own matrix; False: it uses that of the embedding"
    )
    scaled_residuals: bool = Field(
        True,
        description="True: the initial standard deviation of each sub-layer's last matrix is divided by "
        "√(number of sub-layers)",
    )
    rotary_base: float | None = Field(
        None, gt=0, description="base of the rotary position embedding; None: a learned table of positions"
    )
    rotary_scaling: RotaryScaling | None = None

    @property
    def d_head(self) -> int:
        """Elements of one head's query, key or value."""
        return self.head_width or self.width // self.heads

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.head_width and self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; set a divisor, or head_width")
        if self.heads % (self.key_heads or self.heads):
            raise ValueError(f"key_heads={self.key_heads} does not divide heads={self.heads}; give a divisor")
        if self.fused and self.key_heads not in (None, self.heads):
            rule = "a fused matrix needs key_heads=heads"
            raise ValueError(f"key_heads={self.key_heads} with fused=true: {rule}; set fused=false")
        if self.rotary_base is not None and self.d_head % 2:
            rule = "is odd, but a rotary embedding rotates pairs of elements"
            raise ValueError(f"head_width={self.d_head} {rule}; set an even number")
        if self.rotary_scaling is not None and self.rotary_base is None:
            raise ValueError("rotary_scaling needs rotary_base; set rotary_base, or remove rotary_scaling")
        return self


def check(shape: Shape, spec: RunSpec) -> None:
    """Raise UserError if `build` cannot build the model of a spec."""
    tokens = spec.sequence["tokens"]
    if tokens > shape.positions:
        rule = f"the model has {shape.positions} positions"
        remedy = f"set sequence.tokens={shape.positions} or less"
        if spec.model.checkpoint is None:  # a checkpoint has weights for its positions only
            remedy += ", or raise model.shape.positions"
        raise UserError(f"sequence.tokens={tokens}", rule, remedy)
    if spec.model.attention == "flex":  # flex_attention is supported only for T5's position biases
        raise UserError("model.attention=flex", "family gpt has no position bias to add", "set model.attention=sdpa")
    reduction = objectives.load(spec.objective).REDUCTION
    if spec.model.loss_chunk_tokens and reduction != "mean":
        rule = f"a chunked loss is a mean, and objective={spec.objective} takes a {reduction}"
        raise UserError(f"model.loss_chunk_tokens={spec.model.loss_chunk_tokens}", rule, "leave it out")


def token_kinds(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of tokens in a sample: decoder-only models have one."""
    return ("tokens",)


def vocabulary(shape: Shape) -> int:
    """Return the number of tokens in the vocabulary."""
    return shape.vocab


def stacks(shape: Shape) -> Stacks:
    """Return the description of the layers, module by module as `build` creates them."""
    attention = Attention(
        shape.heads,
        shape.d_head,
        causal=True,
        fused=shape.fused,
        biases=shape.biases,
        key_heads=shape.key_heads,
        rotary=shape.rotary_base is not None,
        names=("qkv_proj", "o_proj") if shape.fused else ("q_proj", "k_proj", "v_proj", "o_proj"),
    )
    kernel: Activation = "silu" if shape.activation == "silu" else "gelu"  # torch's kernel computes both forms of gelu
    names = ("gate_proj", "up_proj", "down_proj") if shape.gated else ("up_proj", "down_proj")
    mlp = Mlp(shape.inner, kernel, gated=shape.gated, biases=shape.biases, names=names)
    learned = shape.positions if shape.rotary_base is None else 0
    return Stacks(
        vocab=shape.vocab,
        width=shape.width,
        stacks=(Stack("decoder", "tokens", shape.layers, (attention, mlp), positions=learned),),
        tied=not shape.separate_head,
        norm="layer" if shape.norm == "layer" else "rms_wide",
        full_loss=True,
        # a tied head's own weight is built and then discarded
        discarded=0 if shape.separate_head else shape.vocab * shape.width,
    )
