"""Training engines: a folder each, which holds `facts.py`. Folders without are what engines share.

Planning and reading import its `__init__`, without torch (`bench.core.plugins.EnginePlugin`). Its module `engine`
builds an `Engine` (`bench.core.plugins.EngineBuilder`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.core import plugins
from bench.core.engine_facts import EngineFacts, Layout
from bench.core.errors import UserError
from bench.core.plugins import EngineBuilder, EnginePlugin
from bench.core.record import TimedPass
from bench.core.spec import Parallel, RunSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

LAYOUTS: dict[Layout, str] = {
    "tensor": "tensor parallelism",
    "pipeline": "pipeline",
    "stages_per_rank": "stages of layers",
    "sequence": "sequence parallelism",
}
"""Fields of a spec's `parallel` in words."""
REFERENCE = "ddp"
"""The engine preset whose losses all others' are compared with."""


class Engine(Protocol):
    """A model ready to train."""

    def train_step(self, micro_batches: "Iterable[dict[str, Tensor]]") -> "Tensor | None":
        """Make one optimizer step; return its mean loss on this rank as a detached 0-d device tensor, unsynchronised.
        None on a rank that has no loss: the engine's facts say which ranks have one (`EngineFacts.loss_ranks`).

        `micro_batches` are `batch.accumulation` dicts of tensors on this rank's device, the same on all ranks of one
        data-parallel rank. Each is fetched when it is taken: the one behind it is loaded while it is computed with, so
        none is taken ahead.
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


class OptionalMembers(Protocol):
    """What an engine need not be able to do. Its facts announce each of these that it has (`EngineFacts.members`); what
    is not announced is not asked for."""

    def evaluate(self, batches: "Iterable[dict[str, Tensor]]") -> "Tensor | None":
        """Return the mean loss of `batches` on this rank and learn nothing from them; None where `train_step` has no
        loss."""
        ...

    def set_learning_rate(self, rate: float) -> None:
        """Make the next optimizer step, and those behind it, with another learning rate."""
        ...

    def save(self, folder: Path, steps: int) -> None:
        """Write all that the next step depends on: weights, the optimizer's state, random state, and `steps`, the
        optimizer steps so far, which are the position in the data. All ranks see `folder`. Collective."""
        ...

    def load(self, folder: Path) -> int:
        """Take up what `save` wrote, on as many ranks, and return its `steps`: the next loss is to the bit the one that
        would have followed. Collective."""
        ...

    def idle_s(self) -> float:
        """Return the seconds of the last step in which this rank waited for its turn in the engine's schedule. It may
        wait for the device. Every rank calls it, and it may be collective."""
        ...

    def transfer_wait_s(self) -> float:
        """Return how many of `idle_s` were in no collective, as waiting for what a neighbour sends; all of them where
        an engine does not tell."""
        ...

    def list_passes(self) -> "list[TimedPass]":
        """Return the passes of the last step on this rank, in their order. It may wait for the device."""
        ...

    def step_phases_s(self) -> dict[str, float]:
        """Return the seconds of the last step on this rank by phase: forward, backward … It may wait for the device."""
        ...


def trained(module: "Module") -> "list[Parameter]":
    """Return the parameters that are trained: the others go to no optimizer, and are counted apart."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def check_members(engine: object, spec: RunSpec) -> None:
    """Raise UserError if the engine that was built for `spec` lacks a member that its facts announce."""
    if missing := sorted(name for name in facts(spec).members if not hasattr(engine, name)):
        rule = f"its facts announce {', '.join(missing)}, and {type(engine).__name__} has none"
        raise UserError(f"engine.backend={spec.engine.backend}", rule, "write it, or leave it out of facts.members")


def load(backend: str) -> EnginePlugin:
    """Return the engine named `backend`, without what builds it; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE, backend)


def load_builder(backend: str) -> EngineBuilder:
    """Return what builds the engine named `backend`; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE_BUILDER, backend)


def facts(spec: RunSpec) -> EngineFacts:
    """Return what the engine of `spec` says of itself; raise UserError if there is none."""
    return load(spec.engine.backend).facts(spec)


def check_layout(spec: RunSpec) -> None:
    """Raise UserError for a layout of ranks that the engine of `spec` does not say it can do."""
    usual = Parallel()
    other = [name for name in LAYOUTS if getattr(spec.parallel, name) != getattr(usual, name)]
    known = facts(spec).layouts if other else ()
    for name in other:
        if name not in known:
            value = str(getattr(spec.parallel, name)).lower()
            rule = f"engine {spec.engine.name} has no {LAYOUTS[name]}"
            raise UserError(f"parallel.{name}={value}", rule, "leave it out, or choose another engine")


def find_facts(spec: RunSpec) -> EngineFacts | None:
    """Return the facts of a spec that was recorded; None if its engine, or an option, is not known here any more."""
    try:
        return facts(spec)
    except (UserError, ValueError):
        return None
