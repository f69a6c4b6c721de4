"""Measure every point of a study, or of comma lists: here one after the other, or submitted to a scheduler.

  zeroscale sweep study=smoke
  zeroscale sweep model=tiny engine=ddp,zero1,zero2,zero3 batch.micro=2,4,8 --dry-run
  zeroscale sweep study=paper launcher=slurm launcher.gpus=--gres=gpu:{devices} --dry-run
  zeroscale sweep study=strong_scaling launcher=slurm_mine --config-dir my --autopilot

Comma lists without a study take, on a CPU, the sizes and the window of the smoke study, as `zeroscale run` does. Each
of their points runs once, which is indicative: the last line says what five repeats take.
Points that already have a final answer on this machine in this environment are skipped, so that a sweep that was
interrupted goes on where it ended. A point that is predicted far out of memory is recorded as infeasible and not run,
unless `--no-prune` is given. With a scheduler the command returns at once: `zeroscale status` shows how it goes.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import api, launchers
from bench.cli import options
from bench.config.compose import Expansion
from bench.core import terminal
from bench.core.files import RESULTS
from bench.core.formatting import format_count
from bench.core.quantities import compute_node_hours
from bench.core.spec import RunSpec, read_protocol
from bench.core.store import RECORD, read_record
from bench.measure import environment
from bench.predict.memory import PROCESS_BYTES
from bench.sweep import jobs, submitting
from bench.sweep.definition import SweepDefinition
from bench.sweep.forecast import Forecast, MemoryForecast, compute_minutes, explain_unpredicted
from bench.sweep.jobs import Job
from bench.sweep.local_sweep import SweepResult
from bench.sweep.pruning import is_far_out_of_memory
from bench.sweep.status import PointStatus
from bench.sweep.submitting import JobBatcher

if TYPE_CHECKING:
    from bench.sweep.plan import PlannedSweep


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    help_text = "runs of every point, in random order; default: the study's, and one without a study"
    parser.add_argument("--repeats", type=options.positive("--repeats"), metavar="N", help=help_text)
    parser.add_argument(
        "--no-prune",
        action="store_true",
        help="measure also what a smaller micro-batch or a prediction says cannot fit",
    )
    options.add_autopilot(parser)
    help_text = "at most N of the sweep's jobs in the queue"
    parser.add_argument("--max-queued", type=options.positive("--max-queued"), metavar="N", help=help_text)
    parser.add_argument("--nice", type=int, metavar="N", help="lower the priority of the jobs")
    parser.add_argument("--begin", metavar="WHEN", help="start no job before, as the scheduler takes it: 20:00")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point has a final answer and every answer is `ok`; with a scheduler, if it took the jobs."""
    options.check_notify(args)
    plan = api.plan(
        overrides=args.overrides,
        config_dir=args.config_dir,
        repeats=args.repeats,
        prune=not args.no_prune,
        autopilot=args.autopilot,
        max_queued=args.max_queued,
        nice=args.nice,
        begin=args.begin,
    )
    if not args.json:
        options.print_chosen(plan.chosen)
    folder: Path = args.results / plan.sweep.study
    if args.dry_run:
        print(format_json(plan.sweep) if args.json else format_text(plan.sweep, plan.expansion, folder))
        _print_repeats(args, plan)
        return 0
    if plan.queues:
        for line in PredictionText(plan.sweep).warnings():
            print(line, file=sys.stderr)
        done = api.submit(plan, results=args.results, notify=args.notify)
        print(format_submitted(done, folder, as_json=args.json))
        _print_repeats(args, plan)
        return 0 if done.good else 1
    with terminal.progress(quiet=args.json) as follow:
        ended = api.run(plan, results=args.results, tell=terminal.build_printer(quiet=args.json), follow=follow)
    print(format_ended(ended, as_json=args.json))
    if not args.json:
        options.print_answer(ended.folder)
    _print_repeats(args, plan)
    return 0 if ended.good else 1


def _print_repeats(args: argparse.Namespace, plan: "PlannedSweep") -> None:
    """Print what five repeats of comma lists take, whose points run once."""
    several = len(plan.sweep.points) > 1 and max(repeat for repeat, _ in plan.sweep.order) == 0
    if several and plan.sweep.study == "adhoc" and not args.json:
        print(format_repeats(plan.sweep, args.overrides, args.results, args.config_dir))


def format_json(sweep: SweepDefinition) -> str:
    """Return every repeat of every point in order, for another program."""
    predictions = PredictionText(sweep)
    plain = [
        {
            "config_id": key.config_id,
            "repeat": key.repeat,
            "nodes": point.nodes,
            "time_limit_min": point.time_limit_min,
            "overrides": point.overrides,
            "predicted": predictions.plain(index),
            "spec": RunSpec.model_validate(point.spec).model_dump(mode="json", by_alias=True),
        }
        for (key, _, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
    ]
    return json.dumps(plain, indent=1)


def format_text(sweep: SweepDefinition, expansion: Expansion, folder: Path) -> str:
    """Return every point in order, what was left out, and what would be submitted."""
    predictions = PredictionText(sweep)
    planned = _plan_jobs(sweep, predictions) if launchers.load(str(sweep.launcher["name"])).QUEUES else []
    script = {requested.key: f"job {number}" for number, job in enumerate(planned, 1) for requested in job.points}
    lines = []
    for (key, _, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True):
        limit = f"  limit {point.time_limit_min:.3g} min" if point.time_limit_min else ""
        lines.append(f"{point.line}  repeat {key.repeat}{limit}" + (f"  {script[key]}" if key in script else ""))
        lines.append(predictions.line(index))
    lines += [f"left out by {rule}: {format_count(number, 'point')}" for rule, number in expansion.excluded.items()]
    if expansion.merged:
        lines.append(f"the same as another: {format_count(expansion.merged, 'point')}")
    lines += _format_scripts(sweep, planned, folder) if planned else []
    lines += predictions.summary()
    if planned:
        hours = sum(job.nodes * job.time_limit_min * (len(job.points) if job.mode == "array" else 1) for job in planned)
        jobs_text = f"{format_count(len(sweep.order), 'point')} in {format_count(len(planned), 'job')}"
        hours_text = f"{hours / 60:.1f} node-hours if all of them use their whole time limit"
        lines.append(f"{jobs_text}, {hours_text}; nothing submitted")
    else:
        lines.append(f"{format_count(len(sweep.order), 'point')}, nothing started")
    return "\n".join(lines)


ENOUGH = 5
"""Repeats that comparing configurations takes as a rule."""


def format_repeats(sweep: SweepDefinition, overrides: Sequence[str], results: Path, config_dir: Path | None) -> str:
    """Return the command that repeats every point, and the node-hours that it takes: by the runs that are there, where
    every point has one, else as predicted."""
    command = ["zeroscale", "sweep", *overrides, "--repeats", str(ENOUGH)]
    command += ["--results", str(results)] if results != RESULTS else []
    command += ["--config-dir", str(config_dir)] if config_dir else []
    paths = [sorted((results / sweep.study / key.config_id).glob(f"0.*/{RECORD}")) for key, _, _ in sweep.wanted()]
    taken = [compute_node_hours(read_record(path)) for found in paths for path in found]
    known = [hours for hours in taken if hours is not None]
    predicted = PredictionText(sweep).format_node_hours(ENOUGH)
    hours = f"{ENOUGH * sum(known):.2g} node-hours" if all(paths) and len(known) == len(taken) else predicted
    return f"one run of each is indicative; {ENOUGH} of each take {hours}: {shlex.join(command)}"


def _plan_jobs(sweep: SweepDefinition, predictions: "PredictionText") -> list[Job]:
    """Return the jobs as they would be submitted to a cluster without limits of its own: planning asks nobody."""
    waiting = [
        PointStatus(key, point, sweep, "waiting", "", "", 0, "")
        for (key, _, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
        if not predictions.infeasible(index)
    ]
    _, options = submitting.load_launcher(sweep)
    return JobBatcher(options).jobs(waiting)


def _format_scripts(sweep: SweepDefinition, planned: list[Job], folder: Path) -> list[str]:
    """Return the script of the first job of every kind; jobs of one kind differ only in folder and time limit."""
    (launcher, options), kinds = submitting.load_launcher(sweep), Counter(map(_get_job_kind, planned))
    lines, shown_kinds = [], set()
    for number, job in enumerate(planned, 1):
        if _get_job_kind(job) not in shown_kinds:
            shown_kinds.add(_get_job_kind(job))
            where = (folder / jobs.FOLDER / job.name).resolve()
            script = "".join(submitting.plan_job(job, where, options, launcher).files.values())
            lines += ["", f"── script of job {number}, {kinds[_get_job_kind(job)]} of this kind", script.rstrip(), ""]
    return lines


def _get_job_kind(job: Job) -> tuple[Any, ...]:
    return job.nodes, job.devices_per_node, job.mode


def format_ended(done: SweepResult, *, as_json: bool) -> str:
    """Return how the points of a sweep here ended."""
    if as_json:
        plain = {
            "study": done.folder.name,
            "outcomes": done.outcomes,
            "skipped": done.skipped,
            "unanswered": done.unanswered,
            "folder": str(done.folder),
        }
        return json.dumps(plain)
    outcomes = ", ".join(f"{number} {kind}" for kind, number in done.outcomes.most_common())
    parts = [outcomes, f"{done.skipped} already had an answer"]
    parts += [f"{done.unanswered} without an answer: go on with zeroscale resume"] if done.unanswered else []
    return "; ".join([*filter(None, parts), str(done.folder)])


def format_submitted(done: submitting.SubmitResult, folder: Path, *, as_json: bool) -> str:
    """Return what was submitted, what was settled meanwhile, and what comes next."""
    if as_json:
        return json.dumps(
            {
                "folder": str(folder),
                "submitted": [
                    {"job": number, "name": job.name, "points": len(job.points)} for job, number in done.submitted
                ],
                "concluded": done.concluded,
                "pruned": done.without_run.get("pruned", 0),
                "infeasible": done.without_run.get("infeasible", 0),
                "left": len(done.left),
                "impossible": done.impossible,
                "why_left": done.why_left,
                "queued": done.queued,
                "autopilot": done.autopilot,
                "autopilot_refused": done.autopilot_refused or None,
                "cut_short": done.cut_short or None,
            }
        )
    lines = [
        f"job {number}: {format_count(len(job.points), 'point')}, "
        f"{format_count(job.nodes, 'node')} × {job.devices_per_node}, "
        f"at most {job.time_limit_min} min{' each' if job.mode == 'array' else ''}  {folder / jobs.FOLDER / job.name}"
        for job, number in done.submitted
    ]
    if done.concluded:
        lines.append(f"recorded now: {format_count(done.concluded, 'attempt')} that had left no record")
    lines += [f"not to be run ({kind}): {format_count(number, 'point')}" for kind, number in done.without_run.items()]
    if done.impossible:
        never = format_count(done.impossible, "point")
        lines.append(f"never to start on this cluster: {never} ({done.why_left})")
    if len(done.left) > done.impossible:
        go_on = (
            "the autopilot goes on" if done.autopilot else f"go on with: zeroscale resume {shlex.quote(str(folder))}"
        )
        to_come = format_count(len(done.left) - done.impossible, "point")
        lines.append(f"still to come: {to_come} ({done.why_left}); {go_on}")
    if done.autopilot:
        lines.append(f"job {done.autopilot}: the autopilot, when jobs have ended")
    where = shlex.quote(str(folder))
    if done.autopilot_refused:
        lines.append(f"no autopilot: {done.autopilot_refused}; go on with: zeroscale resume {where}")
    if done.cut_short:
        lines.append(f"the rest was not submitted: {done.cut_short}; go on with: zeroscale resume {where}")
    lines.append(f"how it goes: zeroscale status {where}" if done.submitted else _explain_nothing(done, where))
    return "\n".join(lines)


def _explain_nothing(done: submitting.SubmitResult, where: str) -> str:
    """Return why nothing was submitted."""
    queued = f"{format_count(done.queued, 'job')} in the queue"
    if done.answered:
        cancel = f", and {queued}; to take them back: zeroscale cancel {where}" if done.queued else ""
        return f"nothing to submit: every point has its answer{cancel}"
    if done.left:
        return f"nothing submitted now; how it goes: zeroscale status {where}"
    rest = f"what is left is under way, with {queued}" if done.queued else "no point may be tried again"
    return f"nothing to submit: {rest}; how it goes: zeroscale status {where}"


_NOTHING = Forecast()


class PredictionText:
    """The predictions of one sweep."""

    def __init__(self, sweep: SweepDefinition) -> None:
        self._sweep = sweep
        steps = [(point.forecast or _NOTHING).step for point in sweep.points]
        self._minutes = [
            compute_minutes(read_protocol(point.spec["measure"]), step.low_s, step.high_s) if step else None
            for point, step in zip(sweep.points, steps, strict=True)
        ]
        self._infeasible = [
            sweep.rules.prune and is_far_out_of_memory(point.forecast, sweep.machines[point.machine])
            for point in sweep.points
        ]

    def infeasible(self, index: int) -> bool:
        """Whether a point is not to be run."""
        return self._infeasible[index]

    def line(self, index: int) -> str:
        """Return what is predicted of one point, in one line."""
        point = self._sweep.points[index]
        if (point.forecast or _NOTHING) == _NOTHING and (
            why := explain_unpredicted(RunSpec.model_validate(point.spec))
        ):
            return f"    {why}"
        step = (point.forecast or _NOTHING).step
        time = "step time unknown"
        if step and (taken := self._minutes[index]):
            span = _format_range(taken.low, taken.high)
            time = f"{step.s:.3g} s a step ({step.low_s:.3g}–{step.high_s:.3g}), {span} min"
        return f"    predicted: {self._memory(index)}; {time}"

    def _memory(self, index: int) -> str:
        point = self._sweep.points[index]
        room, machine = (point.forecast or _NOTHING).room, self._sweep.machines[point.machine]
        there = machine.memory_bytes
        if room is None:
            return "memory unknown"
        needed = f"{_format_range(room.low_bytes / 1e9, room.high_bytes / 1e9)} GB"
        if there is None and machine.device == "cpu" and not launchers.load(self._sweep.launcher["name"]).QUEUES:
            return f"{needed} in each rank, {_format_on_this_host(room, point.devices_per_node)}"
        if there is None:
            return f"{needed} (the device's memory is unknown)"
        verdict = "far out of memory, infeasible" if self._infeasible[index] else room.fits(there)
        return f"{needed} of {there / 1e9:.3g} ({verdict})"

    def plain(self, index: int) -> dict[str, Any]:
        """Return the same for another program; None is unknown."""
        point = self._sweep.points[index]
        found, there = point.forecast or _NOTHING, self._sweep.machines[point.machine].memory_bytes
        taken = self._minutes[index]
        return {
            "memory_bytes": {"low": found.room.low_bytes, "high": found.room.high_bytes} if found.room else None,
            "machine_memory_bytes": there,
            "fits": {"fits": True, "does not fit": False}.get(found.room.fits(there)) if found.room else None,
            "infeasible": self._infeasible[index],
            "step_s": {"low": found.step.low_s, "likely": found.step.s, "high": found.step.high_s}
            if found.step
            else None,
            "minutes": taken._asdict() if taken else None,
        }

    def format_node_hours(self, times: int = 1) -> str:
        """Return the node-hours that all runs take so many times."""
        known = [(taken, self._sweep.points[i].nodes) for i in self._runs if (taken := self._minutes[i])]
        if len(known) < len(self._runs):
            return "unknown node-hours"
        low, high = (times * sum(taken[end] * nodes for taken, nodes in known) / 60 for end in (0, 1))
        return f"{_format_range(low, high)} node-hours"

    def summary(self) -> Iterator[str]:
        """Yield lines on the sweep as a whole."""
        runs = self._runs
        known = [(taken, self._sweep.points[i].nodes) for i in runs if (taken := self._minutes[i])]
        if known:
            low, high = (sum(taken[end] * nodes for taken, nodes in known) / 60 for end in (0, 1))
            unknown = f", {len(runs) - len(known)} unknown" if len(known) < len(runs) else ""
            yield f"predicted: {_format_range(low, high)} node-hours for {format_count(len(known), 'point')}{unknown}"
        if left := len(self._sweep.order) - len(runs):
            points = format_count(left, "point")
            yield f"predicted far out of memory: {points} recorded as infeasible; --no-prune runs all"
        yield from self.warnings()

    def warnings(self) -> Iterator[str]:
        """Yield lines on what may go wrong as it is asked."""
        if short := sum(map(self._may_run_out, self._runs)):
            yield f"{format_count(short, 'point')} may need more than the time limit: give launcher.time_limit_min"

    @property
    def _runs(self) -> list[int]:
        """Points that are run, each as often as it is."""
        return [index for _, index in self._sweep.order if not self._infeasible[index]]

    def _may_run_out(self, index: int) -> bool:
        limit, taken = self._sweep.points[index].time_limit_min, self._minutes[index]
        return limit is not None and taken is not None and taken.high > limit


def _format_on_this_host(room: MemoryForecast, ranks: int) -> str:
    """Return what all ranks take of this host with their processes, and whether that fits."""
    low, high = PROCESS_BYTES["cpu"]
    all_ranks = MemoryForecast(
        low_bytes=ranks * (room.low_bytes + low),
        high_bytes=ranks * (room.high_bytes + high),
        tensor_bytes=ranks * room.tensor_bytes,
    )
    there = environment.read_host_memory_bytes()
    span = _format_range(all_ranks.low_bytes / 1e9, all_ranks.high_bytes / 1e9)
    return f"{span} GB of {there / 1e9:.3g} here with {format_count(ranks, 'rank')} ({all_ranks.fits(there)})"


def _format_range(low: float, high: float) -> str:
    """Return a range in three digits, or one number where both ends read the same."""
    ends = [f"{end:.3g}" if end < 1000 else f"{end:.0f}" for end in (low, high)]
    return "–".join(dict.fromkeys(ends))
