"""Models as transformers builds them from a config. Their weights depend only on the seed and the names of modules."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.initialization import no_init_weights

from bench.core.plugins import Whole
from bench.core.spec import ModelSpec, RunSpec
from bench.models import derived_seed
from bench.models.checkpoint.tensors import StoredForm
from bench.models.hugging_face.shape import Shape

_LOGGER = logging.getLogger(__name__)


def build(spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> Module:
    """Return the uninitialised model, built inside the context `construction`. Raise ValueError for a config that
    transformers does not know."""
    shape = Shape.model_validate(spec.model.shape)
    config = _build_config(shape, spec.model)
    kind: Any = AutoModelForSeq2SeqLM if shape.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        raise ValueError(f"transformers does not train model_type={config.model_type} with {kind.__name__}")
    # imported before `construction` is entered, because importing a model class within deepspeed.zero.Init raises
    found: type[PreTrainedModel] = kind._model_mapping[type(config)]
    if spec.model.attention == "sdpa" and not found._supports_sdpa:
        raise ValueError(f"transformers has no model.attention=sdpa for model_type={shape.model_type}; set it to eager")
    with construction or nullcontext(), no_init_weights():  # `initialise` sets the weights later
        model: Any = kind.from_config(config, attn_implementation=spec.model.attention)
    model.tie_weights()  # no_init_weights skips tying too
    if spec.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"transformers has no activation checkpointing for model_type={shape.model_type}")
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    trained: Module = model.train()
    return trained


def stored_form(spec: RunSpec, name: str) -> StoredForm:
    """Return the name and layout that the parameter `name` has in checkpoints of transformers. Both are the same as in
    this model, because transformers itself builds the model."""
    return StoredForm(name)


def transformers_config(spec: RunSpec) -> Any:
    """Return the config of the model."""
    return _build_config(Shape.model_validate(spec.model.shape), spec.model)


def initialise(module: Module, spec: RunSpec, whole: Whole = nullcontext) -> None:
    """Set every weight with transformers' own rules. Values depend only on spec.seed and the module's name. `whole`
    returns the context in which the engine makes given parameters whole, so that their values can be set.

    A module is initialised together with its leaves (child modules without children), because the module's rule may set
    the weights of these leaves a second time. For example, GPT-2's rule does so for residual projections. Weights are
    drawn in the run's precision, on their device, and are the same on every rank. Raise ValueError for a parameter that
    transformers does not initialise.
    """
    drawn: dict[Parameter, str] = {}
    for parameter in module.parameters():
        _mark_kept(parameter, True)
    for model, members in _list_groups(module):
        fresh = {
            parameter: f"{name}.{own}"
            for name, member in members.items()
            for own, parameter in member.named_parameters(recurse=False)
            if parameter not in drawn  # a shared parameter is drawn with the first module that has it
        }
        drawn |= fresh
        with whole(list(fresh)), torch.no_grad():
            for parameter in fresh:
                _mark_kept(parameter, False)
                parameter.fill_(torch.nan)  # NaN marks weights that no rule sets
            # one seed per module, so that the order of modules does not matter
            for name, member in members.items():
                torch.manual_seed(derived_seed(spec.seed, name))
                model._init_weights(member)
            left = [name for parameter, name in fresh.items() if parameter.isnan().any()]
            for parameter in fresh:
                _mark_kept(parameter, True)
        if left:
            raise ValueError(f"{left[0]}: transformers has no rule to initialise it")


def _mark_kept(parameter: Parameter, keeps: bool) -> None:
    """Set the flag with which transformers marks parameters that its initialisation must leave unchanged."""
    parameter._is_hf_initialized = keeps  # type: ignore[attr-defined]


def _list_groups(module: Module) -> Iterator[tuple[Any, dict[str, Module]]]:
    """Yield two values for each module that has children, the deepest module first. The first value is the
    PreTrainedModel whose rules initialise the module. The second value maps names to modules: the module itself and its
    leaves (children without children)."""
    models: dict[str, Any] = {}
    groups: list[tuple[Any, dict[str, Module]]] = []
    for name, parent in module.named_modules():  # a parent comes before its children
        models[name] = parent if isinstance(parent, PreTrainedModel) else models[name.rpartition(".")[0]]
        if any(True for _ in parent.children()):
            leaves = {
                f"{name}.{own}".lstrip("."): child
                for own, child in parent.named_children()
                if not any(True for _ in child.children())
            }
            groups.append((models[name], {**leaves, name: parent}))
    return iter(groups[::-1])


def _is_misspelt(name: str, known: str) -> bool:
    """Return True if a letter of `known` is missing in `name`, if `name` has one letter more, or if letters are
    exchanged. Another letter is no sign: `bos_token_id` is not `eos_token_id`."""
    short, long = sorted((name, known), key=len)
    if len(short) == len(long):
        return sorted(short) == sorted(long)
    return any(long[:at] + long[at + 1 :] == short for at in range(len(long)))


def _build_config(shape: Shape, model: ModelSpec) -> Any:
    """Return the transformers config of a model. Raise ValueError for a model type that transformers does not know.

    Many published files have keys that transformers does not know, or knows no longer and converts. They are passed to
    it, as when it reads the file itself, and named in a warning. A key that is probably misspelt raises ValueError.
    """
    values = shape.model_dump(exclude={"model_type"})
    config = AutoConfig.for_model(shape.model_type, **values)
    known = {*AutoConfig.for_model(shape.model_type).to_dict(), *config.attribute_map}
    unknown = sorted(set(values) - known)
    for name in unknown:
        if nearest := next((one for one in sorted(known) if _is_misspelt(name, one)), None):
            raise ValueError(f"model_type={shape.model_type} has no {name} in its config; did you mean {nearest}?")
    if unknown:
        _LOGGER.warning(
            "model_type=%s does not have these keys of its config: %s", shape.model_type, ", ".join(unknown)
        )
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float | int):
            setattr(config, name, model.dropout)
    config.use_cache = False
    return config
