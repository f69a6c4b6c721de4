"""Measure every point of a study or every combination of comma lists, on this machine or as jobs of
a scheduler.

  zeroscale sweep study=smoke
  zeroscale sweep model=tiny engine=ddp,zero1,zero2,zero3 batch.micro=2,4,8 --dry-run
  zeroscale sweep study=paper launcher=slurm launcher.gpus=--gres=gpu:{devices} --dry-run
  zeroscale sweep study=strong_scaling launcher=slurm_mine --config-dir my --autopilot

Without a study, every point runs once, which gives indicative results only. The last printed line
is the command for five repeats, with its cost. On this machine's CPU, points without a study have
the sequence lengths, precision and measurement protocol of the smoke study, unless you set them.

Points that already have a final result on this machine in this environment are skipped, so that an
interrupted sweep continues where it ended. A point that is predicted to exceed memory by far is
recorded as infeasible and not run, unless `--no-prune` is given. With a scheduler, the command
returns once the jobs are submitted: `zeroscale status` shows their progress.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import api, launchers
from bench.cli import options
from bench.config.compose import Expansion
from bench.core import terminal
from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.formatting import format_count
from bench.core.machine import Machine
from bench.core.quantities import compute_node_hours
from bench.core.scheduling import JobSetup
from bench.core.spec import RunSpec, read_protocol
from bench.core.steps import count_evaluation_steps
from bench.core.store import RECORD, read_record
from bench.measure import environment
from bench.predict.memory import PROCESS_BYTES
from bench.sweep import definition, inputs, jobs, submitting
from bench.sweep.definition import RunKey, SweepDefinition, SweepPoint
from bench.sweep.forecast import AttemptMinutes, Forecast, MemoryForecast, compute_minutes, explain_unpredicted
from bench.sweep.jobs import Job
from bench.sweep.local_sweep import LocalSweep
from bench.sweep.policy import explain_spent
from bench.sweep.pruning import is_far_out_of_memory
from bench.sweep.snapshot import compute_spent_node_hours, read_snapshot
from bench.sweep.status import PointStatus, find_job_setup, list_statuses
from bench.sweep.submitting import JobBatcher

if TYPE_CHECKING:
    from bench.sweep.plan import PlannedSweep


_SHOWN = 20  # points that a dry run lists without --list: one screen


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    help_text = f"with --dry-run: list all points, also if there are more than {_SHOWN}, and infeasible points"
    parser.add_argument("--list", action="store_true", help=help_text)
    help_text = "number of runs of every point (configuration); default: the number in the study, or 1"
    parser.add_argument("--repeats", type=options.positive("--repeats"), metavar="N", help=help_text)
    help_text = (
        "also run points that should not fit in memory, by a prediction or by failed runs of a smaller micro-batch"
    )
    parser.add_argument("--no-prune", action="store_true", help=help_text)
    options.add_autopilot(parser)
    help_text = "maximum number of the sweep's jobs in the queue"
    parser.add_argument("--max-queued", type=options.positive("--max-queued"), metavar="N", help=help_text)
    parser.add_argument("--nice", type=int, metavar="N", help="lower the priority of the jobs by N, as `sbatch --nice`")
    help_text = "earliest start of the jobs, in the scheduler's format, such as 20:00"
    parser.add_argument("--begin", metavar="WHEN", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if every point ended `ok` or, with a scheduler, if the scheduler accepted the jobs.

    A dry run starts nothing and returns 0.
    """
    options.check_notify(args)
    busy = options.BusyWarning()
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
        options.check_writable(folder)
        text = functools.partial(format_text, plan.sweep, plan.expansion, folder, every=args.list)
        print(format_json(plan.sweep) if args.json else text())
        _print_repeats(args, plan)
        return 0
    if not args.json:
        _print_earlier(plan.sweep, folder)
    if plan.queues:
        for line in PredictionText(plan.sweep).warnings():
            print(line, file=sys.stderr)
        done = api.submit(plan, results=args.results, notify=args.notify)
        print(options.format_submitted(done, folder, as_json=args.json))
        _print_repeats(args, plan)
        return 0 if done.good else 1
    with options.follow_runs(args, folder, plan.sweep.launcher, busy) as listeners:
        ended = api.run(plan, results=args.results, **listeners)
    good = options.print_ended(ended, as_json=args.json)
    _print_repeats(args, plan)
    return 0 if good else 1


def _print_earlier(sweep: SweepDefinition, folder: Path) -> None:
    """Print the number of runs of earlier sweeps in the folder that this sweep does not include. Such runs exist, for
    example, after a change of the study. Print nothing for sweeps without a study, because these sweeps share a
    folder."""
    if sweep.study == "adhoc" or not folder.exists():
        return
    with contextlib.suppress(UserError):  # the folder has no sweep yet
        earlier = definition.merge_sweeps(definition.read(folder)).keys() - {one.key for one in sweep.wanted()}
        if earlier:
            runs = format_count(len(earlier), "run")
            told = "not in this sweep; `status` and `resume` include them"
            print(f"{folder}: {runs} of earlier sweeps {'are' if len(earlier) > 1 else 'is'} {told}", file=sys.stderr)


def _print_repeats(args: argparse.Namespace, plan: "PlannedSweep") -> None:
    """Print the command and cost of five repeats. Print nothing if the sweep has a study, has a single point or repeats
    its points, or if the output is JSON."""
    several = len(plan.sweep.points) > 1 and max(repeat for repeat, _ in plan.sweep.order) == 0
    if several and plan.sweep.study == "adhoc" and not args.json:
        print(_format_repeats(plan.sweep, args))


def format_json(sweep: SweepDefinition) -> str:
    """Return every repeat of every point (configuration of the study) as JSON, in the order of the runs."""
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


def format_text(sweep: SweepDefinition, expansion: Expansion, folder: Path, *, every: bool) -> str:
    """Return the text of a dry run: a summary of the sweep, its points in order, and the job scripts that would be
    submitted.

    If `every` is false, infeasible points are counted but not listed. If more than 20 points (`_SHOWN`) remain, a table
    with numbers of runs replaces the list.
    """
    queues = launchers.load(str(sweep.launcher["name"])).QUEUES
    answered, note = _find_answers(sweep, folder) if folder.exists() else ([], "")
    predictions = PredictionText(sweep, answered)
    planned = _plan_jobs(sweep, predictions, answered) if queues else []
    count, nothing = format_count(len(sweep.points), "point"), f"nothing {'submitted' if queues else 'started'}"
    if len(sweep.order) > len(sweep.points):
        count = f"{len(sweep.order)} runs of {count}"
    if answered:
        left = len(sweep.order) - len(answered)
        count += f": {len(answered)} already have a result, {left or 'none'} left to run"
    if planned:
        lines = [f"{count} in {format_count(len(planned), 'job')}, {_format_most_hours(sweep, planned)}; {nothing}"]
    else:
        lines = [f"{count}{';' if answered else ','} {nothing}"]
    lines += [*([note] if note else []), *predictions.summary(), *_list_job_notes(sweep, planned)]
    lines += [
        f"excluded by the rule {rule}: {format_count(number, 'point')}" for rule, number in expansion.excluded.items()
    ]
    if expansion.merged:
        lines.append(f"duplicates of other points, merged: {format_count(expansion.merged, 'point')}")
    runs = Counter(index for _, index in sweep.order if every or not predictions.points[index].infeasible)
    if every or len(runs) <= _SHOWN:
        jobs_of: dict[str, dict[int, None]] = {}  # job numbers in order, by config_id; a dict as an ordered set
        for number, job in enumerate(planned, 1):
            for requested in job.points:
                jobs_of.setdefault(requested.config_id, {})[number] = None
        for index, repeats in runs.items():
            point = sweep.points[index]
            known = sum((key.config_id, key.machine) == (point.config_id, point.machine) for key in answered)
            shown = format_count(repeats, "run") + (f", {known} already with a result" if known else "")
            lines.append(_format_point(point, shown, predictions.line(index), list(jobs_of.get(point.config_id, ()))))
    else:
        lines += [_format_shapes(sweep, predictions), "--list shows every point"]
    return "\n".join([*map(terminal.wrap_columns, lines), *_format_scripts(sweep, planned, folder)])


def _compute_node_hours(job: Job, setup: JobSetup) -> float:
    """Return the node-hours of a job that uses its whole time limit. For a job array, return those of a single task."""
    return job.nodes * (job.time_limit_min + setup.start_min) / 60


def _format_most_hours(sweep: SweepDefinition, planned: Sequence[Job]) -> str:
    tasks = [len(job.points) if job.mode == "array" else 1 for job in planned]
    setup = find_job_setup(sweep)
    hours = sum(count * _compute_node_hours(job, setup) for count, job in zip(tasks, planned, strict=True))
    price, budget = setup.price_per_node_hour, setup.budget
    cost = f", at a cost of {price * hours:.2f}{f' (budget: {budget:.2f})' if budget else ''}," if price else ""
    return f"{hours:.1f} node-hours{cost} if all of them use their whole time limit"


def _list_job_notes(sweep: SweepDefinition, planned: Sequence[Job]) -> Iterator[str]:
    """Yield warnings about the planned jobs. There are five: a package is missing; a machine is not described; a price
    is doubtful; a job is longer than `job_max_min`, because a single point needs so much time; a single job may cost
    more than the whole budget."""
    if not planned:
        return
    _, options = submitting.load_launcher(sweep)
    setup = find_job_setup(sweep)
    if setup.lacks:
        yield f"launcher={sweep.launcher['name']}: {setup.lacks}"
    yield from filter(None, (inputs.describe_unknown_machine(one, setup) for one in sweep.machines.values()))
    if setup.price_note:
        yield setup.price_note
    longest = max((job.time_limit_min for job in planned if job.mode == "packed"), default=0)
    if longest > options.job_max_min:
        rule = f"a single point may need a job of {longest} min"
        yield f"launcher.job_max_min={options.job_max_min}: {rule}; raise job_max_min, or lower launcher.time_limit_min"
    price, budget = setup.price_per_node_hour, setup.budget
    if not price or not budget:
        return
    over = [job for job in planned if price * _compute_node_hours(job, setup) > budget]
    if over:
        shorter = "launcher.job_max_min" if any(len(job.points) > 1 for job in over) else "launcher.time_limit_min"
        rule = f"{format_count(len(over), 'job')} may cost more than the whole budget, and will be refused"
        yield f"launcher.budget={budget:g}: {rule}; lower {shorter}, or raise the budget"


def _format_point(point: SweepPoint, runs: str, predicted: str, its_jobs: Sequence[int]) -> str:
    """Return the two lines of one point: its configuration, runs, time limit and jobs, and then its prediction."""
    limit = f"limit {point.time_limit_min:.3g} min" if point.time_limit_min else ""
    named = f"job{'s' * (len(its_jobs) > 1)} {', '.join(map(str, its_jobs))}" if its_jobs else ""
    line = "  ".join(filter(None, [point.line, runs, limit, named]))
    return f"{line}\n{predicted}"


def _format_shapes(sweep: SweepDefinition, predictions: "PredictionText") -> str:
    """Return a table with the number of runs for each combination of model, nodes and devices per node."""
    infeasible: dict[tuple[str, int, int], list[bool]] = {}
    for _, index in sweep.order:
        point = sweep.points[index]
        shape = point.spec["model"]["name"], point.nodes, point.devices_per_node
        infeasible.setdefault(shape, []).append(predictions.points[index].infeasible)
    rows = [["model", "nodes", "devices per node", "runs", "infeasible"]]
    rows += [[*map(str, shape), str(len(runs)), str(sum(runs))] for shape, runs in sorted(infeasible.items())]
    return terminal.align(rows, right={1, 2, 3, 4})


def _format_repeats(sweep: SweepDefinition, args: argparse.Namespace) -> str:
    """Return a text with a command and its node-hours. The command runs every point five times (`options.ENOUGH`).

    If every point has been run, the node-hours follow from recorded runs. Otherwise the node-hours follow from
    predictions.
    """
    times = options.ENOUGH
    command = ["zeroscale", "sweep", *args.overrides, "--repeats", str(times)]
    command += ["--results", str(args.results)] if args.results != RESULTS else []
    command += options.list_given(args, "config_dir", "max_queued", "nice", "begin", "notify", "no_prune", "autopilot")
    paths = [sorted((args.results / sweep.study / key.config_id).glob(f"0.*/{RECORD}")) for key, _, _ in sweep.wanted()]
    taken = [compute_node_hours(read_record(path)) for found in paths for path in found]
    known = [hours for hours in taken if hours is not None]
    predicted = PredictionText(sweep).format_node_hours(times)
    hours = f"{times * sum(known):.2g} node-hours" if all(paths) and len(known) == len(taken) else predicted
    taken_text = f"a single run per point is only indicative; {times} runs per point take {hours}"
    return f"{taken_text}:\n{terminal.wrap_command(command)}"


def _find_answers(sweep: SweepDefinition, folder: Path) -> tuple[list[RunKey], str]:
    """Return the runs of a sweep that would not start because the study's folder already has their final result. Also
    return a text, with a remedy. With a scheduler, the text states that the budget is spent. Without a scheduler, the
    text states how many results come from a busy machine. The text is empty if there is nothing to state. The scheduler
    is not queried."""
    wanted = list(sweep.wanted())
    if launchers.load(str(sweep.launcher["name"])).QUEUES:
        seen = read_snapshot(folder)
        statuses = list_statuses({one.key: one for one in wanted}, seen, {}, is_reached=False)
        spent = explain_spent(compute_spent_node_hours(seen.jobs), sweep.rules.budget.node_hours)
        return [one.key for one in statuses if one.final], f"{spent}; {options.RAISE_BUDGET}" if spent else ""
    local = LocalSweep(folder, wanted, retry=True, tell=print, follow=print)
    answers = local.find_answers()
    return list(answers), local.describe_busy(answers.values())


def _plan_jobs(sweep: SweepDefinition, predictions: "PredictionText", answered: Collection[RunKey]) -> list[Job]:
    """Return the planned jobs. A plan does not query the scheduler, so no limits of the cluster are applied."""
    waiting = [
        PointStatus(key, point, sweep, "waiting", "", "", 0, "")
        for (key, _, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
        if key not in answered and not predictions.points[index].infeasible
    ]
    _, options = submitting.load_launcher(sweep)
    return JobBatcher(options).jobs(waiting)


def _format_scripts(sweep: SweepDefinition, planned: list[Job], folder: Path) -> list[str]:
    """Return the script of the first job of each kind. Jobs of one kind have the same nodes, devices and mode; they
    differ only in folder, points and time limit."""
    if not planned:
        return []
    launcher, options = submitting.load_launcher(sweep)
    numbers: dict[tuple[Any, ...], list[int]] = {}
    for number, job in enumerate(planned, 1):
        numbers.setdefault((job.nodes, job.devices_per_node, job.mode), []).append(number)
    lines = []
    for first, *others in numbers.values():
        job = planned[first - 1]
        where = (folder / jobs.FOLDER / job.name).resolve()
        script = "".join(submitting.plan_job(job, where, options, launcher).files.values())
        head = f"── script of job {first}; number of jobs of this kind: {1 + len(others)}"
        lines += ["", head, script.rstrip(), ""]
    return lines


class PointPrediction(NamedTuple):
    """Predicted memory, step time and run time of one point of a sweep."""

    point: SweepPoint
    machine: Machine
    forecast: Forecast
    minutes: AttemptMinutes | None  # predicted minutes of one attempt; None if unknown
    infeasible: bool  # recorded as infeasible and not run


class PredictionText:
    """Texts of the predictions for all points of one sweep."""

    def __init__(self, sweep: SweepDefinition, answered: Collection[RunKey] = ()) -> None:
        """Predict every point. Sums of node-hours and counts of runs exclude the `answered` runs, which already have a
        final result."""
        self._sweep, self._answered = sweep, frozenset(answered)
        self.points = [self._predict(point) for point in sweep.points]

    def _predict(self, point: SweepPoint) -> PointPrediction:
        forecast, machine = point.forecast or Forecast(), self._sweep.machines[point.machine]
        step, protocol = forecast.step, read_protocol(point.spec["measure"])
        evaluations = [count_evaluation_steps(RunSpec.model_validate(point.spec))] if "learning" in point.spec else []
        minutes = compute_minutes(protocol, step.low_s, step.high_s, *evaluations) if step else None
        known = inputs.add_host_memory(machine, self._sweep.launcher["name"])
        infeasible = self._sweep.rules.prune and is_far_out_of_memory(point, known)
        return PointPrediction(point, machine, forecast, minutes, infeasible)

    def line(self, index: int) -> str:
        """Return the prediction for one point in one line."""
        one = self.points[index]
        if one.forecast == Forecast() and (why := explain_unpredicted(RunSpec.model_validate(one.point.spec))):
            return f"    {why}"
        time, step = "step time unknown", one.forecast.step
        if step and one.minutes:
            span = _format_range(one.minutes.low, one.minutes.high)
            time = f"{step.s:.3g} s a step ({step.low_s:.3g}–{step.high_s:.3g}), {span} min"
        return f"    predicted: {self._format_memory(one)}; {time}"

    def _format_memory(self, one: PointPrediction) -> str:
        room, there = one.forecast.room, one.machine.memory_bytes
        if room is None:
            return "memory unknown"
        needed = f"{_format_range(room.low_bytes / 1e9, room.high_bytes / 1e9)} GB"
        if there is None and one.machine.device == "cpu" and not launchers.load(self._sweep.launcher["name"]).QUEUES:
            verdict = "far out of memory, infeasible" if one.infeasible else ""
            return f"{needed} per rank, {_format_on_this_host(room, one.point.devices_per_node, verdict)}"
        if there is None:
            return f"{needed} (the device's memory is unknown)"
        verdict = "far out of memory, infeasible" if one.infeasible else room.fits(there)
        return f"{needed} of {there / 1e9:.3g} ({verdict})"

    def plain(self, index: int) -> dict[str, Any]:
        """Return the prediction for one point as plain data for JSON. An unknown value is None."""
        one = self.points[index]
        room, step, there = one.forecast.room, one.forecast.step, one.machine.memory_bytes
        return {
            "memory_bytes": {"low": room.low_bytes, "high": room.high_bytes} if room else None,
            "machine_memory_bytes": there,
            "fits": {"fits": True, "does not fit": False}.get(room.fits(there)) if room else None,
            "infeasible": one.infeasible,
            "step_s": {"low": step.low_s, "likely": step.s, "high": step.high_s} if step else None,
            "minutes": one.minutes._asdict() if one.minutes else None,
        }

    def format_node_hours(self, times: int) -> str:
        """Return the predicted node-hours of all runs, multiplied by `times`."""
        unknown = any(one.minutes is None for one in self._runs)
        return f"{'unknown' if unknown else self._sum_node_hours(times)} node-hours"

    def _sum_node_hours(self, times: float = 1) -> str:
        known = [(one.minutes, one.point.nodes) for one in self._runs if one.minutes]
        return _format_range(*(times * sum(taken[end] * nodes for taken, nodes in known) / 60 for end in (0, 1)))

    def summary(self) -> Iterator[str]:
        """Yield lines with the predicted node-hours of the sweep, infeasible points, and warnings."""
        if known := sum(one.minutes is not None for one in self._runs):
            unknown = f", {len(self._runs) - known} unknown" if known < len(self._runs) else ""
            price = find_job_setup(self._sweep).price_per_node_hour
            cost = f", at a cost of {self._sum_node_hours(price)}," if price else ""
            yield f"predicted: {self._sum_node_hours()} node-hours{cost} for {format_count(known, 'run')}{unknown}"
        if infeasible := sum(self.points[index].infeasible for _, index in self._sweep.order):
            runs = format_count(infeasible, "run")
            yield f"predicted memory far exceeds the device's: {runs}, recorded as infeasible; --no-prune runs them"
        yield from self.warnings()

    def warnings(self) -> Iterator[str]:
        """Yield a line if runs may exceed their time limit, in which case they have no result."""
        limits = [(one.minutes, one.point.time_limit_min) for one in self._runs]
        if short := sum(bool(taken and limit is not None and taken.high > limit) for taken, limit in limits):
            yield f"{format_count(short, 'run')} may need more than the time limit: raise launcher.time_limit_min"

    @functools.cached_property
    def _runs(self) -> list[PointPrediction]:
        """Return the predictions of all runs that would start: those that are neither infeasible nor answered."""
        keyed = zip(self._sweep.wanted(), self._sweep.order, strict=True)
        left = [self.points[index] for one, (_, index) in keyed if one.key not in self._answered]
        return [one for one in left if not one.infeasible]


def _format_on_this_host(room: MemoryForecast, ranks: int, verdict: str) -> str:
    """Return a text with the memory of all ranks on this host and the verdict. If the verdict is empty, the text says
    whether the ranks fit. Memory of the processes themselves is included."""
    low, high = PROCESS_BYTES["cpu"]
    all_ranks = MemoryForecast(
        low_bytes=ranks * (room.low_bytes + low),
        high_bytes=ranks * (room.high_bytes + high),
        tensor_bytes=ranks * room.tensor_bytes,
    )
    there = environment.read_host_memory_bytes()
    span = _format_range(all_ranks.low_bytes / 1e9, all_ranks.high_bytes / 1e9)
    text = f"{span} GB of {there / 1e9:.3g} on this machine with {format_count(ranks, 'rank')}"
    return f"{text} ({verdict or all_ranks.fits(there)})"


def _format_range(low: float, high: float) -> str:
    """Return a range with three significant digits at each end (a whole number from 1,000 on). If both ends round to
    the same text, return a single number."""
    ends = [f"{end:.3g}" if end < 1000 else f"{end:.0f}" for end in (low, high)]
    return "–".join(dict.fromkeys(ends))
