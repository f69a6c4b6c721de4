"""How a sweep is told before and after it is started."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import launchers
from bench.cli.prediction_text import PredictionText
from bench.config.compose import Expansion
from bench.files import RESULTS
from bench.formatting import format_count
from bench.quantities import compute_node_hours
from bench.spec import RunSpec
from bench.store import RECORD, read_record
from bench.sweep import jobs
from bench.sweep.definition import SweepDefinition
from bench.sweep.jobs import Job
from bench.sweep.local.local_sweep import SweepResult
from bench.sweep.status import PointStatus
from bench.sweep.submission import submitting
from bench.sweep.submission.batching import JobBatcher


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
        for (key, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
    ]
    return json.dumps(plain, indent=1)


def format_text(sweep: SweepDefinition, expansion: Expansion, folder: Path) -> str:
    """Return every point in order, what was left out, and what would be submitted."""
    predictions = PredictionText(sweep)
    planned = _plan_jobs(sweep, predictions) if launchers.load(str(sweep.launcher["name"])).QUEUES else []
    script = {requested.key: f"job {number}" for number, job in enumerate(planned, 1) for requested in job.points}
    lines = []
    for (key, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True):
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
    paths = [sorted((results / sweep.study / key.config_id).glob(f"0.*/{RECORD}")) for key, _ in sweep.wanted()]
    taken = [compute_node_hours(read_record(path)) for found in paths for path in found]
    known = [hours for hours in taken if hours is not None]
    predicted = PredictionText(sweep).format_node_hours(ENOUGH)
    hours = f"{ENOUGH * sum(known):.2g} node-hours" if all(paths) and len(known) == len(taken) else predicted
    return f"one run of each is indicative; {ENOUGH} of each take {hours}: {shlex.join(command)}"


def _plan_jobs(sweep: SweepDefinition, predictions: PredictionText) -> list[Job]:
    """Return the jobs as they would be submitted to a cluster without limits of its own: planning asks nobody."""
    waiting = [
        PointStatus(key, point, sweep, "waiting", "", "", 0, "")
        for (key, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
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
