"""What a sweep was asked to measure: written down whole before anything starts, so that it can be resumed by anyone."""

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core
from pydantic import ValidationError

from bench.core import store
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.record import Circumstance, Limits, Network
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import Frozen, Name, Positive, RunSpec
from bench.core.study import Budget, Study
from bench.sweep.forecast import Forecast
from bench.sweep.pruning import Siblings

FOLDER, TRIALS = "sweeps", "trials"


class RunKey(NamedTuple):
    """What can have an answer: one repeat of a configuration on a machine."""

    config_id: str
    machine: str
    repeat: int


class RequestedRun(Frozen):
    """One attempt that is to be made; its repeat is known, its attempt number only when it is claimed."""

    spec: RunSpec
    circumstance: Circumstance
    config_id: str
    control: bool = False
    again: bool = False  # it has an answer, which is to be confirmed
    kin: Siblings | None = None

    @property
    def key(self) -> RunKey:
        return RunKey(self.config_id, self.circumstance.machine.name, self.circumstance.repeat)


class SweepPoint(Frozen):
    """One configuration. Its spec stays plain until it is needed: listing ten thousand points decodes none."""

    config_id: str
    line: str  # of the listing
    machine: Name
    nodes: Positive
    devices_per_node: Positive
    time_limit_min: float | None  # of one attempt
    bound_min: float | None = None  # the longest limit it may get; None: its limit was asked for
    step_limit_s: float | None = None  # its window ends once a step surely takes longer; None: of no search
    goes_on_from: str | None = None  # config_id of the point whose training it goes on with; None: with none
    forecast: Forecast | None = None  # None: asked before anything was predicted
    overrides: tuple[str, ...]
    spec: dict[str, Any]


class RequestedRepeat(NamedTuple):
    """One repeat of one point that is to have an answer."""

    key: RunKey
    sweep: "SweepDefinition"
    point: SweepPoint

    def request(self) -> RequestedRun:
        """Return one attempt at it, ready to be started."""
        return self.sweep.requested(self.point, self.key.repeat)


class SweepRules(Frozen):
    """How a sweep goes about its points."""

    budget: Budget = Budget()
    prune: bool = True
    max_queued: Positive | None = None  # jobs of ours in the queue at a time


class Trial(Frozen):
    """One point that a search has asked for: `trials/<number>.json`, written once by whoever asked first."""

    number: int
    point: SweepPoint
    values: dict[str, Any]  # by dimension of the space, as its file writes them
    why: str = ""  # what spoke for it
    sampler_state: dict[str, Any] = {}  # what a sampler keeps from one trial to the next


class SearchRequest(Frozen):
    """What a search was asked for, so that anybody can go on with it: its points are those of its trials."""

    study: Study
    overrides: tuple[str, ...] = ()  # as given, word for word
    config_dir: str | None = None


class SweepDefinition(Frozen):
    """Everything one `zeroscale sweep` asked for."""

    study: Name
    question: str = ""
    asked_at: str  # ISO 8601, UTC
    machines: dict[str, Machine]
    launcher: dict[str, Any]  # name and options
    limits: Limits = Limits()
    network: Network = Network()
    rules: SweepRules = SweepRules()
    points: tuple[SweepPoint, ...]
    order: tuple[tuple[int, int], ...]  # (repeat, index of a point), as they are to run
    controls: tuple[SweepPoint, ...] = ()  # the control point, once for every shape of allocation
    search: SearchRequest | None = None  # its trials stand in `trials` and are its points and its order

    @property
    def scheduling(self) -> SchedulingOptions:
        """What is ours of the launcher's options."""
        ours = {key: self.launcher[key] for key in SchedulingOptions.model_fields if key in self.launcher}
        return SchedulingOptions.model_validate(ours)

    def wanted(self) -> Iterator[RequestedRepeat]:
        """Yield everything that is to have an answer, in order."""
        for repeat, index in self.order:
            point = self.points[index]
            yield RequestedRepeat(RunKey(point.config_id, point.machine, repeat), self, point)

    def requested(
        self, point: SweepPoint, repeat: int, *, control: bool = False, again: bool = False, kin: Siblings | None = None
    ) -> RequestedRun:
        """Return one attempt at a point, ready to be started."""
        limits = self.limits.model_copy(update={"time_limit_min": point.time_limit_min})
        circumstance = Circumstance(
            study=self.study,
            question=self.question,
            repeat=repeat,
            attempt=0,
            machine=self.machines[point.machine],
            launcher=self.launcher,
            limits=limits,
            step_limit_s=point.step_limit_s,
            goes_on_from=point.goes_on_from,
            network=self.network,
            overrides=point.overrides,
        )
        spec = RunSpec.model_validate(point.spec)
        return RequestedRun(
            spec=spec, circumstance=circumstance, config_id=point.config_id, control=control, again=again, kin=kin
        )

    def control(self, nodes: int, devices_per_node: int) -> SweepPoint | None:
        """Return the control point for allocations of this shape, if the study has one."""
        fitting = (p for p in self.controls if (p.nodes, p.devices_per_node) == (nodes, devices_per_node))
        return next(fitting, None)


def write(study_folder: Path, sweep: SweepDefinition) -> Path:
    """Write down what was asked; a sweep asked again at the same moment gets a file of its own."""
    folder = study_folder / FOLDER
    stem, number = sweep.asked_at.replace(":", "").replace("+0000", "Z"), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not store.write_reserved(path := folder / f"{stem}-{number}.json", store.to_json(sweep)):
            number += 1
    except OSError as error:
        raise store.build_unwritable_error(study_folder, error) from error
    return path


def read(study_folder: Path) -> list[SweepDefinition]:
    """Return what was asked in a study's folder, oldest first; UserError where nothing was.

    A file that is no sweep of this version is named on standard error, once, and left out.
    """
    files = [_read_sweep(path) for path in sorted((study_folder / FOLDER).glob("*.json"))]
    found = [file for file in files if isinstance(file, SweepDefinition)]
    if files and not found:
        raise next(file for file in files if isinstance(file, UserError))
    if not found:
        rule = "no sweep was asked for in this folder" if study_folder.is_dir() else "no such folder"
        raise UserError(str(study_folder), rule, "give the folder of a study, e.g. results/runs/smoke")
    return _with_trials(found, study_folder)


def _with_trials(sweeps: list[SweepDefinition], study_folder: Path) -> list[SweepDefinition]:
    """Return the sweeps, the last search among them with the trials that were made so far: they are what it asks."""
    last = max((index for index, sweep in enumerate(sweeps) if sweep.search), default=None)
    if last is None:
        return sweeps
    made = read_trials(study_folder)
    order = tuple((0, index) for index in range(len(made)))
    searched = sweeps[last].model_copy(update={"points": tuple(trial.point for trial in made), "order": order})
    return [*sweeps[:last], searched, *sweeps[last + 1 :]]


@functools.lru_cache(maxsize=64)  # written once and never changed
def _read_sweep(path: Path) -> SweepDefinition | UserError:
    try:
        return SweepDefinition.model_validate(pydantic_core.from_json(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        unreadable = UserError(
            str(path), f"not a sweep of this version ({_format_reason(error)})", "remove it and ask again"
        )
        print(f"zeroscale: {unreadable}", file=sys.stderr)
        return unreadable


def _format_reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    return str(error).partition("\n")[0]


def write_trial(study_folder: Path, trial: Trial) -> bool:
    """Write down a trial; return whether it is ours: of two who ask for the same number, the first has it."""
    folder = study_folder / TRIALS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return store.write_reserved(folder / f"{trial.number:05d}.json", store.to_json(trial))
    except OSError as error:
        raise store.build_unwritable_error(study_folder, error) from error


def read_trials(study_folder: Path) -> list[Trial]:
    """Return the trials of a study's search, in order. UserError for one that cannot be read: what follows from the
    others would be another search."""
    return [_read_trial(path) for path in sorted((study_folder / TRIALS).glob("*.json"))]


@functools.lru_cache(maxsize=20_000)  # written once and never changed
def _read_trial(path: Path) -> Trial:
    return store.read_value(path, Trial)


def find_search(sweeps: Sequence[SweepDefinition]) -> SweepDefinition | None:
    """Return the search that was asked for last; None where there is none."""
    return next((sweep for sweep in reversed(sweeps) if sweep.search), None)


def merge_sweeps(sweeps: Sequence[SweepDefinition]) -> dict[RunKey, RequestedRepeat]:
    """Return everything that is to have an answer; what was asked more than once, as it was asked last."""
    return {one.key: one for sweep in sweeps for one in sweep.wanted()}
