"""Everything that can be added, by kind: its Protocol, and how it is found by the name that a config gives it.

A plug-in is a file or a folder in the package of its kind, under that name; or a module that an installed package
declares as an entry point of the group `zeroscale.<kind>`. Nothing is registered, and nothing is imported before it is
asked for.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel

from bench.core.engine_facts import EngineFacts
from bench.core.errors import UserError, suggest_nearest
from bench.core.network import Part, Stacks, TokenKind
from bench.core.record import Limits
from bench.core.scheduling import ClusterLimits, JobContext, JobSetup, JobState, LaunchPlan, SchedulingOptions, Work
from bench.core.spec import RunSpec

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

    from bench.engines.distributed.slices import TensorRanks

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
    part: str | None = None  # the module of the plug-in that defines the members; None: the plug-in itself

    @property
    def members(self) -> list[str]:
        """The names that a plug-in has to define."""
        own = {name for base in self.protocol.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
        return sorted(name for name in own if not name.startswith("_"))


def list_names(kind: Kind[Any]) -> list[str]:
    """Return the names of all plug-ins of a kind, those of installed packages included, sorted."""
    return sorted({*_list_shipped(kind), *_list_installed(kind.name)})


def load(kind: Kind[Plugin], name: str) -> Plugin:
    """Return the plug-in of this name; UserError if there is none, or if it lacks something."""
    return cast(Plugin, _import_complete(kind, name))


def list_usable(kind: Kind[Plugin]) -> Iterator[tuple[str, Plugin]]:
    """Yield every plug-in of a kind by name. One that cannot be used is left out: nobody asked for it by its name."""
    for name in list_names(kind):
        with contextlib.suppress(UserError):
            yield name, load(kind, name)


@functools.cache  # readers of many records ask for the same one again and again
def _import_complete(kind: Kind[Any], name: str) -> ModuleType:
    """Import a plug-in, or the part of it that is asked for, and see that it defines what its kind does."""
    module = _import_module(kind, name)
    if missing := [member for member in kind.members if not hasattr(module, member)]:
        rule = f"{module.__name__} does not define {', '.join(missing)}"
        raise UserError(f"{kind.key}={name}", rule, f"see {kind.protocol.__name__} in bench/core/plugins.py")
    return module


def _import_module(kind: Kind[Any], name: str) -> ModuleType:
    """Import a plug-in, or its part."""
    entry, part = _list_installed(kind.name).get(name), f".{kind.part}" if kind.part else ""
    if name in _list_shipped(kind):
        if entry:
            rule = f"both {kind.package} and {entry.value} are called so"
            raise UserError(f"{kind.key}={name}", rule, "give the one that was installed another name")
        path, remedy = f"{kind.package}.{name}{part}", f"repair or remove {kind.package.replace('.', '/')}/{name}"
    elif entry:
        path, remedy = entry.module + part, f"repair or remove the package {_format_distribution(entry)}"
    else:
        rule = f"no such file in {kind.package.replace('.', '/')}"
        raise UserError(f"{kind.key}={name}", rule, suggest_nearest(name, list_names(kind)))
    try:
        return importlib.import_module(path)
    except Exception as error:  # what somebody added may be broken in any way
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{kind.key}={name}", f"{path} cannot be imported ({why})", remedy) from error


@functools.cache
def _list_shipped(kind: Kind[Any]) -> frozenset[str]:
    """Return the names in the package of a kind: of its files, and of its folders as far as they are plug-ins."""
    places = list(importlib.import_module(kind.package).__path__)
    found = pkgutil.iter_modules(places)
    return frozenset(module.name for module in found if not module.ispkg or _is_marked(kind, places, module.name))


def _is_marked(kind: Kind[Any], places: list[str], folder: str) -> bool:
    """Whether a folder holds the marker of its kind; nothing is imported to find that out."""
    inside = pkgutil.iter_modules([f"{place}/{folder}" for place in places])
    return kind.marker is None or kind.marker in {module.name for module in inside}


@functools.cache
def _list_installed(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return what installed packages declare of a kind, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=f"{GROUP}.{kind}")}


def list_installed_files(kind: Kind[Any]) -> list[Path]:
    """Return the Python files of the packages that declare plug-ins of a kind, sorted; nothing is imported for it."""
    roots = {entry.module.partition(".")[0] for entry in _list_installed(kind.name).values()}
    found: set[Path] = set()
    for spec in filter(None, map(importlib.util.find_spec, roots)):
        for folder in spec.submodule_search_locations or ():
            found.update(Path(folder).rglob("*.py"))
        if spec.origin and spec.submodule_search_locations is None:
            found.add(Path(spec.origin))
    return sorted(found)


def _format_distribution(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module


class EnginePlugin(Protocol):
    """A training engine: a folder of bench/engines with `facts.py`. What its `__init__` shows imports no torch.

    `FITTED_TO_MODEL`, a tuple of option names, is optional. A preset's value of such an option is lowered to the number
    of the model's parameters where a study or user does not set it (`bench.config.decode.fit_engine`).
    """

    Options: type[BaseModel]
    """What a user may set in conf/engine."""

    def check(self, options: Any, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
        """Raise UserError for what this engine cannot do. `device` is None where nobody knows it yet: rules about the
        device are then left to a later check."""

    def facts(self, spec: RunSpec) -> EngineFacts:
        """Return what holds of this engine for a spec that it can do."""
        ...


class EngineBuilder(Protocol):
    """What builds an engine: the module `engine` in its folder, which may import torch."""

    def construction(self, spec: RunSpec) -> AbstractContextManager[Any]:
        """Return the context in which the model is built: on this rank's device, in the run's precision, partitioned
        where the engine does so. Model classes must have been imported before."""
        ...

    def whole(self, parameters: "Sequence[Parameter]") -> AbstractContextManager[Any]:
        """Return a context in which `parameters` of a module that is not yet built into its engine are whole on every
        rank; rank 0's changes to them stay. Collective."""
        ...

    def parameter_count(self, parameters: "Iterable[Parameter]") -> int:
        """Return the elements of all `parameters`, partitions of other ranks included."""
        ...

    def build(self, module: "Module", spec: RunSpec) -> Any:
        """Return an `Engine` that trains `module`, which is initialised: those of its parameters that ask for a
        gradient. The process group exists."""
        ...


class FamilyPlugin(Protocol):
    """A model family: a folder of bench/models with `shape.py`. Its `build.py` is a `FamilyBuilder`."""

    Shape: type[BaseModel]
    """The sizes that decide an architecture; frozen, imports no torch."""

    MODEL_TYPES: tuple[str, ...]
    """The `model_type` of Hugging Face configs that are of this family; empty for none."""

    def from_hugging_face(self, config: dict[str, Any]) -> Any:
        """Return a Shape from the content of a Hugging Face config.json; UserError for what is not of this family."""
        ...

    def check(self, shape: Any, spec: RunSpec) -> None:
        """Raise UserError for what a model of this shape cannot do, such as a kernel or more tokens than positions."""

    def token_kinds(self, shape: Any) -> tuple[str, ...]:
        """Return the kinds of tokens that a sample holds for such a model, in order: it learns any objective that has
        just these."""
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


class DividedFamilyBuilder(FamilyBuilder, Protocol):
    """A family whose models can be built in parts, for a pipeline."""

    def build_part(
        self,
        spec: RunSpec,
        part: Part,
        construction: AbstractContextManager[Any] | None = None,
        among: "TensorRanks | None" = None,
    ) -> "Module":
        """Return a part of the uninitialised module, its parameters under the names that they have in the whole.
        `among` are the ranks that share each matrix with this one, which then keeps its slices alone.

        Its forward takes the states of the part before, one tensor for each stack (the first part takes none), and a
        micro-batch by name. It returns a tuple of those states; the last part the loss, 0-d.
        """
        ...

    def find_shared(self, spec: RunSpec, parts: "Sequence[Part]") -> dict[str, list[int]]:
        """Return by name the parameters that several of all the model's `parts` have, and which parts these are."""
        ...


class ObjectivePlugin(Protocol):
    """An objective: a file of bench/objectives."""

    KINDS: tuple[TokenKind, ...]
    """The tokens of a sample by kind, in the order in which lengths and padding are written down."""

    REDUCTION: Literal["mean", "sum"]
    """How the losses of a micro-batch's target tokens become one number."""


class DataPlugin(Protocol):
    """A data source: a file of bench/data.

    Sample i of the global stream depends on (seed, i) alone: the same global batch holds the same samples whatever the
    engine, the number of ranks and the accumulation.
    """

    Options: type[BaseModel]
    """What a user may set in conf/data; imports no torch."""

    def check(self, options: Any, spec: RunSpec) -> None:
        """Raise UserError for what this source cannot give."""

    def micro_batches(self, spec: RunSpec, data_rank: int) -> Iterator[Any]:
        """Return the endless `MicroBatch`es of a data-parallel rank, on the host, through torch's DataLoader."""
        ...

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return plain facts for the record: hash of the corpus, tokenizer …"""
        ...


class HeldOutDataPlugin(DataPlugin, Protocol):
    """A data source that a model can be trained on to an end: it holds a part back to evaluate on."""

    def micro_batches(self, spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[Any]:
        """Return the `MicroBatch`es from number `first` on, where a checkpoint goes on; none holds what is held out."""
        ...

    def held_out_batches(self, spec: RunSpec, data_rank: int) -> list[Any]:
        """Return a data-parallel rank's `MicroBatch`es of the first `learning.evaluation_samples` held-out samples: the
        same samples whatever the seed of the run and the number of ranks."""
        ...


class LauncherPlugin(Protocol):
    """A launcher: a file or folder of bench/launchers. It is a `StartingLauncherPlugin` or, where it `QUEUES`, a
    `QueueingLauncherPlugin`.

    Options are always an instance of the launcher's own `Options`.
    """

    QUEUES: bool
    """Whether somebody else starts the work, later; else it starts at once and is waited for."""

    Options: type[Limits]
    """What a user may set in conf/launcher."""

    def check(self, options: Limits, spec: RunSpec) -> None:
        """Raise UserError for what this launcher cannot start."""

    def plan(self, work: Work, options: Limits) -> LaunchPlan:
        """Return how `work` starts. It has no effect, so that printing it is the dry run."""
        ...


class StartingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher that starts work at once, as a process of this machine (which may start others elsewhere)."""

    def submit(self, launch: LaunchPlan) -> Popen[bytes]:
        """Start what was planned, the one effect."""
        ...

    def poll(self, handle: Popen[bytes]) -> bool:
        """Return whether the work has ended."""
        ...

    def cancel(self, handle: Popen[bytes]) -> None:
        """Ask the work to end; it leaves a record `cancelled`."""


class QueueingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher whose work a scheduler starts, on nodes that see the study's folder (`Work`).

    Whatever the scheduler calls its jobs, states and variables stays in here. A scheduler that does not answer is
    SchedulerAway, which says nothing about its jobs; one that refuses is a UserError with its own words.
    """

    ARRAYS: bool
    """Whether a job may have tasks (`Work.tasks`); else `mode=array` is refused."""

    Options: type[SchedulingOptions]
    """Those of SchedulingOptions and the site's own."""

    def submit(self, launch: LaunchPlan) -> str:
        """Write the files of a plan and submit it, the one effect; return the handle that the scheduler knows it by."""
        ...

    def ask(self, names: Collection[str]) -> Mapping[tuple[str, int | None], JobState]:
        """Return the state of every job of these names by name and task (None: of a job without tasks), asked for at
        once; a name that is missing is one that the scheduler answers it does not know."""
        ...

    def find_log(self, folder: Path, handle: str, task: int | None) -> Path:
        """Return the file that gets what a job in this folder prints, or a task of it; it may not be there yet."""
        ...

    def cancel_all(self, handles: Iterable[str]) -> None:
        """Ask whole jobs to end, those that have ended meanwhile excepted."""

    def limits(self, options: SchedulingOptions) -> ClusterLimits:
        """Return what the cluster takes; no limits on a machine that is none of the cluster's, where a sweep can still
        be planned."""
        ...

    def job_setup(self, options: SchedulingOptions) -> JobSetup:
        """Return what a job's command runs in, for who prepares it."""
        ...

    def context(self, environment: Mapping[str, str]) -> JobContext | None:
        """Return where in one of the scheduler's jobs a process with this environment is; None where in none."""
        ...

    def spread(self, command: Sequence[str], nodes: int) -> list[str]:
        """Return what runs a command once on every one of the `nodes` of the job around this process; UserError where
        that cannot be."""
        ...


class MetricPlugin(Protocol):
    """Quantities derived from one record: a file of analysis/metrics."""

    METRICS: Sequence[Any]
    """Of `analysis.metrics.Metric`: its column, a few words, its unit, which way is better ("more", "less", "neither"),
    and a function of the record that returns None where the record does not say it."""


class FigurePlugin(Protocol):
    """A figure of a report: a file of analysis/figures."""

    TITLE: str
    PLACE: int
    """Position among the figures; those of one place follow each other by name."""

    ALT: str
    """What the figure shows, in words, for readers who cannot see it."""

    def picture(self, results: Any) -> Any:
        """Return an `analysis.drawing.Picture` of `analysis.results.Results`; without a panel where there is nothing to
        show, such as no second node count."""
        ...


Whole = Callable[[Sequence["Parameter"]], AbstractContextManager[Any]]

_ENGINE = "engine", "bench.engines", "engine.backend"
ENGINE: Kind[EnginePlugin] = Kind(*_ENGINE, EnginePlugin, "facts")
ENGINE_BUILDER: Kind[EngineBuilder] = Kind(*_ENGINE, EngineBuilder, "facts", "engine")
_FAMILY = "family", "bench.models", "model.family"
FAMILY: Kind[FamilyPlugin] = Kind(*_FAMILY, FamilyPlugin, "shape")
FAMILY_BUILDER: Kind[FamilyBuilder] = Kind(*_FAMILY, FamilyBuilder, "shape", "build")
DIVIDED_FAMILY_BUILDER: Kind[DividedFamilyBuilder] = Kind(*_FAMILY, DividedFamilyBuilder, "shape", "build")
OBJECTIVE: Kind[ObjectivePlugin] = Kind("objective", "bench.objectives", "objective.name", ObjectivePlugin)
DATA: Kind[DataPlugin] = Kind("data", "bench.data", "data.source", DataPlugin, "source")
HELD_OUT_DATA: Kind[HeldOutDataPlugin] = Kind("data", "bench.data", "data.source", HeldOutDataPlugin, "source")
METRIC: Kind[MetricPlugin] = Kind("metric", "analysis.metrics", "--columns", MetricPlugin)
FIGURE: Kind[FigurePlugin] = Kind("figure", "analysis.figures", "figure", FigurePlugin)
LAUNCHER: Kind[LauncherPlugin] = Kind("launcher", "bench.launchers", "launcher.name", LauncherPlugin)
STARTING: Kind[StartingLauncherPlugin] = Kind("launcher", "bench.launchers", "launcher.name", StartingLauncherPlugin)
QUEUEING: Kind[QueueingLauncherPlugin] = Kind("launcher", "bench.launchers", "launcher.name", QueueingLauncherPlugin)


def load_queueing(name: str) -> QueueingLauncherPlugin | None:
    """Return the launcher of this name, or None if it starts work at once; UserError as `load`."""
    return load(QUEUEING, name) if load(LAUNCHER, name).QUEUES else None
