"""Definition of a sweep. It is written to the study's folder before any run starts, so that any process can resume the
sweep."""

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core
from pydantic import ValidationError

from bench.core import store
from bench.core.errors import UserError
from bench.core.field_errors import describe_error
from bench.core.formatting import format_count
from bench.core.machine import Machine
from bench.core.record import Circumstance, Limits, Network
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import Frozen, Name, Positive, RunSpec
from bench.core.study import Budget, Study
from bench.sweep.forecast import Forecast
from bench.sweep.pruning import Siblings

_log = logging.getLogger(__name__)
FOLDER, TRIALS = "sweeps", "trials"


class RunKey(NamedTuple):
    """Identity of a run: one repeat of a configuration on a machine."""

    config_id: str
    machine: str
    repeat: int


class RequestedRun(Frozen):
    """Request for one attempt (one try) at a run. The attempt number is assigned when the attempt's folder is
    created."""

    spec: RunSpec
    circumstance: Circumstance
    config_id: str
    control: bool = False  # a run of the study's control point
    again: bool = False  # it has a final outcome already, but runs once more
    kin: Siblings | None = None  # configurations that differ in the micro-batch alone

    @property
    def key(self) -> RunKey:
        return RunKey(self.config_id, self.circumstance.machine.name, self.circumstance.repeat)


class SweepPoint(Frozen):
    """One configuration of a sweep. Its spec is kept as plain JSON, because decoding the specs of thousands of points
    takes long."""

    config_id: str
    line: str  # describes the point in listings
    machine: Name
    nodes: Positive
    devices_per_node: Positive
    time_limit_min: float | None  # of one attempt
    bound_min: float | None = None  # longest limit that a prediction may give an attempt; None: the user set the limit
    step_limit_s: float | None = None  # in a search: end the measurement once steps surely take longer than this
    goes_on_from: str | None = None  # config_id of the point from whose checkpoint this one resumes
    forecast: Forecast | None = None  # None in sweeps of versions without predictions
    overrides: tuple[str, ...]
    spec: dict[str, Any]


class RequestedRepeat(NamedTuple):
    """One repeat of one point, together with the sweep that requested it."""

    key: RunKey
    sweep: "SweepDefinition"
    point: SweepPoint

    def request(self) -> RequestedRun:
        """Return a request for one attempt at this repeat."""
        return self.sweep.requested(self.point, self.key.repeat)


class SweepRules(Frozen):
    """Rules for running the points of a sweep."""

    budget: Budget = Budget()
    prune: bool = True
    max_queued: Positive | None = None  # most jobs of this sweep in the scheduler's queue; None: no limit


class Trial(Frozen):
    """One point (configuration) proposed by a search. Written once, as `trials/<number>.json`."""

    number: int
    point: SweepPoint
    values: dict[str, Any]  # by dimension of the search space, spelled as in the study's file
    why: str = ""  # reason for the proposal
    sampler_state: dict[str, Any] = {}  # the sampler's own state after this trial


class SearchRequest(Frozen):
    """Definition of a search, from which any process can resume the search. The points are not listed here, because
    each trial of the search proposes one more point."""

    study: Study
    overrides: tuple[str, ...] = ()  # verbatim, as the user wrote them
    config_dir: str | None = None


class SweepDefinition(Frozen):
    """Everything that one call of `zeroscale sweep` or `zeroscale search` defines."""

    study: Name
    question: str = ""
    asked_at: str  # ISO 8601, UTC
    machines: dict[str, Machine]
    launcher: dict[str, Any]  # name and options
    limits: Limits = Limits()
    network: Network = Network()
    rules: SweepRules = SweepRules()
    points: tuple[SweepPoint, ...]
    order: tuple[tuple[int, int], ...]  # (repeat, index of a point), in the order to run
    controls: tuple[SweepPoint, ...] = ()  # the control point, once for each shape of allocation
    search: SearchRequest | None = None  # if set, the points and their order come from the files in `trials`

    def __repr__(self) -> str:
        return f"<SweepDefinition {self.describe()}>"

    def describe(self) -> str:
        """Return the study, the numbers of runs and points, and the launcher in one line."""
        count = f"{format_count(len(self.order), 'run')} of {format_count(len(self.points), 'point')}"
        return f"{self.study}: {count}, launcher={self.launcher['name']}"

    @property
    def scheduling(self) -> SchedulingOptions:
        """Return the launcher's options that concern a scheduler. Options that are not set have their defaults."""
        ours = {key: self.launcher[key] for key in SchedulingOptions.model_fields if key in self.launcher}
        return SchedulingOptions.model_validate(ours)

    def wanted(self) -> Iterator[RequestedRepeat]:
        """Yield every requested repeat of every point, in the order in which they should run."""
        for repeat, index in self.order:
            point = self.points[index]
            yield RequestedRepeat(RunKey(point.config_id, point.machine, repeat), self, point)

    def requested(
        self, point: SweepPoint, repeat: int, *, control: bool = False, again: bool = False, kin: Siblings | None = None
    ) -> RequestedRun:
        """Return a request for one attempt (one try) at a point. `control` is set for the control point, which is
        measured repeatedly to detect a drift of the machine. `again` is set for a point that runs once more although it
        has a final outcome. `kin` are the configurations that differ from this point in the micro-batch alone."""
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
        return RequestedRun(
            spec=RunSpec.model_validate(point.spec),
            circumstance=circumstance,
            config_id=point.config_id,
            control=control,
            again=again,
            kin=kin,
        )

    def control(self, nodes: int, devices_per_node: int) -> SweepPoint | None:
        """Return the control point (a reference configuration that jobs repeat) for allocations with these numbers of
        nodes and devices per node. None if the study has none."""
        shape = nodes, devices_per_node
        return next((point for point in self.controls if (point.nodes, point.devices_per_node) == shape), None)


def write(study_folder: Path, sweep: SweepDefinition) -> Path:
    """Write a sweep's definition to a new file and return its path. The file name consists of the time at which
    the sweep was requested, such as 2026-11-26T101500Z, and the smallest number not yet used with that time."""
    # Times sort as file names; colons are not allowed in names on some file systems.
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
    """Return the sweeps defined in a study's folder, oldest first. Raise UserError if no sweep can be read.

    A file that this version cannot decode is logged once and ignored.
    """
    files = [_read_sweep(path) for path in sorted((study_folder / FOLDER).glob("*.json"))]
    found = [file for file in files if isinstance(file, SweepDefinition)]
    if files and not found:
        raise next(file for file in files if isinstance(file, UserError))
    if not found:
        rule = "no sweep was started in this folder" if study_folder.is_dir() else "no such folder"
        remedy = "name the results folder of a study, such as results/runs/smoke"
        if any(study_folder.glob(f"*/*/{store.SPEC}")):
            rule += ", only single runs"
            remedy = "to repeat a run, use its `zeroscale run` command again; `zeroscale table` lists the runs"
        raise UserError(str(study_folder), rule, remedy)
    return _with_trials(found, study_folder)


def _with_trials(sweeps: list[SweepDefinition], study_folder: Path) -> list[SweepDefinition]:
    """Return the sweeps after replacing the points of the latest search. A search is a sweep that proposes its points
    while it runs. A proposed point is called a trial. The new points are all trials that the search has proposed so
    far."""
    last = max((index for index, sweep in enumerate(sweeps) if sweep.search), default=None)
    if last is None:
        return sweeps
    made = read_trials(study_folder)
    order = tuple((0, index) for index in range(len(made)))
    searched = sweeps[last].model_copy(update={"points": tuple(trial.point for trial in made), "order": order})
    return [*sweeps[:last], searched, *sweeps[last + 1 :]]


@functools.lru_cache(maxsize=64)  # a sweep is written once and never changed
def _read_sweep(path: Path) -> SweepDefinition | UserError:
    try:
        return SweepDefinition.model_validate(pydantic_core.from_json(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        if isinstance(error, ValidationError):
            why = describe_error(error, SweepDefinition)
        rule = f"this version of zeroscale cannot read this sweep ({why})"
        unreadable = UserError(str(path), rule, "remove the file and start the sweep again")
        _log.warning("%s", unreadable)
        return unreadable


def write_trial(study_folder: Path, trial: Trial) -> bool:
    """Write a trial (a point that a search proposes) to a file. Return False, and write nothing, if another process has
    already written a trial with this number."""
    folder = study_folder / TRIALS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return store.write_reserved(folder / f"{trial.number:05d}.json", store.to_json(trial))
    except OSError as error:
        raise store.build_unwritable_error(study_folder, error) from error


def read_trials(study_folder: Path) -> list[Trial]:
    """Return the trials of a study's search, ordered by number.

    Raise UserError if any trial cannot be read. Without that trial, the search would propose different points.
    """
    return [_read_trial(path) for path in sorted((study_folder / TRIALS).glob("*.json"))]


@functools.lru_cache(maxsize=20_000)  # a trial is written once and never changed
def _read_trial(path: Path) -> Trial:
    return store.read_value(path, Trial)


def find_search(sweeps: Sequence[SweepDefinition]) -> SweepDefinition | None:
    """Return the latest search among the sweeps; None if there is none."""
    return next((sweep for sweep in reversed(sweeps) if sweep.search), None)


def merge_sweeps(sweeps: Sequence[SweepDefinition]) -> dict[RunKey, RequestedRepeat]:
    """Return the requested repeats of all sweeps by run key. If several sweeps request the same run, the latest sweep's
    settings are used."""
    return {one.key: one for sweep in sweeps for one in sweep.wanted()}
