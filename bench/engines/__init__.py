"""Training engines: a folder each, which holds `facts.py`. Folders without it hold code that engines share.

Planning and reading import a folder's `__init__`, without torch (`bench.core.plugins.EnginePlugin`). Its module
`engine` builds an `Engine` (`bench.core.plugins.EngineBuilder`).
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pydantic import BaseModel

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
"""Engine preset with whose losses those of every other preset are compared."""
AnyOptions = TypeVar("AnyOptions", bound=BaseModel)


class Engine(Protocol):
    """A model ready to train."""

    def train_step(self, micro_batches: "Iterable[dict[str, Tensor]]") -> "Tensor | None":
        """Make one optimizer step; return its mean loss on this rank as a detached 0-d device tensor, unsynchronised.
        None on a rank without a loss: the engine's facts list the ranks with one (`EngineFacts.loss_ranks`).

        `micro_batches` are `batch.accumulation` dicts of tensors on this rank's device, the same on all ranks of one
        data-parallel rank. Take each only when it is needed: the next one is loaded while this one is computed.
        """
        ...

    def gradient_norm(self) -> "Tensor | float | None":
        """Return the last step's global L2 norm before clipping, unsynchronised; None if the engine keeps none."""
        ...

    def skipped_steps(self) -> int:
        """Return the number of updates that were skipped so far because a gradient was not finite."""
        ...

    def config(self) -> dict[str, Any]:
        """Return the engine's effective configuration, in plain types, for the record."""
        ...


class OptionalMembers(Protocol):
    """Optional abilities of an engine. Its facts announce each of these that it has (`EngineFacts.members`); members
    that are not announced are not called."""

    def evaluate(self, batches: "Iterable[dict[str, Tensor]]") -> "Tensor | None":
        """Return the mean loss of `batches` on this rank, without learning from them; None where `train_step` has no
        loss."""
        ...

    def set_learning_rate(self, rate: float) -> None:
        """Use another learning rate, from the next optimizer step on."""
        ...

    def save(self, folder: Path, steps: int) -> None:
        """Write everything that the next step depends on: weights, the optimizer's state, random state, and `steps`,
        the optimizer steps so far, which are the position in the data. All ranks see `folder`. Collective."""
        ...

    def load(self, folder: Path) -> int:
        """Resume from the checkpoint of `save`, on the same number of ranks, and return its `steps`. The next loss
        equals, to the bit, the loss of the uninterrupted training. Collective."""
        ...

    def idle_s(self) -> float:
        """Return the seconds of the last step in which this rank waited for its turn in the engine's schedule. It may
        wait for the device. Every rank calls it, and it may be collective."""
        ...

    def transfer_wait_s(self) -> float:
        """Return the part of `idle_s` outside collectives, such as waiting for a neighbour's send; all of it if the
        engine does not distinguish them."""
        ...

    def list_passes(self) -> "list[TimedPass]":
        """Return the passes of the last step on this rank, in their order. It may wait for the device."""
        ...

    def step_phases_s(self) -> dict[str, float]:
        """Return the seconds of the last step on this rank by phase: forward, backward … It may wait for the device."""
        ...


def trained(module: "Module") -> "list[Parameter]":
    """Return the trained parameters. The others get no optimizer and are counted apart."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def check_members(engine: object, spec: RunSpec) -> None:
    """Raise UserError if the engine that was built for `spec` lacks a member that its facts announce."""
    if missing := sorted(name for name in facts(spec).members if not hasattr(engine, name)):
        rule = f"its facts announce {', '.join(missing)}, and {type(engine).__name__} has none"
        raise UserError(f"engine.backend={spec.engine.backend}", rule, "define it, or leave it out of facts.members")


def load(backend: str) -> EnginePlugin:
    """Return the engine named `backend`, without its builder; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE, backend)


def load_builder(backend: str) -> EngineBuilder:
    """Return the builder of the engine named `backend`; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE_BUILDER, backend)


def decode_options(kind: type[AnyOptions], spec: RunSpec) -> AnyOptions:
    """Return the options, of the engine's class `kind`, that a spec holds as plain data."""
    return cast(AnyOptions, _decode_cached(kind, json.dumps(spec.engine.options)))


@functools.lru_cache(maxsize=1024)  # points of a sweep share them, and decoding costs as much as predicting
def _decode_cached(kind: type[BaseModel], plain: str) -> BaseModel:
    return kind.model_validate_json(plain)


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts of the spec's engine; raise UserError if there is no such engine."""
    return load(spec.engine.backend).facts(spec)


def check_layout(spec: RunSpec) -> None:
    """Raise UserError for a layout of ranks that is not among the layouts of the spec's engine."""
    usual = Parallel()
    other = [name for name in LAYOUTS if getattr(spec.parallel, name) != getattr(usual, name)]
    known = facts(spec).layouts if other else ()
    for name in (name for name in other if name not in known):
        value = f"parallel.{name}={str(getattr(spec.parallel, name)).lower()}"
        rule = f"engine {spec.engine.name} has no {LAYOUTS[name]}"
        raise UserError(value, rule, "leave it out, or choose another engine")


def find_facts(spec: RunSpec) -> EngineFacts | None:
    """Return the facts of a recorded spec; None if its engine or one of its options no longer exists."""
    try:
        return facts(spec)
    except (UserError, ValueError):
        return None
