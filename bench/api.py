"""The Python face: what the command does, from plain arguments to values, for scripts and notebooks.

    from bench import api

    plan = api.plan("smoke", {"engine": ["ddp", "zero2"]})
    api.run(plan, results="results/runs")
    api.status("results/runs/smoke").answered
    api.resume("results/runs/smoke")
    api.predict(overrides="model=mt5_xl engine=zero3 devices_per_node=8 machine=h100")[0].time

Overrides are a text as on the command line, a list of such texts, or a mapping, in which a list stands for several
values. Nothing here prints; whatever cannot be done raises a UserError.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.store import Unreadable
from bench.core.study import Study
from bench.core.terminal import Progress

if TYPE_CHECKING:  # each function imports what it needs: `zeroscale status` needs no Hydra, and `run` no scheduler
    from bench.core.errors import Check
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
"""Hears what is going on, a text at a time."""
Follow = Callable[[Progress], None]
"""Hears again and again how far the run under way is."""


def _ignore_text(what: object) -> None:
    """Say nothing."""


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
    """Return a sweep with every point decoded, checked and predicted; nothing starts and nothing is written.

    `study` is the name of one in conf/study, a path to a file, or a Study; without one the overrides span the points.
    `repeats` replaces the study's, which are one where no study is named. `prune` leaves out what a smaller micro-batch
    or a prediction says cannot fit. The rest is for a launcher with a queue: an autopilot that goes on by itself, at
    most `max_queued` jobs at a time, a lower priority, no start before `begin`.
    """
    from bench.sweep import plan

    etiquette = {"max_queued": max_queued, "nice": nice, "begin": begin}
    return plan.plan_sweep(
        study, overrides, _convert_path(config_dir),
        repeats=repeats, prune=prune, autopilot=autopilot, etiquette=etiquette,
    )  # fmt: skip


def run(
    plan: "PlannedSweep", results: Folder = RESULTS, *, tell: TextListener = _ignore_text, follow: Follow = _ignore_text
) -> "SweepResult":
    """Measure what of a plan has no answer yet, here and now; return how its points ended.

    `tell` hears every point that ends, `follow` how far the one under way is.
    """
    from bench.sweep import definition
    from bench.sweep.local_sweep import LocalSweep
    from bench.sweep.lost import finalize_lost
    from bench.sweep.status import read_state

    if plan.queues:
        raise UserError(f"launcher={plan.sweep.launcher['name']}", "starts elsewhere", "submit the plan")
    folder = Path(results) / plan.sweep.study
    definition.write(folder, plan.sweep)
    finalize_lost(read_state(folder))  # what a machine that went down left of an earlier call
    wanted = list(plan.sweep.wanted())
    return LocalSweep(folder, wanted, retry=True, tell=tell, follow=follow).run()


def submit(plan: "PlannedSweep", results: Folder = RESULTS, *, notify: str | None = None) -> "SubmitResult":
    """Submit a plan to its launcher's queue, as far as the limits allow, and return at once.

    `notify` is a command that the plan's autopilot calls at its end, with the path of the summary that it wrote.
    """
    from bench import launchers
    from bench.core.scheduling import SchedulerUnavailable
    from bench.sweep import definition
    from bench.sweep.submitting import submit_pending

    if not plan.queues:
        rule, remedy = "has no queue", f"run the plan, or choose {launchers.format_queueing()}"
        raise UserError(f"launcher={plan.sweep.launcher['name']}", rule, remedy)
    folder = Path(results) / plan.sweep.study
    written = definition.write(folder, plan.sweep)
    try:
        return submit_pending(folder, autopilot=plan.autopilot, notify=notify)
    except SchedulerUnavailable:
        raise  # the sweep is resumed when it answers again
    except UserError:
        written.unlink(missing_ok=True)  # refused: a later `resume` goes on with what was taken
        raise


def resume(
    folder: Folder,
    *,
    autopilot: bool = False,
    notify: str | None = None,
    patience_s: float = 30.0,
    tell: TextListener = _ignore_text,
    follow: Follow = _ignore_text,
) -> "SubmitResult | SweepResult":
    """Start what of a study has no final answer yet, and never what has one: submitted to its queue, or measured here.

    Return what was submitted, or how its points ended. Attempts that ended without a record get one first; every point
    may be tried as often as its study allows. `autopilot`, `notify` and `patience_s` are for a queue: go on by itself,
    call a command at the end (see `submit`), and wait so long for a scheduler that does not answer. `tell` and `follow`
    are those of `run`.
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
    return LocalSweep(folder, wanted, retry=False, tell=tell, follow=follow, search=search).run()


def plan_search(
    study: Study | Folder | None = None,
    overrides: "GivenOverrides" = (),
    *,
    config_dir: Folder | None = None,
    max_queued: int | None = None,
    nice: int | None = None,
    begin: str | None = None,
) -> "PlannedSearch":
    """Return the search of a study's `search` section; nothing starts and nothing is written. The rest is as for
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
) -> "SubmitResult | SweepResult":
    """Try one point after the other until the search is at its end, here and now; or submit as many trials as the
    queue may have at a time, and return at once. A search that was ended goes on where it was.
    """
    from bench.sweep.search import planning

    folder = Path(results) / plan.sweep.study
    planning.write_search(folder, plan.sweep)
    return resume(folder, autopilot=autopilot, notify=notify, tell=tell, follow=follow)


def search_verdict(folder: Folder) -> "SearchVerdict":
    """Return what the search in a study's folder has found so far."""
    from bench.sweep import definition
    from bench.sweep.search.planning import restore_search
    from bench.sweep.search.verdict import conclude
    from bench.sweep.snapshot import read_trial_results

    folder = Path(folder)
    sweep = definition.find_search(definition.read(folder))
    if sweep is None:
        raise UserError(str(folder), "holds no search", "give the folder of one, or ask for its `status`")
    return conclude(restore_search(sweep).pool, read_trial_results(folder, sweep))


def cancel(folder: Folder) -> list[str]:
    """Cancel every job of a study that its scheduler still has, and no other; return their numbers."""
    from bench.sweep import submitting

    return submitting.cancel_jobs(Path(folder))


def unreadable(folder: Folder) -> list[Unreadable]:
    """Return the files of a study's folder that do not hold what their names say: they count as not there."""
    from bench.sweep import definition
    from bench.sweep.snapshot import read_snapshot

    definition.read(Path(folder))  # raises for a folder of no study
    return list(read_snapshot(Path(folder)).unreadable)


class Status(NamedTuple):
    """Where every point of a study stands."""

    view: "StudyState"
    scheduler_away: str  # why the scheduler was not asked, or did not answer; empty: it did

    @property
    def answered(self) -> bool:
        """Whether every point has its final answer."""
        return all(point_status.final for point_status in self.view.statuses)

    @property
    def under_way(self) -> bool:
        """Whether something may still change by itself; of a scheduler that does not answer nobody knows."""
        if self.scheduler_away:
            return not self.answered
        may_move = any(state.live and not state.stuck and not state.follows for state in self.view.queue.values())
        return may_move or any(one.state == "running" for one in self.view.statuses)

    @property
    def stuck(self) -> bool:
        """Whether all that is left in the queue waits for somebody to change something, or for what does."""
        return not self.scheduler_away and bool(self.view.live) and not self.under_way


def status(folder: Folder) -> Status:
    """Return where a study stands, after giving every attempt that ended without a record the one it should have left.

    While its scheduler does not answer, nothing can be told dead, and what the folder says is returned.
    """
    from bench.sweep.lost import finalize_lost, keep_ends
    from bench.sweep.status import read_state

    folder = Path(folder)
    try:
        view = read_state(folder)
    except UserError as error:
        return Status(read_state(folder, ask=False), str(error))  # raises again if it is the folder that is wrong
    with contextlib.suppress(OSError):  # a folder that may only be read is shown as it is
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
    """Stage data, tokenizers and compiled ops that the points need where there is no network, and check them; return
    what was found, one thing at a time, while the work goes on.

    `offline` only checks. `architectures` are the GPUs' to build for, such as 8.0; by default that of the GPU here. For
    a launcher with a queue the job that checks on a node is written below `results`. `follow` hears what is going on.
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
    """Return the memory and the step time that are predicted of every point; no time of a point that does not fit.

    The slowest rank computes `straggler` times as long, a step waits `data_wait_s` for its batches, and `rehearsed_s`
    is what a rehearsal on such a machine says that a step computes. `software` is the class of the software that
    trains: eager, usual or fused. It may stand among the overrides instead; without it the class is usual, whose
    interval is the widest.
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
    """Return one point that is to be measured here, checked; `study` is the folder of its results."""
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
    """Return the rehearsal of one rank of a job that may be larger than this machine, checked; with `shapes_only` the
    rank may be larger too. `study` is the folder of its results."""
    from bench.sweep import plan

    return plan.plan_rehearsal(overrides, rank, _convert_path(config_dir), shapes_only=shapes_only, study=study)


def measure(made: "SingleRun", results: Folder = RESULTS, *, follow: Follow = _ignore_text) -> "MeasuredRun":
    """Run what `point` or `rehearsal` made to its end, always anew; return its folder and its record."""
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
    """Run one rank of a job that may be larger than this machine, its collectives only pretended; with `shapes_only`
    nothing is computed either: memory is counted, and not used."""
    made = rehearsal(overrides, rank=rank, shapes_only=shapes_only, config_dir=config_dir)
    return measure(made, results, follow=follow)


def advise(
    question: "GivenOverrides",
    *,
    results: Folder | None = None,
    config_dir: Folder | None = None,
) -> "Answer":
    """Return which stage, micro-batch and node count to take, its rivals, and what was left out.

    `question` has overrides and the plain words of `zeroscale advise`: tokens, samples, loss, law, best,
    deadline, node_hours, price, budget, storage, node_mtbf, restart, max_global_batch, software. Runs in `results`
    on the same machine outrank formulas; by default those of results/runs, if any.
    """
    from bench.sweep.advise import questions, search
    from bench.sweep.inputs import format_overrides

    return search.find_answer(
        questions.parse_query(format_overrides(question)),
        _convert_path(config_dir),
        _convert_path(results),
    )
