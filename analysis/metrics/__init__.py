"""One file per derived quantity; its name is the name of the column.

A file has LABEL (a few words), UNIT, BETTER (which way is better) and `value(record)`, whose return type is the
column's. A new file is a new column, with nothing to register.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Literal, NamedTuple, get_type_hints

from bench.record import RunRecord

Better = Literal["more", "less", "neither"]


class Metric(NamedTuple):
    """A quantity derived from one record; `value` returns None where the record does not tell it."""

    name: str
    label: str
    unit: str
    better: Better
    value: Callable[[RunRecord], float | None]
    whole: bool  # an integer


@functools.cache
def metrics() -> dict[str, Metric]:
    """Return every metric by name."""
    return {module.name: _load(module.name) for module in pkgutil.iter_modules(__path__)}


def _load(name: str) -> Metric:
    module = importlib.import_module(f"{__name__}.{name}")
    whole = get_type_hints(module.value)["return"] == int | None
    return Metric(name, module.LABEL, module.UNIT, module.BETTER, module.value, whole)
