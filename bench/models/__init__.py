"""Model families, one folder each: a folder with `shape.py` is a family, others hold what families share.

The folder itself is a `FamilyPlugin` and imports no torch; its `build.py` is a `FamilyBuilder`.
"""

import functools
import hashlib
import json

from bench.core import plugins
from bench.core.errors import UserError
from bench.core.network import Stacks, count_parameters
from bench.core.plugins import DividedFamilyBuilder, FamilyBuilder, FamilyPlugin
from bench.core.spec import ModelSpec


def load(family: str) -> FamilyPlugin:
    """Return the family named `family`; raise UserError if there is none."""
    return plugins.load(plugins.FAMILY, family)


def load_builder(family: str) -> FamilyBuilder:
    """Return what builds models of the family named `family`, which imports torch; raise UserError if there is none."""
    return plugins.load(plugins.FAMILY_BUILDER, family)


def load_divided_builder(family: str) -> DividedFamilyBuilder:
    """Return what builds parts of models of the family named `family`; raise UserError if it builds only whole ones."""
    return plugins.load(plugins.DIVIDED_FAMILY_BUILDER, family)


def find_family(config: object) -> str:
    """Return the family of a Hugging Face config.json: the one of its model type or, if none is, the general one."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    return next(
        (name for name, family in plugins.list_usable(plugins.FAMILY) if kind in family.MODEL_TYPES), "hugging_face"
    )


def build_network(model: ModelSpec) -> Stacks | None:
    """Return a model's network, None where its family does not describe it; UserError for an unknown family."""
    return _build_network(model.family, json.dumps(model.shape))


def get_network(model: ModelSpec) -> Stacks:
    """Return a model's network; UserError where its family does not describe it."""
    if (network := build_network(model)) is None:
        rule = f"what a model of family {model.family} is made of is not known, so it cannot be divided"
        raise UserError(f"model={model.name}", rule, "choose an engine without a pipeline, or another family")
    return network


@functools.lru_cache(maxsize=1024)  # points of a sweep share it
def _build_network(family: str, plain: str) -> Stacks | None:
    plugin = load(family)
    return plugin.stacks(plugin.Shape.model_validate_json(plain))


def count_expected_parameters(model: ModelSpec) -> int | None:
    """Return the parameters that a model has to have: those published, else those of its network; None: unknown."""
    if model.parameters is not None:
        return model.parameters
    described = build_network(model)
    return None if described is None else count_parameters(described)


def derived_seed(seed: int, name: str) -> int:
    """Return a generator's seed for one of the purposes of `seed`: the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
