"""Plug-ins by kind: the Protocol of each kind, and loading of a plug-in by the name that a config gives it.

A plug-in is a file or a folder of that name in the package of its kind, or a module that an installed package declares
as an entry point of the group `zeroscale.<kind>`. Nothing is registered, and a plug-in is imported only when it is
loaded.
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
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

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

    name: str  # in the singular, as in the group of its entry points
    package: str  # of the plug-ins that ship
    key: str  # the config key that names a plug-in
    protocol: type[object]  # its members are what a plug-in has to define
    marker: str | None = None  # a folder is a plug-in only with this module; None: every folder is a plug-in
    part: str | None = None  # the module of the plug-in that defines the members; None: the plug-in itself

    @property
    def members(self) -> list[str]:
        """Names that a plug-in has to define, sorted."""
        # A Protocol may extend another one, so that its own members are not all of them.
        own = {name for base in self.protocol.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
        return sorted(name for name in own if not name.startswith("_"))


def list_names(kind: Kind[Any]) -> list[str]:
    """Return the names of all plug-ins of a kind, those of installed packages included, sorted."""
    return sorted({*_list_shipped(kind), *_list_installed(kind.name)})


def load(kind: Kind[Plugin], name: str) -> Plugin:
    """Return the plug-in of this name; UserError if it does not exist, cannot be imported or lacks a member."""
    return cast(Plugin, _import_complete(kind, name))


def list_usable(kind: Kind[Plugin]) -> Iterator[tuple[str, Plugin]]:
    """Yield the name and module of every plug-in of a kind. Broken plug-ins are skipped: no config names them here."""
    for name in list_names(kind):
        with contextlib.suppress(UserError):
            yield name, load(kind, name)


@functools.cache  # reading many records loads the same plug-in for each
def _import_complete(kind: Kind[Any], name: str) -> ModuleType:
    """Import a plug-in, or its part that the kind names, and check that it defines all members."""
    # Checked at loading: a missing member would otherwise fail in the middle of a run.
    module = _import_module(kind, name)
    if missing := [member for member in kind.members if not hasattr(module, member)]:
        rule = f"{module.__name__} does not define {', '.join(missing)}"
        raise UserError(f"{kind.key}={name}", rule, f"see {kind.protocol.__name__} in bench/core/plugins.py")
    return module


def _import_module(kind: Kind[Any], name: str) -> ModuleType:
    """Import a plug-in, or its part that the kind names; UserError if there is none or its import fails."""
    entry, part = _list_installed(kind.name).get(name), f".{kind.part}" if kind.part else ""
    if name in _list_shipped(kind):
        if entry:
            rule = f"both {kind.package} and {entry.value} have this name"
            raise UserError(f"{kind.key}={name}", rule, "rename the installed plug-in")
        path, remedy = f"{kind.package}.{name}{part}", f"repair or remove {kind.package.replace('.', '/')}/{name}"
    elif entry:
        distribution = entry.dist.name if entry.dist else entry.module
        path, remedy = entry.module + part, f"repair or remove the package {distribution}"
    else:
        rule = f"no such file in {kind.package.replace('.', '/')}"
        raise UserError(f"{kind.key}={name}", rule, suggest_nearest(name, list_names(kind)))
    try:
        return importlib.import_module(path)
    except Exception as error:  # an added plug-in may fail in any way
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{kind.key}={name}", f"{path} cannot be imported ({why})", remedy) from error


@functools.cache
def _list_shipped(kind: Kind[Any]) -> frozenset[str]:
    """Return the names of files, and of folders with the kind's marker, in the package of a kind, without importing
    them."""
    places = list(importlib.import_module(kind.package).__path__)

    def is_plugin(module: pkgutil.ModuleInfo) -> bool:
        inside = pkgutil.iter_modules([f"{place}/{module.name}" for place in places])
        return not module.ispkg or kind.marker is None or kind.marker in {one.name for one in inside}

    return frozenset(module.name for module in pkgutil.iter_modules(places) if is_plugin(module))


@functools.cache
def _list_installed(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of a kind in all installed packages, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=f"{GROUP}.{kind}")}


def list_installed_files(kind: Kind[Any]) -> list[Path]:
    """Return the Python files of the packages that declare plug-ins of a kind, sorted, without importing them."""
    roots = {entry.module.partition(".")[0] for entry in _list_installed(kind.name).values()}
    found: set[Path] = set()
    # The files are hashed as part of a cache key, so that all code of a package counts.
    for spec in filter(None, map(importlib.util.find_spec, roots)):
        for folder in spec.submodule_search_locations or ():
            found.update(Path(folder).rglob("*.py"))
        if spec.origin and spec.submodule_search_locations is None:
            found.add(Path(spec.origin))
    return sorted(found)


class EnginePlugin(Protocol):
    """A training engine: a folder of bench/engines with `facts.py`. Its `__init__` imports no torch.

    `FITTED_TO_MODEL`, a tuple of option names, is optional. A preset's value of such an option is lowered to the number
    of the model's parameters where a study or user does not set it (`bench.config.decode.fit_engine`).
    """

    Options: type[BaseModel]
    """Keys of conf/engine that a user may set."""

    def check(self, options: Any, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
        """Raise UserError for a spec that this engine does not support. With an unknown `device` (None), rules about
        the device are left to a later check."""

    def facts(self, spec: RunSpec) -> EngineFacts:
        """Return the facts of this engine for a spec that it supports."""


class EngineBuilder(Protocol):
    """The builder of an engine: the module `engine` in its folder, which may import torch."""

    def construction(self, spec: RunSpec) -> AbstractContextManager[Any]:
        """Return the context in which the model is built: on this rank's device, in the run's precision, partitioned
        if the engine partitions at construction. Model classes must have been imported before."""

    def whole(self, parameters: "Sequence[Parameter]") -> AbstractContextManager[Any]:
        """Return a context in which `parameters` are whole on every rank; rank 0's changes to them stay. They belong to
        a module that is not yet built into its engine. Collective."""

    def parameter_count(self, parameters: "Iterable[Parameter]") -> int:
        """Return the elements of all `parameters`, partitions of other ranks included."""

    def build(self, module: "Module", spec: RunSpec) -> Any:
        """Return an `Engine` that trains the parameters of `module` with requires_grad. The module is initialised, and
        the process group exists."""


class FamilyPlugin(Protocol):
    """A model family: a folder of bench/models with `shape.py`. Its `build.py` is a `FamilyBuilder`."""

    Shape: type[BaseModel]
    """Sizes that decide an architecture; frozen, imports no torch."""

    MODEL_TYPES: tuple[str, ...]
    """The `model_type` of Hugging Face configs of this family; empty for none."""

    def from_hugging_face(self, config: dict[str, Any]) -> Any:
        """Return a Shape from the content of a Hugging Face config.json; UserError for another family's."""

    def check(self, shape: Any, spec: RunSpec) -> None:
        """Raise UserError for a spec that a model of this shape does not support, such as a kernel or more tokens than
        positions."""

    def token_kinds(self, shape: Any) -> tuple[str, ...]:
        """Return the kinds of tokens in a sample for such a model, in order. It supports any objective with exactly
        these kinds."""

    def vocabulary(self, shape: Any) -> int:
        """Return the number of tokens in the vocabulary."""

    def stacks(self, shape: Any) -> Stacks | None:
        """Return the network as sizes; None: there is no description, and so no prediction for this model."""


class FamilyBuilder(Protocol):
    """The builder of a family's models: `build.py` in its folder, imported only where a model is built."""

    def build(self, spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> "Module":
        """Return the uninitialised module, built inside `construction`. This file imports the model classes at its top,
        since importing them under deepspeed.zero.Init raises."""

    def initialise(self, module: "Module", spec: RunSpec, whole: "Whole" = ...) -> None:
        """Set every weight from (spec.seed, name), equally on every rank; `whole` is the engine's."""


class DividedFamilyBuilder(FamilyBuilder, Protocol):
    """A family whose models can be built in parts, for a pipeline."""

    def build_part(
        self,
        spec: RunSpec,
        part: Part,
        construction: AbstractContextManager[Any] | None = None,
        among: "TensorRanks | None" = None,
    ) -> "Module":
        """Return a part of the uninitialised module, its parameters under their names in the whole model.

        `among` are the ranks that share each matrix with this rank, which then keeps only its own slices. The part's
        forward takes the states of the previous part, one tensor for each stack (none in the first part), and a
        micro-batch by keyword. It returns a tuple of these states; the last part returns the loss, 0-d.
        """

    def find_shared(self, spec: RunSpec, parts: "Sequence[Part]") -> dict[str, list[int]]:
        """Return the parameters that several of the model's `parts` share: the numbers of these parts by name."""


class ObjectivePlugin(Protocol):
    """An objective: a file of bench/objectives."""

    KINDS: tuple[TokenKind, ...]
    """The tokens of a sample by kind, in the order of recorded lengths and padding."""

    REDUCTION: Literal["mean", "sum"]
    """Reduction of the losses of a micro-batch's target tokens."""


class DataPlugin(Protocol):
    """A data source: a file of bench/data.

    Sample i of the global stream depends on (seed, i) alone, so that a global batch holds the same samples for every
    engine, number of ranks and accumulation.
    """

    Options: type[BaseModel]
    """Keys of conf/data that a user may set; imports no torch."""

    def check(self, options: Any, spec: RunSpec) -> None:
        """Raise UserError for a spec that this source does not support."""

    def micro_batches(self, spec: RunSpec, data_rank: int) -> Iterator[Any]:
        """Return the endless `MicroBatch`es of a data-parallel rank, on the host, through torch's DataLoader."""

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return facts for the record as plain values: hash of the corpus, tokenizer …"""


class HeldOutDataPlugin(DataPlugin, Protocol):
    """A data source for trainings with an end: it holds out a part of the data for evaluation."""

    def micro_batches(self, spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[Any]:
        """Return the `MicroBatch`es from number `first` on, where a resumed run continues, without held-out samples."""

    def held_out_batches(self, spec: RunSpec, data_rank: int) -> list[Any]:
        """Return a data-parallel rank's `MicroBatch`es of the first `learning.evaluation_samples` held-out samples.
        These are the same for every seed of the run and number of ranks."""


class LauncherPlugin(Protocol):
    """A launcher: a file or folder of bench/launchers. It is a `StartingLauncherPlugin` or, where it `QUEUES`, a
    `QueueingLauncherPlugin`.

    Options are always an instance of the launcher's own `Options`.
    """

    QUEUES: bool
    """True if a scheduler starts the work later. Otherwise it starts at once, and the command waits for it."""

    Options: type[Limits]
    """Keys of conf/launcher that a user may set."""

    def check(self, options: Limits, spec: RunSpec) -> None:
        """Raise UserError for a spec that this launcher cannot start."""

    def plan(self, work: Work, options: Limits) -> LaunchPlan:
        """Return how `work` starts, without side effects: a dry run prints this plan."""


class StartingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher that starts work at once, as a process of this machine (which may start processes elsewhere)."""

    def submit(self, launch: LaunchPlan) -> Popen[bytes]:
        """Start the planned work, the only side effect."""

    def poll(self, handle: Popen[bytes]) -> bool:
        """Return whether the work has ended."""

    def cancel(self, handle: Popen[bytes]) -> None:
        """Request the end of the work; it leaves a record `cancelled`."""


class QueueingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher whose work a scheduler starts, on nodes that see the study's folder (`Work`).

    The scheduler's names for jobs, states and variables stay inside the launcher. SchedulerUnavailable means that the
    scheduler did not answer, so that the state of its jobs is unknown. A refusal is a UserError with its message.
    """

    ARRAYS: bool
    """True if a job may have tasks (`Work.tasks`). Otherwise `mode=array` is refused."""

    Options: type[SchedulingOptions]
    """SchedulingOptions and options of the site."""

    def submit(self, launch: LaunchPlan) -> str:
        """Write the files of a plan and submit it, the only side effect; return the scheduler's handle of the job."""

    def ask(self, names: Collection[str]) -> Mapping[tuple[str, int | None], JobState]:
        """Return the states of all jobs of these names by name and task (None for a job without tasks), from one query.
        A missing name means that the scheduler does not know the job."""

    def find_log(self, folder: Path, handle: str, task: int | None) -> Path:
        """Return the output file of a job in this folder, or of one of its tasks; it may not exist yet."""

    def cancel_all(self, handles: Iterable[str]) -> None:
        """Cancel whole jobs; jobs that have ended meanwhile are ignored."""

    def limits(self, options: SchedulingOptions) -> ClusterLimits:
        """Return the limits of the cluster. On a machine outside the cluster there are none, so that planning a sweep
        still works there."""

    def job_setup(self, options: SchedulingOptions) -> JobSetup:
        """Return the environment of a job's command, for `zeroscale prepare`."""

    def context(self, environment: Mapping[str, str]) -> JobContext | None:
        """Return the place of a process with this environment in a job of the scheduler; None outside any job."""

    def spread(self, command: Sequence[str], nodes: int) -> list[str]:
        """Return the command that runs `command` once on each of the `nodes` of this process's job; UserError where
        that is impossible."""


class MetricPlugin(Protocol):
    """Quantities derived from one record: a file of analysis/metrics."""

    METRICS: Sequence[Any]
    """Values of `analysis.metrics.Metric`: column, short description, unit, the better direction ("more", "less",
    "neither"), and a function of the record that returns None for an unknown value."""


class FigurePlugin(Protocol):
    """A figure of a report: a file of analysis/figures."""

    TITLE: str
    PLACE: int
    """Position among the figures. Figures with the same place are sorted by name."""

    ALT: str
    """A description of the figure, for readers who cannot see it."""

    def picture(self, results: Any) -> Any:
        """Return an `analysis.drawing.Picture` of `analysis.results.Results`. It has no panel where there is nothing to
        show, for example without a second node count."""


Whole = Callable[[Sequence["Parameter"]], AbstractContextManager[Any]]

# One name, package and key, several Protocols: each says what one caller needs of the plug-in.
_ENGINE = "engine", "bench.engines", "engine.backend"
ENGINE: Kind[EnginePlugin] = Kind(*_ENGINE, EnginePlugin, "facts")
ENGINE_BUILDER: Kind[EngineBuilder] = Kind(*_ENGINE, EngineBuilder, "facts", "engine")
_FAMILY = "family", "bench.models", "model.family"
FAMILY: Kind[FamilyPlugin] = Kind(*_FAMILY, FamilyPlugin, "shape")
FAMILY_BUILDER: Kind[FamilyBuilder] = Kind(*_FAMILY, FamilyBuilder, "shape", "build")
DIVIDED_FAMILY_BUILDER: Kind[DividedFamilyBuilder] = Kind(*_FAMILY, DividedFamilyBuilder, "shape", "build")
_DATA = "data", "bench.data", "data.source"
_LAUNCHER = "launcher", "bench.launchers", "launcher.name"
OBJECTIVE: Kind[ObjectivePlugin] = Kind("objective", "bench.objectives", "objective.name", ObjectivePlugin)
DATA: Kind[DataPlugin] = Kind(*_DATA, DataPlugin, "source")
HELD_OUT_DATA: Kind[HeldOutDataPlugin] = Kind(*_DATA, HeldOutDataPlugin, "source")
METRIC: Kind[MetricPlugin] = Kind("metric", "analysis.metrics", "--columns", MetricPlugin)
FIGURE: Kind[FigurePlugin] = Kind("figure", "analysis.figures", "figure", FigurePlugin)
LAUNCHER: Kind[LauncherPlugin] = Kind(*_LAUNCHER, LauncherPlugin)
STARTING: Kind[StartingLauncherPlugin] = Kind(*_LAUNCHER, StartingLauncherPlugin)
QUEUEING: Kind[QueueingLauncherPlugin] = Kind(*_LAUNCHER, QueueingLauncherPlugin)


def load_queueing(name: str) -> QueueingLauncherPlugin | None:
    """Return the launcher of this name, or None if it starts work at once; UserError as `load`."""
    return load(QUEUEING, name) if load(LAUNCHER, name).QUEUES else None


class JobAndLauncher(NamedTuple):
    """The job of this process and the launcher that recognised it; the defaults outside any job."""

    launcher: QueueingLauncherPlugin | None = None
    context: JobContext = JobContext()


def find_context(name: str, environment: Mapping[str, str]) -> JobContext:
    """Return the place of a process with this environment in a job of the launcher `name`."""
    launcher = load_queueing(name)
    return (launcher.context(environment) if launcher else None) or JobContext()


def find_job(environment: Mapping[str, str]) -> JobAndLauncher:
    """Return the job of a process with this environment, by asking every launcher: a run that a user starts by hand may
    be inside a job too. A launcher whose import fails recognises no job."""
    for name, launcher in list_usable(LAUNCHER):
        with contextlib.suppress(UserError):
            queueing = load_queueing(name) if launcher.QUEUES else None
            if queueing and (context := queueing.context(environment)):
                return JobAndLauncher(queueing, context)
    return JobAndLauncher()
