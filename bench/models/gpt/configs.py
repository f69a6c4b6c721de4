"""Sizes and traits out of the config.json of a GPT-2 or Llama on the Hugging Face Hub."""

from collections.abc import Callable, Mapping
from typing import Any

from bench.errors import UserError

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
