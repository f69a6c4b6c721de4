"""Sizes of any transformers architecture: the values of its config. A value that is not given has the default of the
architecture's config class."""

from typing import Any

from pydantic import ConfigDict

from bench import objectives
from bench.core.errors import UserError
from bench.core.network import Stacks
from bench.core.spec import Frozen, Positive, RunSpec

MODEL_TYPES: tuple[str, ...] = ()
_NO_SIZES = frozenset(
    {"architectures", "auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version", "use_cache"}
)
"""Keys of a config.json that do not affect the network."""


class Shape(Frozen):
    """Config of transformers: its `model_type`, and any values of the config class."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model_type: str
    vocab_size: Positive
    is_encoder_decoder: bool = False


def from_hugging_face(config: dict[str, Any]) -> Shape:
    """Return the Shape of a Hugging Face config.json. Raise UserError if it has no model type or no vocabulary.

    Dropout and precision come from the spec, so the keys for them are ignored.
    """
    missing = [key for key in ("model_type", "vocab_size") if not isinstance(config, dict) or not config.get(key)]
    if missing:
        remedy = "give the complete config.json of a language model"
        raise UserError("config.json", f"lacks {' and '.join(missing)}", remedy)
    sizes = {key: value for key, value in config.items() if not key.startswith("_") and "drop" not in key}
    return Shape.model_validate({key: value for key, value in sizes.items() if key not in _NO_SIZES})


def check(shape: Shape, spec: RunSpec) -> None:
    """Raise UserError for options of a spec that transformers' models do not support."""
    model, family = spec.model, f"family {spec.model.family}"
    ours = {
        f"model.loss_chunk_tokens={model.loss_chunk_tokens}": model.loss_chunk_tokens is not None,
        f"model.compile={model.compile}": model.compile != "none",
        f"model.attention={model.attention}": model.attention == "flex",
    }
    for value, wanted in ours.items():
        if wanted:
            raise UserError(value, f"a model of {family} is built by transformers, which lacks it", "leave it out")
    positions = model.shape.get("max_position_embeddings", model.shape.get("n_positions"))
    for kind, length in spec.sequence.items():
        if isinstance(positions, int) and length > positions:
            raise UserError(f"sequence.{kind}={length}", f"the model has {positions} positions", "give fewer tokens")
    if any(kind.positions for kind in objectives.load(spec.objective).KINDS):
        rule = "models of transformers may attend across documents"
        raise UserError(f"objective={spec.objective}", rule, "choose objective=causal_lm")
    if (reduction := objectives.load(spec.objective).REDUCTION) != "mean":
        rule = f"its loss is a {reduction} over tokens, and transformers takes their mean"
        raise UserError(f"objective={spec.objective}", rule, "choose another objective, or another family")


def token_kinds(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of tokens in a sample: encoder and decoder, or one kind for a decoder-only model."""
    return ("encoder", "decoder") if shape.is_encoder_decoder else ("tokens",)


def vocabulary(shape: Shape) -> int:
    """Return the number of tokens in the vocabulary."""
    return shape.vocab_size


def stacks(shape: Shape) -> Stacks | None:
    """Return None: the layers of a config are known only after transformers has built the model."""
    return None
