"""Training engines, one file each. The contract of such a file:

`Options`                  a pydantic model without torch: what a user may set in conf/engine
`check(options, spec)`     raises UserError for what this engine cannot do
`construction(spec)`       a context in which the model is built (stage 3 partitions there)
`whole(parameters)`        a context in which partitioned parameters are whole; rank 0's changes to them stay
`parameter_count(module)`  elements in all, partitions of other ranks included
`build(module, spec)`      an `Engine`
"""

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from bench.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """A model ready to train."""

    def train_step(self, micro_batches: "Sequence[dict[str, Tensor]]") -> "Tensor":
        """Make one optimizer step; return its mean loss on this rank as a detached 0-d device tensor, unsynchronised."""
        ...

    def gradient_norm(self) -> float | None:
        """Return the last step's global L2 norm before clipping; None where the engine keeps none. May synchronise."""
        ...

    def skipped_steps(self) -> int:
        """Return how many updates were skipped so far because the loss scale overflowed."""
        ...

    def config(self) -> dict[str, Any]:
        """Return what the engine was really given, in plain types, for the record."""
        ...


def load(backend: str) -> ModuleType:
    """Return the engine file named `backend`; raise UserError if there is none."""
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    if backend not in known:
        raise UserError(f"engine.backend={backend}", "no such file in bench/engines", nearest(backend, known))
    return importlib.import_module(f"{__name__}.{backend}")
