"""The Python interface of zeroscale: its commands as functions, for scripts and notebooks.

    from bench import api

    plan = api.plan("smoke", {"engine": ["ddp", "zero2"]})
    api.run(plan, results="results/runs")
    api.resume("results/runs/smoke")
    api.predict(overrides="model=mt5_xl engine=zero3 devices_per_node=8 machine=h100")[0].time

Overrides have one of three forms: a string as on the command line, a list of such strings, or a mapping from keys to
values. In a mapping, a list gives several values of its key. No function here prints. Every function raises UserError
for a request that it cannot carry out.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.formatting import describe_result, format_count
from bench.core.store import Unreadable
from bench.core.study import Study
from bench.core.terminal import Progress

if TYPE_CHECKING:  # functions import what they need: `zeroscale status` needs no Hydra, `run` no scheduler
    from bench.core.errors import Check
    from bench.core.record import RunRecord
    from bench.sweep.advise.places import PlaceTable
    from bench.sweep.advise.search import Answer
    from bench.sweep.inputs import GivenOverrides
    from bench.sweep.local_attempt import MeasuredRun
    from bench.sweep.local_sweep import SweepResult
    from bench.sweep.plan import PlannedSweep, SingleRun
    from bench.sweep.prediction import Prediction
    from bench.sweep.search.planning import PlannedSearch
    from bench.sweep.search.verdict import SearchVerdict
    from bench.sweep.status import StudyState
    from bench.sweep.submitting import SubmitResult

__all__ = [
    "Progress", "Status", "Study", "UserError", "advise", "cancel", "compare_places", "measure", "plan", "plan_search",
    "point", "predict", "prepare", "rehearsal", "rehearse", "resume", "run", "search", "search_verdict", "status",
    "submit", "unreadable",
]  # fmt: skip

Folder = str | Path
TextListener = Callable[[str], None]
"""Function that receives a line of text about each event, such as the end of a run."""
Follow = Callable[[Progress], None]
"""Function that receives the progress of the current run."""
Describe = Callable[["RunRecord"], str]
"""Function that returns the result of a run as one line of text."""


def _ignore_text(what: object) -> None:
    """Do nothing with a text or with progress: the default callback."""


def _convert_path(folder: Folder | None) -> Path | None:
    return None if folder is None else Path(folder)


def plan(
    study: Study | Folder | None = None,
    overrides: "GivenOverrides" = (),
    *,
    config_dir: Folder | None = None,
    repeats: int | None = None,
    prune: bool = True,
    autopilot: bool = False,
    max_queued: int | None = None,
    nice: int | None = None,
    begin: str | None = None,
) -> "PlannedSweep":
    """Return a planned sweep: every point (configuration) decoded, checked and predicted. Nothing is run or written.

    `study` is the name of a file in conf/study, a path of such a file, or a Study. Without a study, the points are all
    combinations of the overrides' values. `repeats` replaces the study's number of repeats (1 without a study). `prune`
    skips a point if a smaller micro-batch ran out of memory, or if the point is predicted to exceed memory by far.

    The other arguments are for launchers with a queue. `autopilot` resubmits unfinished points. `max_queued` limits the
    number of jobs in the queue. `nice` lowers the priority of the jobs. No job starts before `begin`.
    """
    from bench.sweep import plan

    etiquette = {"max_queued": max_queued, "nice": nice, "begin": begin}
    return plan.plan_sweep(
        study, overrides, _convert_path(config_dir),
        repeats=repeats, prune=prune, autopilot=autopilot, etiquette=etiquette,
    )  # fmt: skip


def run(
    plan: "PlannedSweep",
    results: Folder = RESULTS,
    *,
    tell: TextListener = _ignore_text,
    follow: Follow = _ignore_text,
    describe: Describe = describe_result,
) -> "SweepResult":
    """Measure, on this machine, all points of a plan that have no final result yet. Return the outcomes of all points.

    `tell` is called with a text when a point ends, `follow` with the progress of the current run. The text contains one
    line about the run's result, which `describe` returns for the record of the run.
    """
    from bench.sweep import definition
    from bench.sweep.local_sweep import LocalSweep
    from bench.sweep.lost import finalize_lost
    from bench.sweep.status import read_state

    if plan.queues:
        raise UserError(f"launcher={plan.sweep.launcher['name']}", "submits to a queue", "use `submit`")
    folder = Path(results) / plan.sweep.study
    definition.write(folder, plan.sweep)
    finalize_lost(read_state(folder))  # records for attempts of an earlier call, which a crash of the machine ended
    wanted = list(plan.sweep.wanted())
    return LocalSweep(folder, wanted, retry=True, tell=tell, follow=follow, describe=describe).run()


def submit(plan: "PlannedSweep", results: Folder = RESULTS, *, notify: str | None = None) -> "SubmitResult":
    """Submit the points of a plan to its launcher's queue, within the limits of the cluster, and return at once.

    When the plan's autopilot (see `plan`) ends, it calls the command `notify` with the path of the study's summary.
    """
    from bench import launchers
    from bench.core.scheduling import SchedulerUnavailable
    from bench.sweep import definition
    from bench.sweep.submitting import submit_pending

    if not plan.queues:
        rule, remedy = "has no queue", f"use `run`, or choose {launchers.format_queueing()}"
        raise UserError(f"launcher={plan.sweep.launcher['name']}", rule, remedy)
    folder = Path(results) / plan.sweep.study
    written = definition.write(folder, plan.sweep)
    try:
        return submit_pending(folder, autopilot=plan.autopilot, notify=notify)
    except SchedulerUnavailable:
        raise  # the written sweep stays: `resume` submits it once the scheduler responds again
    except UserError:
        written.unlink(missing_ok=True)  # the submission was refused, so `resume` must not submit these points later
        raise


def resume(
    folder: Folder,
    *,
    autopilot: bool = False,
    notify: str | None = None,
    patience_s: float = 30.0,
    tell: TextListener = _ignore_text,
    follow: Follow = _ignore_text,
    describe: Describe = describe_result,
) -> "SubmitResult | SweepResult":
    """Resume a study: submit its points without a final result to the queue, or measure them on this machine. Return
    the submitted jobs or, for a study without a queue, the outcomes of all points.

    An attempt is one try at a run. First, a record is written for each attempt that ended without a record. The study
    limits the number of attempts. For a study with a queue, `autopilot` resubmits points until every point has a final
    result. When the autopilot ends, it calls `notify` (see `submit`). `patience_s` is the number of seconds to wait for
    a scheduler that does not respond. `tell`, `follow` and `describe` are as in `run`.
    """
    from bench import launchers
    from bench.sweep import definition
    from bench.sweep.local_sweep import LocalSweep
    from bench.sweep.lost import finalize_lost
    from bench.sweep.status import read_state
    from bench.sweep.submitting import submit_pending

    folder = Path(folder)
    sweeps = definition.read(folder)
    searched = definition.find_search(sweeps)
    if launchers.load(str(sweeps[-1].launcher["name"])).QUEUES:
        if searched:
            from bench.sweep.search import planning

            planning.add_trials(folder, searched)
        return submit_pending(folder, autopilot=autopilot, notify=notify, patience_s=patience_s)
    if autopilot:
        raise UserError("--autopilot", "the launcher of this sweep has no queue", "remove it")
    finalize_lost(read_state(folder))
    wanted = list(definition.merge_sweeps(sweeps).values())
    search = None
    if searched:
        from bench.sweep.local_sweep import LocalSearch
        from bench.sweep.search.planning import restore_search
        from bench.sweep.search.verdict import foresee

        if searched.points:  # the points of the space are predicted next, which may take half a minute
            tell(f"{folder.name} has {format_count(len(searched.points), 'trial')} so far; preparing the next")
        planned = restore_search(searched)
        search = LocalSearch(searched, planned.proposer, lambda *given: foresee(planned.pool, *given))
    return LocalSweep(folder, wanted, retry=False, tell=tell, follow=follow, describe=describe, search=search).run()


def plan_search(
    study: Study | Folder | None = None,
    overrides: "GivenOverrides" = (),
    *,
    config_dir: Folder | None = None,
    max_queued: int | None = None,
    nice: int | None = None,
    begin: str | None = None,
) -> "PlannedSearch":
    """Return a planned search, from the `search` section of a study. Nothing is started and no file is written. The
    arguments are as in `plan`."""
    from bench.sweep.search import planning

    etiquette = {"max_queued": max_queued, "nice": nice, "begin": begin}
    return planning.plan_search(study, overrides, _convert_path(config_dir), etiquette)


def search(
    plan: "PlannedSearch",
    results: Folder = RESULTS,
    *,
    autopilot: bool = False,
    notify: str | None = None,
    tell: TextListener = _ignore_text,
    follow: Follow = _ignore_text,
    describe: Describe = describe_result,
) -> "SubmitResult | SweepResult":
    """Start or continue a search. Without a queue, run its trials (tried configurations) here one by one until the
    search ends. With a queue, submit as many trials as the queue accepts and return at once. With `autopilot`, a small
    job submits the rest later, and then calls the command `notify`. `tell`, `follow` and `describe` are callbacks, as
    in `run`."""
    from bench.sweep.search import planning

    folder = Path(results) / plan.sweep.study
    planning.write_search(folder, plan.sweep)
    return resume(folder, autopilot=autopilot, notify=notify, tell=tell, follow=follow, describe=describe)


def search_verdict(folder: Folder) -> "SearchVerdict":
    """Return the state of a search in the folder of its study, with the best trials (tried configurations) so far."""
    from bench.sweep import definition
    from bench.sweep.search.planning import restore_search
    from bench.sweep.search.verdict import conclude
    from bench.sweep.snapshot import read_trial_results

    folder = Path(folder)
    sweep = definition.find_search(definition.read(folder))
    if sweep is None:
        raise UserError(str(folder), "contains no search", "name the folder of a search, or use `status`")
    return conclude(restore_search(sweep).pool, read_trial_results(folder, sweep))


def cancel(folder: Folder) -> list[str]:
    """Cancel all jobs of a study that are pending or running, and return their job ids."""
    from bench.sweep import submitting

    return submitting.cancel_jobs(Path(folder))


def unreadable(folder: Folder) -> list[Unreadable]:
    """Return the files of a study's folder that all other functions ignore because they cannot be read."""
    from bench.sweep import definition
    from bench.sweep.snapshot import read_snapshot

    definition.read(Path(folder))  # raises UserError for a folder without a study
    return list(read_snapshot(Path(folder)).unreadable)


class Status(NamedTuple):
    """State of every point (configuration) of a study, and of its jobs."""

    view: "StudyState"
    scheduler_away: str  # why the scheduler could not be queried; empty after a successful query

    def __repr__(self) -> str:
        away = f"; {self.scheduler_away}" if self.scheduler_away else ""
        return f"<Status of {self.view.folder}: {self.view.describe()}{away}>"

    @property
    def answered(self) -> bool:
        """Return True if every configuration of the study has a final result."""
        return all(point_status.final for point_status in self.view.statuses)

    @property
    def under_way(self) -> bool:
        """Return True if a job or a local run may still change the state of a point. While the scheduler is
        unavailable, return True for every study with a point that has no final result."""
        if self.scheduler_away:
            return not self.answered
        may_move = any(state.live and not state.stuck and not state.follows for state in self.view.queue.values())
        return may_move or any(one.state == "running" for one in self.view.statuses)

    @property
    def stuck(self) -> bool:
        """Return True if no queued job can start unless the user changes something: each job is blocked, or waits for a
        job that is blocked."""
        return not self.scheduler_away and bool(self.view.live) and not self.under_way


def status(folder: Folder) -> Status:
    """Return the state of a study. First write a record for each attempt that ended without a record.

    While the scheduler is unavailable, no attempt is recorded as ended, and only the study's folder is read.
    """
    from bench.core.scheduling import SchedulerUnavailable
    from bench.sweep.lost import finalize_lost, keep_ends
    from bench.sweep.status import read_state

    folder = Path(folder)
    try:
        view = read_state(folder)
    except UserError as error:
        return Status(read_state(folder, ask=False), str(error))  # raises again if the folder is the cause
    # Without write permission, or if the scheduler is unavailable meanwhile, show the state without new records.
    with contextlib.suppress(OSError, SchedulerUnavailable):
        concluded, ended = finalize_lost(view), keep_ends(view)
        if concluded or ended:
            view = read_state(folder)
    return Status(view, "")


def prepare(
    study: Study | Folder | None = None,
    overrides: "GivenOverrides" = (),
    *,
    results: Folder = RESULTS,
    config_dir: Folder | None = None,
    offline: bool = False,
    architectures: Sequence[str] | None = None,
    follow: Follow = _ignore_text,
) -> "Iterator[Check]":
    """Download data and tokenizers and compile CUDA ops, so that nodes without a network can use them, and check all of
    these. Yield the result of each check as soon as it is known.

    With `offline`, only check what is already on the disk. `architectures` are the CUDA compute capabilities, such as
    8.0, for which ops are compiled; the default is that of the local GPU. For a launcher with a queue, a job script
    that runs the checks on a node is written below `results`. `follow` receives the name of the current step.
    """
    from bench.sweep import prepare as preparation

    return preparation.prepare(
        study, overrides, _convert_path(config_dir), Path(results),
        offline=offline, build_for=architectures, follow=follow,
    )  # fmt: skip


def predict(
    study: Study | Folder | None = None,
    overrides: "GivenOverrides" = (),
    *,
    config_dir: Folder | None = None,
    straggler: float = 1.0,
    data_wait_s: float = 0.0,
    rehearsed_s: float | None = None,
    software: str | None = None,
) -> "list[Prediction]":
    """Return the predicted memory and step time of every point. A point that exceeds memory has no step time. As in
    `plan`, points on this machine's CPU have short sequences and the precision of the smoke study by default.

    `straggler` is the computation time of the slowest rank divided by that of a normal rank. `data_wait_s` is the
    seconds per step spent waiting for input batches. `rehearsed_s` is the seconds of computation per step that a
    rehearsal measured on the same kind of machine. `software` (eager, usual or fused) is how well the training
    software's kernels are optimised; an override may also set it. The default, usual, has the widest interval.
    """
    from bench.sweep import prediction

    return prediction.predict_points(
        study, overrides, _convert_path(config_dir),
        straggler=straggler, data_wait_s=data_wait_s, rehearsed_s=rehearsed_s, software=software,
    )  # fmt: skip


def point(overrides: "GivenOverrides" = (), *, study: str = "adhoc", config_dir: Folder | None = None) -> "SingleRun":
    """Return a checked configuration that `measure` can run here. `study` is the name of the folder for its results."""
    from bench.sweep import plan

    return plan.plan_point(overrides, study, _convert_path(config_dir))


def rehearsal(
    overrides: "GivenOverrides" = (),
    *,
    rank: int = 0,
    shapes_only: bool = False,
    study: str = "rehearsals",
    config_dir: Folder | None = None,
) -> "SingleRun":
    """Return a checked rehearsal, which runs one rank of a job alone with simulated collectives. The job may need more
    devices than this machine has. With `shapes_only`, the rank may also need more memory than this machine has. `study`
    is the name of the folder for the results."""
    from bench.sweep import plan

    return plan.plan_rehearsal(overrides, rank, _convert_path(config_dir), shapes_only=shapes_only, study=study)


def measure(made: "SingleRun", results: Folder = RESULTS, *, follow: Follow = _ignore_text) -> "MeasuredRun":
    """Run `made`, a result of `point` or `rehearsal`, as a new repeat, and return the run's folder and its record."""
    from bench.core import store
    from bench.sweep import local_attempt

    study = Path(results) / made.requested.circumstance.study
    try:  # fail before the wait for the machine's lock, which may take minutes
        study.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store.build_unwritable_error(study, error) from error
    with local_attempt.take_turn(made.requested, follow) as note:
        return local_attempt.make_attempt(made.requested, study, note, new_repeat=True)


def rehearse(
    overrides: "GivenOverrides" = (),
    *,
    rank: int = 0,
    shapes_only: bool = False,
    results: Folder = RESULTS,
    config_dir: Folder | None = None,
    follow: Follow = _ignore_text,
) -> "MeasuredRun":
    """Run one rank of a job alone, with simulated collectives, and return the run's folder and its record. The job may
    need more devices than this machine has. With `shapes_only`, the run computes nothing, and counts the memory of its
    tensors without allocating it."""
    made = rehearsal(overrides, rank=rank, shapes_only=shapes_only, config_dir=config_dir)
    return measure(made, results, follow=follow)


def advise(question: "GivenOverrides", *, results: Folder | None = None, config_dir: Folder | None = None) -> "Answer":
    """Return advice for a training: the best engine, micro-batch and number of nodes. The result also has the best
    candidate for every engine, the best candidate for every number of nodes, and the rejected candidates.

    `question` consists of overrides and of these keywords: tokens, samples, epochs, loss, law (a scaling law), best
    (shortest or cheapest), deadline, node_hours, price, budget, storage, node_mtbf, restart, max_global_batch, software
    (eager, usual or fused). `zeroscale advise --help` explains them. Runs in `results` on the same machine take
    precedence over predictions. The default of `results` is results/runs if that folder exists.
    """
    from bench.sweep.advise import questions, search

    query = questions.parse_query(questions.format_question(question))
    return search.find_answer(query, _convert_path(config_dir), _convert_path(results))


def compare_places(
    question: "GivenOverrides", *, results: Folder | None = None, config_dir: Folder | None = None
) -> "PlaceTable":
    """Return an entry for each combination of a place (own, rented or spot nodes) and a method (full training or
    adapters). An entry has the hours and the cost of a training, both with intervals, and whether a deadline is met.

    `question` is as in `advise`, but without machine, devices_per_node, price, budget, node_hours and best. The keyword
    `where` lists the places: own:MACHINE:DEVICES_PER_NODE:PRICE_PER_DEVICE_HOUR, rented:NODE_TYPE, spot:NODE_TYPE.
    """
    from bench.sweep.advise import places, questions

    texts = questions.format_question(question)
    return places.compare_places(texts, _convert_path(config_dir), _convert_path(results))
