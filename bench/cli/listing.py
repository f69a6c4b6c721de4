"""How a sweep is told before and after it is started."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from bench import launchers
from bench.cli.foretold import Foretold
from bench.config import Expansion
from bench.dispatch import feed
from bench.dispatch.group import Grouping
from bench.local.here import Ended
from bench.spec import RunSpec
from bench.sweep import jobs
from bench.sweep.asked import Sweep
from bench.sweep.jobs import Job
from bench.sweep.standing import Standing
from bench.wording import count


def as_json(sweep: Sweep) -> str:
    """Return every repeat of every point in order, for another program."""
    told = Foretold(sweep)
    plain = [
        {
            "config_id": key.config_id,
            "repeat": key.repeat,
            "nodes": point.nodes,
            "time_limit_min": point.time_limit_min,
            "overrides": point.overrides,
            "predicted": told.plain(index),
            "spec": RunSpec.model_validate(point.spec).model_dump(mode="json", by_alias=True),
        }
        for (key, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
    ]
    return json.dumps(plain, indent=1)


def as_text(sweep: Sweep, expansion: Expansion, folder: Path) -> str:
    """Return every point in order, what was left out, and what would be submitted."""
    told = Foretold(sweep)
    planned = _planned(sweep, told) if launchers.load(str(sweep.launcher["name"])).QUEUES else []
    script = {todo.key: f"job {number}" for number, job in enumerate(planned, 1) for todo in job.points}
    lines = []
    for (key, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True):
        limit = f"  limit {point.time_limit_min:.3g} min" if point.time_limit_min else ""
        lines.append(f"{point.line}  repeat {key.repeat}{limit}" + (f"  {script[key]}" if key in script else ""))
        lines.append(told.line(index))
    lines += [f"left out by {rule}: {count(number, 'point')}" for rule, number in expansion.excluded.items()]
    if expansion.merged:
        lines.append(f"the same as another: {count(expansion.merged, 'point')}")
    lines += _scripts(sweep, planned, folder) if planned else []
    lines += told.summary()
    if planned:
        hours = sum(job.nodes * job.time_limit_min * (len(job.points) if job.mode == "array" else 1) for job in planned)
        told_jobs = f"{count(len(sweep.order), 'point')} in {count(len(planned), 'job')}"
        told_hours = f"{hours / 60:.1f} node-hours if all of them use their whole time limit"
        lines.append(f"{told_jobs}, {told_hours}; nothing submitted")
    else:
        lines.append(f"{count(len(sweep.order), 'point')}, nothing started")
    return "\n".join(lines)


def _planned(sweep: Sweep, told: Foretold) -> list[Job]:
    """Return the jobs as they would be submitted to a cluster without limits of its own: planning asks nobody."""
    waiting = [
        Standing(key, point, sweep, "waiting", "", "", 0, "")
        for (key, point), (_, index) in zip(sweep.wanted(), sweep.order, strict=True)
        if not told.infeasible(index)
    ]
    _, options = feed.chosen(sweep)
    return Grouping(options).jobs(waiting)


def _scripts(sweep: Sweep, planned: list[Job], folder: Path) -> list[str]:
    """Return the script of the first job of every kind; others differ in their folder and time limit alone."""
    (launcher, options), kinds = feed.chosen(sweep), Counter(map(_kind, planned))
    lines, told = [], set()
    for number, job in enumerate(planned, 1):
        if _kind(job) not in told:
            told.add(_kind(job))
            where = (folder / jobs.FOLDER / job.name).resolve()
            script = "".join(feed.plan(job, where, options, launcher).files.values())
            lines += ["", f"── script of job {number}, {kinds[_kind(job)]} of this kind", script.rstrip(), ""]
    return lines


def _kind(job: Job) -> tuple[Any, ...]:
    return job.nodes, job.devices_per_node, job.mode


def ended(done: Ended, *, as_json: bool) -> str:
    """Return how the points of a sweep here ended."""
    if as_json:
        plain = {
            "study": done.folder.name,
            "outcomes": done.outcomes,
            "skipped": done.skipped,
            "folder": str(done.folder),
        }
        return json.dumps(plain)
    told = ", ".join(f"{number} {kind}" for kind, number in done.outcomes.most_common())
    return f"{told}; {done.skipped} already had an answer; {done.folder}"


def fed(done: feed.Fed, folder: Path, *, as_json: bool) -> str:
    """Return what was submitted, what was settled meanwhile, and what comes next."""
    if as_json:
        return json.dumps(
            {
                "folder": str(folder),
                "submitted": [
                    {"job": number, "name": job.name, "points": len(job.points)} for job, number in done.submitted
                ],
                "concluded": done.concluded,
                "pruned": done.unrun.get("pruned", 0),
                "infeasible": done.unrun.get("infeasible", 0),
                "left": len(done.left),
                "why_left": done.why_left,
                "autopilot": done.autopilot,
            }
        )
    lines = [
        f"job {number}: {count(len(job.points), 'point')}, {count(job.nodes, 'node')} × {job.devices_per_node}, "
        f"at most {job.time_limit_min} min{' each' if job.mode == 'array' else ''}  {folder / jobs.FOLDER / job.name}"
        for job, number in done.submitted
    ]
    if done.concluded:
        lines.append(f"recorded now: {count(done.concluded, 'attempt')} that had left no record")
    lines += [f"not to be run ({kind}): {count(number, 'point')}" for kind, number in done.unrun.items()]
    if done.left:
        go_on = (
            "the autopilot goes on" if done.autopilot else f"go on with: zeroscale resume {shlex.quote(str(folder))}"
        )
        lines.append(f"still to come: {count(len(done.left), 'point')} ({done.why_left}); {go_on}")
    if done.autopilot:
        lines.append(f"job {done.autopilot}: the autopilot, when jobs have ended")
    lines.append(f"how it goes: zeroscale status {shlex.quote(str(folder))}" if done.submitted else "nothing to submit")
    return "\n".join(lines)
