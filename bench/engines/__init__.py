"""Training engines, one folder each. A folder with `facts.py` is an engine; folders without it hold code that several
engines share.

Code that plans runs or reads records imports only an engine's `__init__`, which does not import torch and has the
interface `bench.core.plugins.EnginePlugin`. The module `engine` in the same folder imports torch and builds the object
that trains, an `Engine`. The module has the interface `bench.core.plugins.EngineBuilder`.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from pydantic import BaseModel, ValidationError

from bench.core import plugins
from bench.core.engine_facts import EngineFacts, Layout
from bench.core.errors import UserError
from bench.core.installed_plugins import PluginError, warn_skipped
from bench.core.plugins import EngineBuilder, EnginePlugin
from bench.core.record import TimedPass
from bench.core.spec import Frozen, Parallel, RunSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

LAYOUTS: dict[Layout, str] = {
    "tensor": "tensor parallelism",
    "pipeline": "pipeline parallelism",
    "stages_per_rank": "several stages per rank",
    "sequence": "sequence parallelism",
}
"""Fields of `parallel` in a spec, and their names in error messages."""
REFERENCE = "ddp"
"""Engine preset whose losses are the reference for all other presets."""


class EngineOptions(Frozen):
    """Base class of the options of an engine."""

    @classmethod
    def of(cls, spec: RunSpec) -> Self:
        """Return the engine options of a spec."""
        return cast(Self, _decode_cached(cls, json.dumps(spec.engine.options)))


class Engine(Protocol):
    """Interface of an engine: a model that is ready to train."""

    def train_step(self, micro_batches: "Iterable[dict[str, Tensor]]") -> "Tensor | None":
        """Make one optimizer step. Return the step's mean loss on this rank as a detached 0-d tensor on the device,
        without waiting for the device. Return None on ranks that compute no loss (see `EngineFacts.loss_ranks`).

        `micro_batches` yields `batch.accumulation` dicts of tensors on this rank's device. Ranks that work on the
        same samples (pipeline and tensor parallelism) get the same tensors. Take each micro-batch only when it is
        needed, because the next micro-batch is loaded while the current one is computed. Every rank must take all of
        them; otherwise the run ends as `error`.
        """

    def gradient_norm(self) -> "Tensor | float | None":
        """Return the global L2 norm of the last step's gradients before clipping, without waiting for the device.
        Return None if the engine does not keep it."""

    def skipped_steps(self) -> int:
        """Return the number of optimizer updates skipped so far because a gradient was not finite."""

    def config(self) -> dict[str, Any]:
        """Return the engine's effective configuration as plain types, for the run's record."""


class OptionalMembers(Protocol):
    """Optional methods of an engine. An engine lists the names of those that it defines in its `EngineFacts.members`.
    Methods that are not in this list are never called."""

    def evaluate(self, batches: "Iterable[dict[str, Tensor]]") -> "Tensor | None":
        """Return the mean loss of `batches` on this rank, without training on them. Return None on ranks where
        `train_step` returns None."""

    def predict_tokens(self, tensors: "dict[str, Tensor]") -> "Tensor":
        """Return the most likely next token at each position, (micro, length), without dropout.

        For a decoder-only model, `tensors` are the inputs. For an encoder-decoder model, they also contain `labels`,
        and the token at each position follows from the labels before it. Collective: all ranks make the same number of
        calls."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next optimizer step and all later ones."""

    def save(self, folder: Path, steps: int) -> None:
        """Write a checkpoint with everything that the next step depends on: weights, optimizer state, random state and
        `steps`. `steps` is the number of optimizer steps so far, which is also the position in the data. All ranks can
        access `folder`. Collective."""

    def load(self, folder: Path) -> int:
        """Resume from the checkpoint that `save` wrote, on the same number of ranks, and return its `steps`. The next
        loss is bitwise equal to that of an uninterrupted training. Collective."""

    def list_weights(self, only_trained: bool = False) -> "Iterator[tuple[str, Tensor]]":
        """Yield the name and value of every parameter, whole and in the run's precision, and of every stored buffer
        (`list_buffers`). With `only_trained`, yield only the trained parameters. An engine that partitions weights
        makes one parameter whole at a time, to save memory. Collective."""

    def idle_s(self) -> float:
        """Return the seconds of the last step in which this rank was idle because of the engine's schedule (such as a
        pipeline bubble). The call may wait for the device. Every rank must call it, because it may be collective."""

    def transfer_wait_s(self) -> float:
        """Return the part of the idle seconds (`idle_s`) in which no collective was running, such as a wait for a
        neighbour's send. If the engine cannot separate this part from the time in collectives, return all idle
        seconds."""

    def list_passes(self) -> "list[TimedPass]":
        """Return the forward and backward passes of the last step on this rank with their times, in execution order.
        The call may wait for the device."""

    def step_phases_s(self) -> dict[str, float]:
        """Return the seconds that each part of the last step took on this rank, by the name of the part (such as
        forward or backward). The call may wait for the device."""


def trained(module: "Module") -> "list[Parameter]":
    """Return the parameters that are trained (`requires_grad`). Other parameters have no optimizer state and are
    counted separately."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def list_parameters(module: "Module", only_trained: bool) -> "Iterator[tuple[str, Parameter]]":
    """Yield the parameters of a model by name, or only its trained parameters."""
    return (pair for pair in module.named_parameters() if pair[1].requires_grad or not only_trained)


def list_buffers(module: "Module") -> "Iterator[tuple[str, Tensor]]":
    """Yield the buffers of a model that are stored with its parameters, by name."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def check_members(engine: object, spec: RunSpec) -> None:
    """Raise UserError if the engine that was built for `spec` lacks a method of `Engine`, or a method that its `facts`
    declare."""
    required = sorted(name for name in vars(Engine) if not name.startswith("_"))
    if missing := [name for name in required if not hasattr(engine, name)]:
        rule = f"build returned {type(engine).__name__}, which does not define {', '.join(missing)}"
        raise UserError(f"engine.backend={spec.engine.backend}", rule, "see Engine in bench/engines/__init__.py")
    if missing := sorted(name for name in facts(spec).members if not hasattr(engine, name)):
        rule = f"facts.py lists {', '.join(missing)}, but {type(engine).__name__} does not define it"
        raise UserError(f"engine.backend={spec.engine.backend}", rule, "define it, or remove it from facts.members")


def load(backend: str) -> EnginePlugin:
    """Return the plug-in of the engine `backend`: its options, checks and facts, but not the code that needs torch.
    Raise UserError if no engine has this name."""
    return plugins.load(plugins.ENGINE, backend)


def load_builder(backend: str) -> EngineBuilder:
    """Return the module that builds the engine `backend`, which imports torch. Raise UserError if no engine has this
    name."""
    return plugins.load(plugins.ENGINE_BUILDER, backend)


@functools.lru_cache(maxsize=1024)  # configurations of a sweep share options, and decoding takes as long as predicting
def _decode_cached(kind: type[BaseModel], plain: str) -> BaseModel:
    return kind.model_validate_json(plain)


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts about the engine that the spec names: what it supports, and functions that predict its costs.
    Raise UserError if there is no engine of that name."""
    return load(spec.engine.backend).facts(spec)


def check_decay_rates(spec: RunSpec) -> None:
    """Raise UserError if a decay rate of the optimizer's moments is below 0, or 1 or more. Reading a spec does not
    check decay rates, because records of failed runs may contain an invalid rate."""
    for place, rate in enumerate(spec.optimizer.betas):
        if not 0 <= rate < 1:
            value = f"optimizer.betas={list(spec.optimizer.betas)}"
            raise UserError(value, "a decay rate must be at least 0 and below 1", f"change number {place + 1}")


def check_layout(spec: RunSpec) -> None:
    """Raise UserError if the spec uses a kind of parallelism that its engine does not support."""
    usual = Parallel()
    other = [name for name in LAYOUTS if getattr(spec.parallel, name) != getattr(usual, name)]
    known = facts(spec).layouts if other else ()
    for name in (name for name in other if name not in known):
        value = f"parallel.{name}={str(getattr(spec.parallel, name)).lower()}"
        rule = f"engine {spec.engine.name} does not support {LAYOUTS[name]}"
        raise UserError(value, rule, "remove it, or choose another engine")


def check_adapter(spec: RunSpec) -> None:
    """Raise UserError if the spec has adapters or frozen parameters that its engine does not support, or if
    `adapter.frozen` is not a regular expression."""
    adapter = spec.adapter
    try:
        re.compile(adapter.frozen)
    except re.error as error:
        value, rule = f"adapter.frozen={adapter.frozen}", f"not a regular expression ({error})"
        raise UserError(value, rule, "write for example adapter.frozen='^encoder'") from error
    if adapter.rank is None and not adapter.frozen:
        return
    frozen = facts(spec).frozen
    value = f"adapter.frozen={adapter.frozen}" if adapter.rank is None else f"adapter={adapter.name}"
    if not frozen.forms:
        rule = f"engine {spec.engine.name} does not support frozen weights, because {frozen.why}"
        raise UserError(value, rule, "choose engine=ddp, zero0 to zero3, or fsdp")
    if adapter.quantization not in frozen.forms:
        rule = f"engine {spec.engine.name} does not support this format of frozen weights, because {frozen.why}"
        remedy = "choose engine=ddp or zero2, or adapter.quantization=none"
        raise UserError(f"adapter.quantization={adapter.quantization}", rule, remedy)


def find_facts(spec: RunSpec) -> EngineFacts | None:
    """Return the facts about the engine of a recorded spec; None if the engine or one of its options no longer
    exists. For a broken engine of another package, log a warning and return None."""
    try:
        return facts(spec)
    except PluginError as error:
        if not isinstance(error.__cause__, ValidationError):  # an option that no longer exists
            warn_skipped(error.value, str(error))
    except (UserError, ValueError):
        pass
    return None
