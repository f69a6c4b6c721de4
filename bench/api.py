"""The Python interface: everything that the command does, for scripts and notebooks.

    from bench import api

    plan = api.plan("smoke", {"engine": ["ddp", "zero2"]})
    api.run(plan, results="results/runs")
    api.status("results/runs/smoke").answered
    api.resume("results/runs/smoke")
    api.predict(overrides="model=mt5_xl engine=zero3 devices_per_node=8 machine=h100")[0].time

Overrides are a text as on the command line, a list of such texts, or a mapping, in which a list stands for several
values. Nothing here prints. A UserError is raised for a request that cannot be carried out.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.formatting import describe_result
from bench.core.store import Unreadable
from bench.core.study import Study
from bench.core.terminal import Progress

if TYPE_CHECKING:  # functions import what they need: `zeroscale status` needs no Hydra, `run` no scheduler
    from bench.core.errors import Check
    from bench.core.record import RunRecord
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
    "Progress", "Status", "Study", "UserError", "advise", "cancel", "measure", "plan", "plan_search", "point",
    "predict", "prepare", "rehearsal", "rehearse", "resume", "run", "search", "search_verdict", "status", "submit",
    "unreadable",
]  # fmt: skip

Folder = str | Path
TextListener = Callable[[str], None]
"""Called with a text for each event."""
Follow = Callable[[Progress], None]
"""Progress callback of the current run."""
Describe = Callable[["RunRecord"], str]
"""Returns the result of a run in one line."""


def _ignore_text(what: object) -> None:
    """Do nothing."""


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
    """Return a sweep with every point decoded, checked and predicted. Starts nothing and writes nothing.

    `study` is the name of a file in conf/study, a path, or a Study; without it the overrides span the points. `repeats`
    replaces the number of repeats of the study, or 1 without a study. `prune` skips points that cannot fit: a smaller
    micro-batch ran out of memory, or a prediction excludes them. The other arguments are for a launcher with a queue:
    an autopilot that resubmits, at most `max_queued` jobs at a time, a lower priority, no start before `begin`.
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
    """Measure the points of a plan that have no answer yet on this machine; return the outcomes of all points.

    `tell` is called with a text when a point ends, `follow` with the progress of the current run. `describe` returns
    the result of a run for that text.
    """
    from bench.sweep import definition
    from bench.sweep.local_sweep import LocalSweep
    from bench.sweep.lost import finalize_lost
    from bench.sweep.status import read_state

    if plan.queues:
        raise UserError(f"launcher={plan.sweep.launcher['name']}", "submits to a queue", "use `submit`")
    folder = Path(results) / plan.sweep.study
    definition.write(folder, plan.sweep)
    finalize_lost(read_state(folder))  # attempts of an earlier call that a crash of the machine ended
    wanted = list(plan.sweep.wanted())
    return LocalSweep(folder, wanted, retry=True, tell=tell, follow=follow, describe=describe).run()


def submit(plan: "PlannedSweep", results: Folder = RESULTS, *, notify: str | None = None) -> "SubmitResult":
    """Submit a plan to its launcher's queue, within the limits of the cluster, and return at once.

    `notify` is a command that the plan's autopilot calls at its end, with the path of its summary as argument.
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
        raise  # the sweep is resumed when it answers again
    except UserError:
        written.unlink(missing_ok=True)  # refused: `resume` must not submit these points later
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
    """Start the points of a study that have no final answer yet: submit them to the queue, or measure them here.

    Return the submitted jobs, or the outcomes of all points. Attempts that ended without a record get a record first.
    A point runs at most as often as its study allows. With a queue, `autopilot` resubmits until all points are
    answered, `notify` is the command that it calls at its end (see `submit`), and `patience_s` are the seconds to wait
    for a scheduler that does not answer. `tell`, `follow` and `describe` are as in `run`.
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
        raise UserError("--autopilot", "this sweep has no queue", "leave it out")
    finalize_lost(read_state(folder))
    wanted = list(definition.merge_sweeps(sweeps).values())
    search = None
    if searched:
        from bench.sweep.local_sweep import LocalSearch
        from bench.sweep.search.planning import restore_search

        search = LocalSearch(searched, restore_search(searched).proposer)
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
    """Return the search of a study's `search` section. Starts nothing and writes nothing. The arguments are as in
    `plan`."""
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
    """Run one trial after the other on this machine until the search has ended; or submit as many trials as the queue
    may hold, and return at once. A search that was interrupted is continued.
    """
    from bench.sweep.search import planning

    folder = Path(results) / plan.sweep.study
    planning.write_search(folder, plan.sweep)
    return resume(folder, autopilot=autopilot, notify=notify, tell=tell, follow=follow, describe=describe)


def search_verdict(folder: Folder) -> "SearchVerdict":
    """Return the best trials so far of the search in a study's folder."""
    from bench.sweep import definition
    from bench.sweep.search.planning import restore_search
    from bench.sweep.search.verdict import conclude
    from bench.sweep.snapshot import read_trial_results

    folder = Path(folder)
    sweep = definition.find_search(definition.read(folder))
    if sweep is None:
        raise UserError(str(folder), "holds no search", "give the folder of a search, or use `status`")
    return conclude(restore_search(sweep).pool, read_trial_results(folder, sweep))


def cancel(folder: Folder) -> list[str]:
    """Cancel all jobs of a study that its scheduler still has, and no others; return their numbers."""
    from bench.sweep import submitting

    return submitting.cancel_jobs(Path(folder))


def unreadable(folder: Folder) -> list[Unreadable]:
    """Return the files of a study's folder that cannot be read, and are ignored."""
    from bench.sweep import definition
    from bench.sweep.snapshot import read_snapshot

    definition.read(Path(folder))  # raises UserError for a folder without a study
    return list(read_snapshot(Path(folder)).unreadable)


class Status(NamedTuple):
    """State of every point of a study."""

    view: "StudyState"
    scheduler_away: str  # why the scheduler was not asked, or did not answer; empty: it did

    @property
    def answered(self) -> bool:
        """Return whether every point has its final answer."""
        return all(point_status.final for point_status in self.view.statuses)

    @property
    def under_way(self) -> bool:
        """Return whether a job or a local run may still change the state; taken for granted, unless all points are
        answered, while the scheduler is unavailable."""
        if self.scheduler_away:
            return not self.answered
        may_move = any(state.live and not state.stuck and not state.follows for state in self.view.queue.values())
        return may_move or any(one.state == "running" for one in self.view.statuses)

    @property
    def stuck(self) -> bool:
        """Return whether all jobs left in the queue need an intervention, or depend on a job that does."""
        return not self.scheduler_away and bool(self.view.live) and not self.under_way


def status(folder: Folder) -> Status:
    """Return the state of a study, after writing records for attempts that ended without a record.

    While its scheduler is unavailable, no attempt counts as dead, and the state follows from the folder alone.
    """
    from bench.sweep.lost import finalize_lost, keep_ends
    from bench.sweep.status import read_state

    folder = Path(folder)
    try:
        view = read_state(folder)
    except UserError as error:
        return Status(read_state(folder, ask=False), str(error))  # raises again if the folder is the cause
    with contextlib.suppress(OSError):  # a read-only folder is shown as it is
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
    """Stage data, tokenizers and compiled ops for nodes without a network, and check them; yield one finding at a time.

    `offline` only checks. `architectures` are compute capabilities to build ops for, such as 8.0; by default that of
    the local GPU. For a launcher with a queue, a job script that checks on a node is written below `results`. `follow`
    is called with the current step.
    """
    from bench.sweep import prepare as preparation

    return preparation.prepare(
        study,
        overrides,
        _convert_path(config_dir),
        Path(results),
        offline=offline,
        build_for=architectures,
        follow=follow,
    )


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
    """Return the predicted memory and step time of every point; no time for a point that does not fit.

    `straggler` is the factor by which the slowest rank computes longer, `data_wait_s` the seconds that a step waits for
    its batches, `rehearsed_s` the seconds that a step computes by a rehearsal on such a machine. `software` is the
    class of the training software: eager, usual or fused; it may be an override instead. The default, usual, has the
    widest interval.
    """
    from bench.sweep import prediction

    return prediction.predict_points(
        study,
        overrides,
        _convert_path(config_dir),
        straggler=straggler,
        data_wait_s=data_wait_s,
        rehearsed_s=rehearsed_s,
        software=software,
    )


def point(overrides: "GivenOverrides" = (), *, study: str = "adhoc", config_dir: Folder | None = None) -> "SingleRun":
    """Return one point to measure on this machine, checked; `study` is the folder of its results."""
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
    """Return the rehearsal of one rank of a job, checked. The job may be larger than this machine; with `shapes_only`
    the rank may be larger too. `study` is the folder of its results."""
    from bench.sweep import plan

    return plan.plan_rehearsal(overrides, rank, _convert_path(config_dir), shapes_only=shapes_only, study=study)


def measure(made: "SingleRun", results: Folder = RESULTS, *, follow: Follow = _ignore_text) -> "MeasuredRun":
    """Run the result of `point` or `rehearsal` as a new repeat; return the run's folder and its record."""
    from bench.core import store
    from bench.sweep import local_attempt

    study = Path(results) / made.requested.circumstance.study
    try:  # before the wait for the lock, which may take minutes
        study.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store.build_unwritable_error(study, error) from error
    return local_attempt.run_attempt(made.requested, study, follow, new_repeat=True)


def rehearse(
    overrides: "GivenOverrides" = (),
    *,
    rank: int = 0,
    shapes_only: bool = False,
    results: Folder = RESULTS,
    config_dir: Folder | None = None,
    follow: Follow = _ignore_text,
) -> "MeasuredRun":
    """Run one rank of a job that may be larger than this machine, with simulated collectives. With `shapes_only`
    nothing is computed, and memory is counted without being used."""
    made = rehearsal(overrides, rank=rank, shapes_only=shapes_only, config_dir=config_dir)
    return measure(made, results, follow=follow)


def advise(question: "GivenOverrides", *, results: Folder | None = None, config_dir: Folder | None = None) -> "Answer":
    """Return the advised stage, micro-batch and node count, its rivals, and the rejected candidates.

    `question` has overrides and the words of `zeroscale advise`: tokens, samples, loss, law, best, deadline,
    node_hours, price, budget, storage, node_mtbf, restart, max_global_batch, software. Runs in `results` on the same
    machine outrank formulas; by default those of results/runs, if there are any.
    """
    from bench.sweep.advise import questions, search
    from bench.sweep.inputs import format_overrides

    return search.find_answer(
        questions.parse_query(format_overrides(question)), _convert_path(config_dir), _convert_path(results)
    )
