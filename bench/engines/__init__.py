"""Training engines: a folder each, which holds `facts.py`. Folders without are what engines share.

A folder shows two parts. Its `__init__` is what plans and readers ask, without torch (`bench.plugins.EnginePlugin`);
its `engine` is what builds (`bench.plugins.EngineBuilder`), and returns an `Engine`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from bench import plugins
from bench.engine_facts import EngineFacts
from bench.errors import UserError
from bench.plugins import EngineBuilder, EnginePlugin
from bench.spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE = "ddp"
"""The engine preset whose losses all others' are compared with."""


class Engine(Protocol):
    """A model ready to train."""

    def train_step(self, micro_batches: "Iterable[dict[str, Tensor]]") -> "Tensor":
        """Make one optimizer step; return its mean loss on this rank as a detached 0-d device tensor, unsynchronised.

        `micro_batches` are `batch.accumulation` dicts of tensors on this rank's device. Each is fetched when it is
        taken: the one behind it is loaded while it is computed with, so none is taken ahead.
        """
        ...

    def gradient_norm(self) -> "Tensor | float | None":
        """Return the last step's global L2 norm before clipping, unsynchronised; None where the engine keeps none."""
        ...

    def skipped_steps(self) -> int:
        """Return how many updates were skipped so far because a gradient was not finite."""
        ...

    def config(self) -> dict[str, Any]:
        """Return what the engine was really given, in plain types, for the record."""
        ...


def load(backend: str) -> EnginePlugin:
    """Return the engine named `backend`, without what builds it; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE, backend)


def load_builder(backend: str) -> EngineBuilder:
    """Return what builds the engine named `backend`; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE_BUILDER, backend)


def facts(spec: RunSpec) -> EngineFacts:
    """Return what the engine of `spec` says of itself; raise UserError if there is none."""
    return load(spec.engine.backend).facts(spec)


def known_facts(spec: RunSpec) -> EngineFacts | None:
    """Return the facts of a spec that was recorded; None if its engine, or an option, is not known here any more."""
    try:
        return facts(spec)
    except (UserError, ValueError):
        return None
