"""Construction of decoder-only models in torch, and initialisation of their weights."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bench import objectives
from bench.core.errors import UserError
from bench.core.network import Part
from bench.core.plugins import Whole
from bench.core.spec import RunSpec
from bench.engines.distributed.slices import TensorRanks
from bench.models import derived_seed, modules
from bench.models.checkpoint.tensors import StoredForm
from bench.models.gpt.decoder import CausalLanguageModel
from bench.models.gpt.part import DIMENSIONS, EMBEDDING, DecoderPart
from bench.models.gpt.shape import GPT2, LLAMA, Shape, from_hugging_face
from bench.models.modules import SkippedInitialisation, draw

DEVIATION = 0.02
"""Standard deviation of the initial values of every matrix and embedding: `initializer_range` of GPT-2 and Llama in
transformers."""

GPT2_NAMES = {
    "model": "transformer", "embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn", "qkv_proj": "c_attn",
    "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj",
}  # fmt: skip
"""Components of this model's dotted parameter names, mapped to those of transformers' GPT-2."""


def build(spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> nn.Module:
    """Return the uninitialised model, built inside the context `construction`."""
    with construction or nullcontext(), SkippedInitialisation():
        model = CausalLanguageModel(Shape.model_validate(spec.model.shape), spec.model, **_list_settings(spec))
    if spec.model.compile == "blocks":
        for layer in model.model.layers:
            layer.compile()  # in place, so that names of parameters (and their initial weights) do not change
    return model


def build_part(
    spec: RunSpec, part: Part, construction: AbstractContextManager[Any] | None = None, among: TensorRanks | None = None
) -> nn.Module:
    """Return a part of the uninitialised model, such as one pipeline stage. `construction` is the context in which the
    engine creates parameters. `among` are the ranks of this rank's tensor-parallel group. If they are given, the part
    has only this rank's slice of each matrix."""
    shape = Shape.model_validate(spec.model.shape)

    def make() -> DecoderPart:
        return DecoderPart(shape, spec.model, part, among, **_list_settings(spec))

    return modules.build_part(make, spec, construction, among, DIMENSIONS, EMBEDDING)


def _list_settings(spec: RunSpec) -> dict[str, Any]:
    reduction = objectives.load(spec.objective).REDUCTION
    return {"checkpointing": spec.activation_checkpointing, "reduction": reduction}


def find_shared(spec: RunSpec, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Return the names of parameters that several parts share, and the indices of these parts. The only such parameter
    is an embedding that is also the head."""
    tied = not Shape.model_validate(spec.model.shape).separate_head
    return {EMBEDDING: [0, len(parts) - 1]} if tied and len(parts) > 1 else {}


def stored_form(spec: RunSpec, name: str) -> StoredForm:
    """Return the name and layout of a parameter in transformers. In transformers, a model with fused attention matrices
    is a GPT-2. Every other model is a Llama, for which transformers has the same names and layout as this project.

    In transformers, GPT-2's matrices are transposed, and the fused matrix has the queries of all heads, then the keys,
    then the values. In contrast, this project's fused matrix is ordered by head.
    """
    shape = Shape.model_validate(spec.model.shape)
    if not shape.fused:
        return StoredForm(name)
    *_, owner, kind = name.split(".")
    stored = ".".join(GPT2_NAMES.get(word, word) for word in name.split("."))
    if not owner.endswith("_proj"):
        return StoredForm(stored)
    if owner != "qkv_proj":
        return StoredForm(stored, kind == "weight")

    def order_rows(tensor: Tensor) -> Tensor:
        ordered: Tensor = tensor.unflatten(0, (shape.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return ordered

    def restore_rows(tensor: Tensor) -> Tensor:
        restored: Tensor = tensor.unflatten(0, (3, shape.heads, -1)).transpose(0, 1).flatten(0, 2)
        return restored

    return StoredForm(stored, kind == "weight", order_rows, restore_rows)


def transformers_config(spec: RunSpec) -> Any:
    """Return the GPT2Config or LlamaConfig of the model. Raise UserError for another architecture."""
    from transformers import GPT2Config, LlamaConfig  # imported only where it is used: it takes seconds

    shape = Shape.model_validate(spec.model.shape)
    config: Any = GPT2Config() if shape.fused else LlamaConfig()
    for ours, theirs in (GPT2 if shape.fused else LLAMA).items():
        setattr(config, theirs, getattr(shape, ours))
    config.update(_list_config_values(shape, spec.model.dropout))
    if _complete(from_hugging_face(config.to_dict())) != _complete(shape):
        rule = "transformers has no model of this shape: it is neither a GPT-2 nor a Llama"
        raise UserError(f"model={spec.model.name}", rule, "leave out learning.save_model")
    return config


def _complete(shape: Shape) -> Shape:
    """Return a copy of `shape` with `head_width` and `key_heads` filled in if they are None."""
    return shape.model_copy(update={"head_width": shape.d_head, "key_heads": shape.key_heads or shape.heads})


def _list_config_values(shape: Shape, dropout: float) -> Mapping[str, Any]:
    """Return the values of a GPT2Config or LlamaConfig that are not listed in the tables GPT2 and LLAMA. Each table
    maps a field of Shape to the key of the config with the same meaning."""
    head = {"tie_word_embeddings": not shape.separate_head, "use_cache": False}
    if shape.fused:
        drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
        inner = {"n_inner": shape.inner, "activation_function": shape.activation}
        return head | drops | inner | {"layer_norm_epsilon": shape.norm_eps}
    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rotary_base}
    if (scaling := shape.rotary_scaling) is not None:
        values = scaling.model_dump()
        values["original_max_position_embeddings"] = values.pop("original_positions")
        rotation |= {"rope_type": "llama3", **values}
    heads = {"head_dim": shape.d_head, "num_key_value_heads": shape.key_heads or shape.heads}
    return head | heads | {"rms_norm_eps": shape.norm_eps, "rope_parameters": rotation}


def initialise(module: nn.Module, spec: RunSpec, whole: Whole = nullcontext) -> None:
    """Set every weight of `module` to values that depend only on spec.seed and the parameter's name. Biases are 0 and
    scales of norms 1, as in transformers. In GPT-2, the standard deviation of each sub-layer's last matrix is divided
    by √(number of sub-layers). Every rank draws the same values. `whole` is the engine's function that gathers
    partitioned parameters, so that their values can be set."""
    shape = Shape.model_validate(spec.model.shape)
    residual = DEVIATION * (2 * shape.layers) ** -0.5 if shape.scaled_residuals else DEVIATION
    for name, parameter in module.named_parameters():  # shared parameters appear once
        *_, owner, kind = name.split(".")
        with whole([parameter]), torch.no_grad():
            if kind == "bias" or owner.endswith("norm"):
                parameter.fill_(float(kind == "weight"))
            else:
                deviation = residual if owner in ("o_proj", "down_proj") else DEVIATION
                draw(parameter, deviation, derived_seed(spec.seed, name))
