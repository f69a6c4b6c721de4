"""Model families, one folder each. A folder with `shape.py` is a family; other folders hold code that several families
share.

The folder's `__init__` implements `FamilyPlugin` and does not import torch. The folder's `build.py` implements
`FamilyBuilder`.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core import plugins
from bench.core.errors import UserError
from bench.core.network import Stacks, count_parameters, list_named_matrices
from bench.core.plugins import DividedFamilyBuilder, FamilyBuilder, FamilyPlugin, StoredFamilyBuilder
from bench.core.spec import AdapterSpec, ModelSpec


def load(family: str) -> FamilyPlugin:
    """Return the plug-in of the family `family`. Raise UserError if no family has this name."""
    return plugins.load(plugins.FAMILY, family)


def load_builder(family: str) -> FamilyBuilder:
    """Return the builder of the family `family`, which imports torch. Raise UserError if no family has this name."""
    return plugins.load(plugins.FAMILY_BUILDER, family)


def load_divided_builder(family: str) -> DividedFamilyBuilder:
    """Return the builder that can build parts of this family's models, for pipelines and tensor parallelism. Raise
    UserError if the family builds only whole models."""
    return plugins.load(plugins.DIVIDED_FAMILY_BUILDER, family)


def load_stored_builder(family: str) -> StoredFamilyBuilder:
    """Return the builder that can read and write this family's weights in transformers' format. Raise UserError if the
    family has no such builder."""
    return plugins.load(plugins.STORED_FAMILY_BUILDER, family)


def find_family(config: object) -> str:
    """Return the name of the family that builds the model of a Hugging Face config.json. It is the family that lists
    the config's model type, otherwise the general family `hugging_face`."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    families = plugins.list_usable(plugins.FAMILY)
    return next((name for name, family in families if kind in family.MODEL_TYPES), "hugging_face")


def check_model_type(config: object, known: Sequence[str]) -> str:
    """Return the model type of a Hugging Face config.json. Raise UserError if it is not in `known`."""
    if not isinstance(config, dict):
        raise UserError("config.json", "not an object of names and values", "give the complete config.json")
    kind = config.get("model_type")
    if kind not in known:
        raise UserError(f"model_type={kind}", "not of the family built here", f"give one of {', '.join(known)}")
    return str(kind)


def read_sizes(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the sizes of a model from the content of a Hugging Face config.json. The keys of the result are field
    names of the model family's class `Shape`. `names` maps each of these field names to a key of the config, such as
    `{"width": "n_embd"}`. Raise UserError if a value is missing."""
    if missing := [theirs for theirs in names.values() if config.get(theirs) is None]:
        value = f"{config['model_type']} config"
        raise UserError(value, f"lacks {', '.join(missing)}", "give the complete config.json")
    return {ours: config[theirs] for ours, theirs in names.items()}


def build_network(model: ModelSpec) -> Stacks | None:
    """Return the description of a model's layers, from which memory and time are predicted. Return None if the model's
    family does not describe its layers. Raise UserError for an unknown family."""
    return _build_network(model.family, json.dumps(model.shape))


def get_network(model: ModelSpec) -> Stacks:
    """Return the description of a model's layers, from which an engine decides how to divide the model into pipeline
    stages. Raise UserError if the model's family does not describe its layers."""
    if (network := build_network(model)) is None:
        rule = f"a model of family {model.family} is not described layer by layer, so it cannot be divided"
        raise UserError(f"model={model.name}", rule, "choose an engine without a pipeline, or another family")
    return network


def check_adapter(model: ModelSpec, adapter: AdapterSpec) -> None:
    """Raise UserError if the rank of the adapters exceeds the smaller dimension of a matrix that they adapt. With a
    rank equal to this dimension, the adapter can already represent every update of the matrix, so a higher rank only
    adds elements."""
    network = build_network(model)
    if network is None or adapter.rank is None:
        return
    sizes = {
        (min(shape), name or "of a block")
        for stack in network.stacks
        for part in stack.block
        for name, shape in list_named_matrices(network, part)
        if not adapter.targets or name in adapter.targets
    }
    if sizes and adapter.rank > (limit := min(sizes))[0]:
        rule = f"matrix {limit[1]} of model={model.name} has a rank of {limit[0]} at most"
        raise UserError(f"adapter.rank={adapter.rank}", rule, f"set adapter.rank={limit[0]} or less")


@functools.lru_cache(maxsize=1024)  # configurations of a sweep share the result
def _build_network(family: str, plain: str) -> Stacks | None:
    plugin = load(family)
    return plugin.stacks(plugin.Shape.model_validate_json(plain))


def count_expected_parameters(model: ModelSpec) -> int | None:
    """Return the number of parameters that a model must have: the published number if there is one, otherwise the
    number that follows from the description of its layers. Return None if both are unknown."""
    if model.parameters is not None:
        return model.parameters
    described = build_network(model)
    return None if described is None else count_parameters(described)


def derived_seed(seed: int, name: str) -> int:
    """Return a random seed derived from `seed` for the purpose `name`. It is the same in every process, unlike Python's
    `hash`."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
