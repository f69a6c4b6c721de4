"""Construction of decoder-only models in torch, and initialisation of their weights."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from bench import objectives
from bench.core.network import Part
from bench.core.plugins import Whole
from bench.core.spec import RunSpec
from bench.engines.distributed.slices import TensorRanks, mark_slices
from bench.models import derived_seed
from bench.models.gpt.decoder import CausalLanguageModel
from bench.models.gpt.part import DIMENSIONS, EMBEDDING, DecoderPart
from bench.models.gpt.shape import Shape
from bench.models.modules import SkippedInitialisation, draw, materialise

DEVIATION = 0.02
"""Standard deviation of the initial values of every matrix and embedding: `initializer_range` of GPT-2 and Llama in
transformers."""


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
    """Return a part of the uninitialised model. See `bench.core.plugins.DividedFamilyBuilder`."""
    shape = Shape.model_validate(spec.model.shape)
    made = materialise(lambda: DecoderPart(shape, spec.model, part, among, **_list_settings(spec)), construction)
    made.finish(spec.model.loss_chunk_tokens)
    if among is not None:
        mark_slices(made, DIMENSIONS, among)
    return made


def _list_settings(spec: RunSpec) -> dict[str, Any]:
    reduction = objectives.load(spec.objective).REDUCTION
    return {"checkpointing": spec.activation_checkpointing, "reduction": reduction}


def find_shared(spec: RunSpec, parts: Sequence[Part]) -> dict[str, list[int]]:
    """Return the names of parameters that several parts share, and the indices of these parts. The only such parameter
    is an embedding that is also the head."""
    tied = not Shape.model_validate(spec.model.shape).separate_head
    return {EMBEDDING: [0, len(parts) - 1]} if tied and len(parts) > 1 else {}


def initialise(module: nn.Module, spec: RunSpec, whole: Whole = nullcontext) -> None:
    """Set every weight of `module` to values that depend only on spec.seed and the parameter's name. Biases are 0 and
    scales of norms 1, as in transformers. In GPT-2, the last matrix of each sub-layer has a standard deviation smaller
    by 1 / √(number of sub-layers). Every rank draws the same values."""
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
