"""A model family's formulas: the file of its name in `memory`, and the one in `step_time`."""

import functools
import importlib
import importlib.util
import json
from types import ModuleType
from typing import Any, Literal

from bench.errors import UserError
from bench.models import load
from bench.spec import RunSpec


@functools.cache
def formulas(room: Literal["memory", "step_time"], family: str) -> ModuleType:
    """Return the file of `family` in `room`; UserError if there is none."""
    name = f"{__package__}.{room}.{family}"
    if importlib.util.find_spec(name) is None:
        raise UserError(f"model.family={family}", f"no such file in bench/predict/{room}", "nothing is predicted of it")
    return importlib.import_module(name)


def shape_of(spec: RunSpec) -> Any:
    """Return the family's `Shape` of the model; UserError for an unknown family."""
    return _shape(spec.model.family, json.dumps(spec.model.shape))


@functools.lru_cache(maxsize=1024)  # points of a sweep share it
def _shape(family: str, plain: str) -> Any:
    return load(family).Shape.model_validate_json(plain)
