"""Plug-ins: the Protocol of each kind, and a loader that imports a plug-in by the name in a config.

A plug-in is a file or folder in the package of its kind, or a module of an installed package
(`bench.core.installed_plugins`). There is no registration. A plug-in is imported only when it is loaded.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

from pydantic import BaseModel

from bench.core.engine_facts import EngineFacts
from bench.core.errors import UserError, suggest_nearest
from bench.core.installed_plugins import PluginError, find_entries, get_package, guard_all, name_installed, warn_skipped
from bench.core.network import Part, Stacks, TokenKind
from bench.core.record import Limits
from bench.core.scheduling import ClusterLimits, JobSetup, JobState, LaunchPlan, SchedulingOptions, Work
from bench.core.spec import RunSpec

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

    from bench.engines.distributed.slices import TensorRanks
    from bench.models.checkpoint.tensors import StoredForm

Plugin = TypeVar("Plugin")


@dataclass(frozen=True)
class Kind(Generic[Plugin]):
    """A kind of plug-ins, such as engines or launchers: where they are found, and what they must define."""

    name: str  # in the singular, as in the name of the entry point group
    package: str  # contains the plug-ins that ship with zeroscale
    key: str  # config key with the name of the plug-in
    protocol: type[object]  # defines the members that a plug-in must have
    marker: str | None = None  # module that makes a folder a plug-in; None: every folder is a plug-in
    part: str | None = None  # submodule that defines the members; None: the plug-in itself

    @property
    def members(self) -> list[str]:
        """Names that a plug-in of this kind must define, sorted."""
        # A Protocol may extend another Protocol, whose members are required as well.
        own = {name for base in self.protocol.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
        return sorted(name for name in own if not name.startswith("_"))


def list_names(kind: Kind[Any]) -> list[str]:
    """Return the names of all plug-ins of a kind, sorted. Plug-ins of installed packages are included."""
    return sorted({*_list_shipped(kind), *find_entries(kind.name)})


def load(kind: Kind[Plugin], name: str) -> Plugin:
    """Return the plug-in with this name. Raise UserError if it does not exist, cannot be imported or lacks a member."""
    return cast(Plugin, _import_complete(kind, name))


def list_usable(kind: Kind[Plugin]) -> Iterator[tuple[str, Plugin]]:
    """Yield the name and module of every plug-in of a kind. Broken plug-ins are skipped without an error."""
    for name in list_names(kind):
        with contextlib.suppress(UserError):
            yield name, load(kind, name)


def load_all(kind: Kind[Plugin]) -> Iterator[tuple[str, Plugin]]:
    """Yield the name and module of every plug-in of a kind. A broken plug-in of another package is skipped with a
    warning. Raise UserError for a broken plug-in of zeroscale."""
    for name in list_names(kind):
        try:
            yield name, load(kind, name)
        except PluginError as error:
            warn_skipped(name_installed(kind.name, name) or name, str(error))
            if name in _list_shipped(kind):  # another package has a plug-in of the same name
                yield name, cast(Plugin, _import_shipped(kind, name))


@functools.cache  # readers of many records load the same plug-in for each record
def _import_complete(kind: Kind[Any], name: str) -> ModuleType:
    """Import the module that defines a plug-in's members. Unexpected exceptions in functions of an installed plug-in
    become PluginErrors (`guard_all`). Exception: functions of builders, because the type of their exceptions decides
    the outcome of a run."""
    entries = find_entries(kind.name).get(name, [])
    if not entries:
        return _import_shipped(kind, name)
    owners = [kind.package] * (name in _list_shipped(kind)) + [f"package {get_package(entry)}" for entry in entries]
    if len(owners) > 1:
        rule = f"{' and '.join(owners)} have a plug-in of this name"
        raise PluginError(f"{kind.key}={name}", rule, "rename the plug-in, or remove one of the packages")
    module = _import_module(kind, name, entries[0].module, f"repair or remove the {owners[0]}", PluginError)
    return module if kind.part else guard_all(module, f"{kind.name} {name} of {owners[0]}", kind.protocol)


def _import_shipped(kind: Kind[Any], name: str) -> ModuleType:
    """Import the module of a plug-in in the package of its kind. Raise UserError if the plug-in does not exist."""
    folder = kind.package.replace(".", "/")
    if name not in _list_shipped(kind):
        raise UserError(f"{kind.key}={name}", f"no such file in {folder}", suggest_nearest(name, list_names(kind)))
    return _import_module(kind, name, f"{kind.package}.{name}", f"repair or remove {folder}/{name}", UserError)


def _import_module(kind: Kind[Any], name: str, path: str, remedy: str, refusal: type[UserError]) -> ModuleType:
    """Import the module at `path`, or its submodule `kind.part`. Raise an error of the class `refusal` if the import
    fails, or if the module lacks a member that plug-ins of this kind must have."""
    owner = path = f"{path}.{kind.part}" if kind.part else path
    try:
        module = importlib.import_module(path)
        missing = [member for member in kind.members if not hasattr(module, member)]
    except Exception as error:  # an added plug-in may fail in any way
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        # A plug-in's `__init__` imports its members from other files of the plug-in.
        absent = re.match(r"ImportError: cannot import name '(\w+)' from '([\w.]+)'", why)
        if not absent or absent[1] not in kind.members or not absent[2].startswith(path):
            raise refusal(f"{kind.key}={name}", f"{path} cannot be imported ({why})", remedy) from error
        owner, missing = absent[2], [absent[1]]
    if missing:
        remedy = f"see {kind.protocol.__name__} in bench/core/plugins.py"
        raise refusal(f"{kind.key}={name}", f"{owner} does not define {', '.join(missing)}", remedy)
    return module


@functools.cache
def _list_shipped(kind: Kind[Any]) -> frozenset[str]:
    """Return the names of the plug-ins in the package of a kind without importing them. A plug-in is a file of the
    package, or a folder of the package that contains the module `kind.marker`."""
    places = list(importlib.import_module(kind.package).__path__)

    def is_plugin(module: pkgutil.ModuleInfo) -> bool:
        inside = pkgutil.iter_modules([f"{place}/{module.name}" for place in places])
        return not module.ispkg or kind.marker is None or kind.marker in {one.name for one in inside}

    return frozenset(module.name for module in pkgutil.iter_modules(places) if is_plugin(module))


class EnginePlugin(Protocol):
    """A training engine: a folder of bench/engines with `facts.py`. The folder's `__init__` does not import torch.

    `__init__` may define `FITTED_TO_MODEL`: the names of options that count tensor elements, such as a bucket size. If
    a preset gives such an option a value above the model's number of parameters, the value is lowered to that number. A
    value from the study or the user is never lowered (`bench.config.decode.fit_engine`)."""

    Options: type[BaseModel]
    """Keys of conf/engine that a user may set."""

    def check(self, options: Any, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
        """Raise UserError for a spec that this engine does not support. If `device` is unknown (None), rules about the
        device are not checked."""

    def facts(self, spec: RunSpec) -> EngineFacts:
        """Return the facts of this engine for a spec that it supports."""


class EngineBuilder(Protocol):
    """Builder of an engine: the module `engine` in the engine's folder, which may import torch."""

    def construction(self, spec: RunSpec) -> AbstractContextManager[Any]:
        """Return the context in which the model is built. In this context, parameters are created on this rank's device
        and in the run's precision. Some engines also partition each parameter as soon as it is created. The caller must
        import the model classes before it enters the context."""

    def whole(self, parameters: "Sequence[Parameter]") -> AbstractContextManager[Any]:
        """Return a context in which every rank has the whole `parameters` instead of partitions. At the end of the
        context, the values of rank 0 are kept. The parameters belong to a module that the engine has not wrapped yet.
        All ranks must enter the context, because entering it is a collective operation."""

    def parameter_count(self, parameters: "Iterable[Parameter]") -> int:
        """Return the number of elements of all `parameters`, including partitions on other ranks."""

    def build(self, module: "Module", spec: RunSpec) -> Any:
        """Return an `Engine` that trains those parameters of `module` that require gradients. The module must be
        initialised, and the process group must exist."""


class FamilyPlugin(Protocol):
    """A model family. Each folder in bench/models that contains a `shape.py` is a family. The module `build` in the
    folder provides the functions of the protocol `FamilyBuilder`."""

    Shape: type[BaseModel]
    """Sizes that define an architecture. A frozen pydantic model, in a module that does not import torch."""

    MODEL_TYPES: tuple[str, ...]
    """Values of `model_type` in Hugging Face configs of this family; empty if there are none."""

    def from_hugging_face(self, config: dict[str, Any]) -> Any:
        """Return a Shape from the content of a Hugging Face config.json. Raise UserError for a config of another
        family."""

    def check(self, shape: Any, spec: RunSpec) -> None:
        """Raise UserError for a spec that a model of this shape does not support. For example, the model lacks a
        kernel, or the sequence has more tokens than the model has positions."""

    def token_kinds(self, shape: Any) -> tuple[str, ...]:
        """Return the kinds of tokens in a sample for a model of this shape, in order. The model supports every
        objective with exactly these kinds."""

    def vocabulary(self, shape: Any) -> int:
        """Return the size of the vocabulary in tokens."""

    def stacks(self, shape: Any) -> Stacks | None:
        """Return the sizes of the network, from which memory and time are predicted. Return None if the family does not
        describe its networks. For its models, nothing is predicted."""


class FamilyBuilder(Protocol):
    """Builder of a family's models: the file `build.py` in the family's folder. It is imported only in processes that
    build a model."""

    def build(self, spec: RunSpec, construction: AbstractContextManager[Any] | None = None) -> "Module":
        """Return the uninitialised module, built inside the context `construction`. The file must import the model
        classes at its top, since their import under deepspeed.zero.Init fails."""

    def initialise(self, module: "Module", spec: RunSpec, whole: "Whole" = ...) -> None:
        """Initialise every weight from spec.seed and the parameter's name, so that all ranks get equal weights. `whole`
        returns a context in which every rank has whole parameters instead of partitions (`EngineBuilder.whole`)."""


class StoredFamilyBuilder(FamilyBuilder, Protocol):
    """Builder of a family whose weights can be read and written in transformers' format."""

    def stored_form(self, spec: RunSpec, name: str) -> "StoredForm":
        """Return the name and layout that a parameter has in transformers' format. `name` is the parameter's name in
        the whole model, not in a pipeline part."""

    def transformers_config(self, spec: RunSpec) -> Any:
        """Return transformers' config of the model. Raise UserError if transformers has no such model."""


class DividedFamilyBuilder(FamilyBuilder, Protocol):
    """Builder of a family whose models can be divided into pipeline parts."""

    def build_part(
        self,
        spec: RunSpec,
        part: Part,
        construction: AbstractContextManager[Any] | None = None,
        among: "TensorRanks | None" = None,
    ) -> "Module":
        """Return the uninitialised module of one pipeline part. Its parameters have the same names as in the whole
        model. If `among` (the ranks of this rank's tensor-parallel group) is given, the module holds only this rank's
        slice of each matrix.

        The module's `forward` takes the hidden states from the previous part, one tensor for each stack of blocks
        (encoder, decoder). The first part takes no hidden states. A micro-batch follows as keyword arguments. `forward`
        returns a tuple of hidden states. In the last part, `forward` returns the loss as a 0-d tensor."""

    def find_shared(self, spec: RunSpec, parts: "Sequence[Part]") -> dict[str, list[int]]:
        """Return the parameters that several of the model's pipeline `parts` share: for each name, the indices of the
        parts that share it."""


class ObjectivePlugin(Protocol):
    """A training objective: a file of bench/objectives."""

    KINDS: tuple[TokenKind, ...]
    """Kinds of tokens in a sample, in the order in which records list lengths and padding."""

    REDUCTION: Literal["mean", "sum"]
    """Reduction of the loss over the target tokens of a micro-batch."""


class DataPlugin(Protocol):
    """A data source: a file of bench/data.

    Sample i of the stream of samples for all ranks depends only on (seed, i). A global batch therefore contains the
    same samples for every engine, number of ranks and number of micro-steps."""

    Options: type[BaseModel]
    """Keys of conf/data that a user may set. The file with this class does not import torch."""

    def check(self, options: Any, spec: RunSpec) -> None:
        """Raise UserError for a spec that this source does not support."""

    def micro_batches(self, spec: RunSpec, data_rank: int) -> Iterator[Any]:
        """Return the endless stream of `MicroBatch`es of a data-parallel rank, in host memory, loaded by torch's
        DataLoader."""

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return plain values that describe the data in the record, such as the corpus hash and the tokenizer."""


class HeldOutDataPlugin(DataPlugin, Protocol):
    """A data source for trainings of a fixed length. It excludes part of the data from training, for evaluation."""

    def micro_batches(self, spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[Any]:
        """Return the endless stream of `MicroBatch`es of training samples. It begins with the micro-batch of index
        `first`, at which a resumed run continues."""

    def held_out_batches(self, spec: RunSpec, data_rank: int) -> list[Any]:
        """Return one data-parallel rank's share of the first `learning.evaluation_samples` held-out samples, as a list
        of `MicroBatch`es. The samples of all ranks together do not depend on the run's seed or number of ranks."""


class PromptDataPlugin(HeldOutDataPlugin, Protocol):
    """A data source whose samples are prompts with answers, so that the quality of a model's answers can be measured
    (`learning.quality`)."""

    def held_out_prompts(self, spec: RunSpec, data_rank: int) -> Any:
        """Return one rank's share of the first `learning.evaluation_samples` held-out samples, as `Prompts`."""


class LauncherPlugin(Protocol):
    """A launcher: a file or folder of bench/launchers.

    It is a `QueueingLauncherPlugin` if `QUEUES` is True, and a `StartingLauncherPlugin` otherwise. The `options` of its
    functions are an instance of its own `Options`."""

    QUEUES: bool
    """True if a scheduler starts the work later. If False, the launcher starts work at once and the command waits for
    its end."""

    Options: type[Limits]
    """Keys of conf/launcher that a user may set."""

    def check(self, options: Limits, spec: RunSpec) -> None:
        """Raise UserError for a spec that this launcher cannot start."""

    def plan(self, work: Work, options: Limits) -> LaunchPlan:
        """Return how `work` would be started, without side effects. A dry run prints this plan."""


class StartingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher that starts work at once, as a process of this machine. That process may start others on other
    machines."""

    def submit(self, launch: LaunchPlan) -> Popen[bytes]:
        """Start the planned work as a process, and return the process."""

    def poll(self, handle: Popen[bytes]) -> bool:
        """Return True if the work has ended."""

    def cancel(self, handle: Popen[bytes]) -> None:
        """Request the end of the work. Its runs then write records with the outcome `cancelled`."""


class QueueingLauncherPlugin(LauncherPlugin, Protocol):
    """A launcher whose work a scheduler starts later, on nodes that can read the study's folder (see `Work`).

    The scheduler's names for jobs and states are used only inside the launcher. A process finds its own job in
    environment variables (`bench.core.job_environment`). The variables of some schedulers, such as Slurm, are
    supported. For any other scheduler, the launcher must set ZEROSCALE_JOB in its jobs.

    Functions raise SchedulerUnavailable if the scheduler does not respond. The states of jobs are then unknown. If the
    scheduler refuses a request, the functions raise UserError with the scheduler's message."""

    ARRAYS: bool
    """True if the scheduler supports job arrays (`Work.tasks`). If False, `mode=array` is refused."""

    Options: type[SchedulingOptions]
    """Keys of conf/launcher that a user may set: those of SchedulingOptions, and options of the site."""

    def submit(self, launch: LaunchPlan, options: Any) -> str:
        """Write the files of a plan, submit the job, and return the scheduler's handle of the job."""

    def ask(self, names: Collection[str], options: Any) -> Mapping[tuple[str, int | None], JobState]:
        """Query the scheduler once. Return the state of every job with one of these names. For a job array, return the
        state of every task. The key is (name, index of the task); the index is None for a job without tasks. A name
        that is missing in the result is unknown to the scheduler."""

    def find_log(self, folder: Path, handle: str, task: int | None) -> Path:
        """Return the path of a job's output file in `folder`. The file may not exist yet. `handle` is the result of
        `submit`. If `task` is the index of a task of a job array, return the path of that task's output file."""

    def cancel_all(self, handles: Iterable[str], options: Any) -> None:
        """Cancel whole jobs. Jobs that have already ended are ignored."""

    def limits(self, options: SchedulingOptions) -> ClusterLimits:
        """Return the limits of the cluster. On a machine outside the cluster, return unknown limits and raise no error,
        so that a sweep can be planned there."""

    def job_setup(self, options: SchedulingOptions) -> JobSetup:
        """Return the environment in which the command of a job runs. `zeroscale prepare` checks this environment."""

    def spread(self, command: Sequence[str], nodes: int) -> list[str]:
        """Return a command line that runs `command` once on each node of this process's job. `nodes` is the number of
        these nodes. Raise UserError if the scheduler cannot do this."""


@runtime_checkable
class StoringLauncherPlugin(Protocol):
    """Additional members of a `QueueingLauncherPlugin`, for jobs that cannot read the study's folder. These jobs use a
    copy of the folder in an object store (`bench.core.study_store`)."""

    Options: type[SchedulingOptions]

    def sync(self, folder: Path, options: Any) -> None:
        """Exchange files between a study's folder and the object store. Called before the folder is read."""


class MetricPlugin(Protocol):
    """A group of metrics, each derived from one record: a file of analysis/metrics."""

    METRICS: Sequence[Any]
    """Metrics, as `analysis.metrics.Metric`: column name, description, unit, better direction ("more", "less" or
    "neither"), and a function of the record that returns None for an unknown value."""


class FigurePlugin(Protocol):
    """A figure of a report: a file of analysis/figures."""

    TITLE: str
    PLACE: int
    """Position of the figure in a report. Figures with an equal number are sorted by name."""
    ALT: str
    """Text alternative of the figure, for readers who cannot see it."""
    NEEDS: str
    """Runs without which the figure has no panels, as a noun phrase: "runs with times of steps"."""

    def picture(self, results: Any) -> Any:
        """Return the figure as an `analysis.drawing.Picture`, made from `analysis.results.Results`. It has no panels if
        the results lack the runs that `NEEDS` names."""


Whole = Callable[[Sequence["Parameter"]], AbstractContextManager[Any]]

# Several Protocols share one name, package and key. Each states the members that one caller of the plug-in needs.
_ENGINE = "engine", "bench.engines", "engine.backend"
ENGINE: Kind[EnginePlugin] = Kind(*_ENGINE, EnginePlugin, "facts")
ENGINE_BUILDER: Kind[EngineBuilder] = Kind(*_ENGINE, EngineBuilder, "facts", "engine")
_FAMILY = "family", "bench.models", "model.family"
FAMILY: Kind[FamilyPlugin] = Kind(*_FAMILY, FamilyPlugin, "shape")
FAMILY_BUILDER: Kind[FamilyBuilder] = Kind(*_FAMILY, FamilyBuilder, "shape", "build")
STORED_FAMILY_BUILDER: Kind[StoredFamilyBuilder] = Kind(*_FAMILY, StoredFamilyBuilder, "shape", "build")
DIVIDED_FAMILY_BUILDER: Kind[DividedFamilyBuilder] = Kind(*_FAMILY, DividedFamilyBuilder, "shape", "build")
_DATA = "data", "bench.data", "data.source"
_LAUNCHER = "launcher", "bench.launchers", "launcher.name"
OBJECTIVE: Kind[ObjectivePlugin] = Kind("objective", "bench.objectives", "objective.name", ObjectivePlugin)
DATA: Kind[DataPlugin] = Kind(*_DATA, DataPlugin, "source")
HELD_OUT_DATA: Kind[HeldOutDataPlugin] = Kind(*_DATA, HeldOutDataPlugin, "source")
PROMPT_DATA: Kind[PromptDataPlugin] = Kind(*_DATA, PromptDataPlugin, "source")
METRIC: Kind[MetricPlugin] = Kind("metric", "analysis.metrics", "--columns", MetricPlugin)
FIGURE: Kind[FigurePlugin] = Kind("figure", "analysis.figures", "figure", FigurePlugin)
LAUNCHER: Kind[LauncherPlugin] = Kind(*_LAUNCHER, LauncherPlugin)
STARTING: Kind[StartingLauncherPlugin] = Kind(*_LAUNCHER, StartingLauncherPlugin)
QUEUEING: Kind[QueueingLauncherPlugin] = Kind(*_LAUNCHER, QueueingLauncherPlugin)


def load_queueing(name: str) -> QueueingLauncherPlugin | None:
    """Return the launcher with this name if it has a queue, otherwise None. Raise UserError as `load` does."""
    return load(QUEUEING, name) if load(LAUNCHER, name).QUEUES else None
