"""Everything that can be added, by kind: its Protocol, and how it is found by the name that a config gives it.

A plug-in is a file or a folder in the package of its kind, under that name; or a module that an installed package
declares as an entry point of the group `zeroscale.<kind>`. Nothing is registered, and nothing is imported before it is
asked for.
"""

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel

from bench.errors import UserError, nearest
from bench.spec import RunSpec
from bench.stacks import Stacks

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

Plugin = TypeVar("Plugin")
GROUP = "zeroscale"
"""Entry points of the kind `engine` are declared in the group `zeroscale.engine`."""


@dataclass(frozen=True)
class Kind(Generic[Plugin]):
    """One kind of plug-in."""

    name: str  # in the singular; of its entry points
    package: str  # where those that ship lie
    key: str  # the key of the config that names one
    protocol: type[object]  # what each of them defines
    marker: str | None = None  # a folder is a plug-in if it holds this module; None: every folder is


@dataclass(frozen=True)
class Part(Generic[Plugin]):
    """A module in the folder of a plug-in, imported only where it is needed."""

    name: str  # of its file
    protocol: type[object]  # what it defines


def names(kind: Kind[Any]) -> list[str]:
    """Return the names of all plug-ins of a kind, those of installed packages included, sorted."""
    return sorted({*_shipped(kind), *_installed(kind.name)})


def load(kind: Kind[Plugin], name: str) -> Plugin:
    """Return the plug-in of this name; UserError if there is none, or if it lacks something."""
    return cast(Plugin, _complete(kind, name))


def load_part(kind: Kind[Any], name: str, part: Part[Plugin]) -> Plugin:
    """Return a part of the plug-in of this name; UserError if there is no such plug-in, or if it or the part lacks
    something."""
    return cast(Plugin, _complete_part(kind, name, part))


@functools.cache  # readers of many records ask for the same one again and again
def _complete(kind: Kind[Any], name: str) -> ModuleType:
    """Import a plug-in and see that it defines what its kind does."""
    return _checked(_module(kind, name), kind.protocol, f"{kind.key}={name}", f"a {kind.name}")


@functools.cache
def _complete_part(kind: Kind[Any], name: str, part: Part[Any]) -> ModuleType:
    """Import a part of a plug-in and see that it defines what its kind does."""
    plugin = _complete(kind, name)
    path, value, whole = f"{plugin.__name__}.{part.name}", f"{kind.key}={name}", f"{part.name}.py of a {kind.name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        rule = f"there is no {path}"
        raise UserError(value, rule, f"{whole} defines {', '.join(_members(part.protocol))}") from error
    return _checked(module, part.protocol, value, whole)


def _checked(module: ModuleType, protocol: type[object], value: str, kind: str) -> ModuleType:
    """Return a module that defines the members of a Protocol; UserError if it lacks one."""
    members = _members(protocol)
    if missing := [member for member in members if not hasattr(module, member)]:
        rule = f"{module.__name__} does not define {', '.join(missing)}"
        raise UserError(value, rule, f"{kind} defines {', '.join(members)}")
    return module


def _members(protocol: type[object]) -> list[str]:
    """Return the names that a Protocol asks for."""
    own = [name for name in vars(protocol) if not name.startswith("_")]
    return sorted({*getattr(protocol, "__annotations__", {}), *own})


def _module(kind: Kind[Any], name: str) -> ModuleType:
    """Import a plug-in."""
    entry = _installed(kind.name).get(name)
    if name in _shipped(kind):
        if entry:
            rule = f"both {kind.package} and {entry.value} are called so"
            raise UserError(f"{kind.key}={name}", rule, "give the one that was installed another name")
        return importlib.import_module(f"{kind.package}.{name}")
    if not entry:
        raise UserError(
            f"{kind.key}={name}", f"no such file in {kind.package.replace('.', '/')}", nearest(name, names(kind))
        )
    try:
        return importlib.import_module(entry.module)
    except Exception as error:  # an installed package may be broken in any way
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        rule = f"{entry.module} cannot be imported ({why})"
        raise UserError(f"{kind.key}={name}", rule, f"repair or remove the package {_distribution(entry)}") from error


@functools.cache
def _shipped(kind: Kind[Any]) -> frozenset[str]:
    """Return the names in the package of a kind: of its files, and of its folders as far as they are plug-ins."""
    places = list(importlib.import_module(kind.package).__path__)
    found = pkgutil.iter_modules(places)
    return frozenset(module.name for module in found if not module.ispkg or _is_marked(kind, places, module.name))


def _is_marked(kind: Kind[Any], places: list[str], folder: str) -> bool:
    """Whether a folder holds the marker of its kind; nothing is imported to find that out."""
    inside = pkgutil.iter_modules([f"{place}/{folder}" for place in places])
    return kind.marker is None or kind.marker in {module.name for module in inside}


@functools.cache
def _installed(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return what installed packages declare of a kind, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=f"{GROUP}.{kind}")}


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module


class EnginePlugin(Protocol):
    """A training engine: a folder of bench/engines with `facts.py`."""

    Options: type[BaseModel]
    """What a user may set in conf/engine; imports no torch."""

    def check(self, options: Any, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
        """Raise UserError for what this engine cannot do. `device` is None where nobody knows it yet: rules about the
        device are then left to a later check."""

    def construction(self, spec: RunSpec) -> AbstractContextManager[Any]:
        """Return the context in which the model is built: on this rank's device, in the run's precision, partitioned
        where the engine does so. Model classes must have been imported before."""
        ...

    def whole(self, parameters: "Sequence[Parameter]") -> AbstractContextManager[Any]:
        """Return a context in which `parameters` are whole on every rank; rank 0's changes to them stay. Collective."""
        ...

    def parameter_count(self, module: "Module") -> int:
        """Return the elements of all parameters, those shared counted once, partitions of other ranks included."""
        ...

    def build(self, module: "Module", spec: RunSpec) -> Any:
        """Return an `Engine` that trains `module`, which is initialised. The process group exists."""
        ...


class FamilyPlugin(Protocol):
    """A model family: a folder of bench/models with `shape.py`. Its `build.py` is a `FamilyBuilder`."""

    Shape: type[BaseModel]
    """The sizes that decide an architecture; frozen, imports no torch."""

    def from_hugging_face(self, config: dict[str, Any]) -> Any:
        """Return a Shape from the content of a Hugging Face config.json; UserError for what is not of this family."""
        ...

    def vocabulary(self, shape: Any) -> int:
        """Return the number of tokens that the model knows."""
        ...

    def stacks(self, shape: Any) -> Stacks | None:
        """Return the network; None: it is not described, and nothing is predicted of this model."""
        ...


class FamilyBuilder(Protocol):
    """What builds a family's models: `build.py` in its folder, imported only where a model is built."""

    def build(self, spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> "Module":
        """Return the uninitialised module, built inside `construction`. Model classes are imported together with this
        file: under deepspeed.zero.Init an import of one raises."""
        ...

    def initialise(self, module: "Module", spec: RunSpec, whole: "Whole" = ...) -> None:
        """Set every weight from (spec.seed, name), the same on every rank; `whole` is the engine's."""


class DataPlugin(Protocol):
    """A data source: a file of bench/data.

    Sample i of the global stream depends on (seed, i) alone: the same global batch holds the same samples whatever the
    engine, the number of ranks and the accumulation.
    """

    Options: type[BaseModel]
    """What a user may set in conf/data; imports no torch."""

    def check(self, options: Any, spec: RunSpec) -> None:
        """Raise UserError for what this source cannot give."""

    def micro_batches(self, spec: RunSpec, rank: int) -> Iterator[Any]:
        """Return an endless iterator of `MicroBatch` on the host, through torch's DataLoader."""
        ...

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return plain facts for the record: hash of the corpus, tokenizer …"""
        ...


class LauncherPlugin(Protocol):
    """A launcher: a file or folder of bench/launchers."""

    QUEUES: bool
    """Whether somebody else starts the work, later; else it starts at once and is waited for."""

    Options: type[BaseModel]
    """What a user may set in conf/launcher."""

    def check(self, options: Any, spec: RunSpec) -> None:
        """Raise UserError for what this launcher cannot start."""

    def plan(self, work: Any, options: Any) -> Any:
        """Return a LaunchPlan. It has no effect, so that printing it is the dry run."""
        ...

    def submit(self, launch: Any) -> Any:
        """Start or submit what was planned, the one effect; return a handle."""
        ...

    def poll(self, handle: Any) -> Any:
        """Return how the work behind a handle is."""
        ...

    def cancel(self, handle: Any) -> None:
        """Ask the work behind a handle to end."""


class QueueingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher whose work somebody else starts."""

    def ask(self, names: Any) -> Any:
        """Return the state of all jobs of these names and of their tasks, asked for once."""
        ...

    def cancel_all(self, handles: Any) -> None:
        """Ask the work behind many handles to end."""

    def limits(self, options: Any) -> Any:
        """Return what the cluster takes: sizes of arrays, jobs in the queue, minutes."""
        ...


Whole = Callable[[Sequence["Parameter"]], AbstractContextManager[Any]]

ENGINE: Kind[EnginePlugin] = Kind("engine", "bench.engines", "engine.backend", EnginePlugin, "facts")
FAMILY: Kind[FamilyPlugin] = Kind("family", "bench.models", "model.family", FamilyPlugin, "shape")
DATA: Kind[DataPlugin] = Kind("data", "bench.data", "data.source", DataPlugin, "source")
BUILDER: Part[FamilyBuilder] = Part("build", FamilyBuilder)
LAUNCHER: Kind[LauncherPlugin] = Kind("launcher", "bench.launchers", "launcher.name", LauncherPlugin)
