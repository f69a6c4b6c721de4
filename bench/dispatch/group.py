"""How points become jobs. Pure, but for the jobs' names."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench.sweep import jobs
from bench.sweep.jobs import Job
from bench.sweep.standing import Standing

_JOB_SLACK_MIN = 3  # for an allocation to begin and to end


def group(left: Sequence[Standing], options: Any, max_array_size: int | None, max_time_min: int | None) -> list[Job]:
    """Divide points of one sweep into jobs: one each, job arrays of equal resources, or packed allocations. Pure, but
    for the jobs' names."""
    shapes: dict[tuple[Any, ...], list[Standing]] = {}
    for standing in left:
        point = standing.point
        shape = (point.nodes, point.devices_per_node)
        shapes.setdefault((*shape, point.time_limit_min) if options.mode == "array" else shape, []).append(standing)
    made = []
    for members in shapes.values():
        most = {"point": 1, "array": max_array_size or len(members), "packed": len(members)}[options.mode]
        for chunk in _chunks(members, most, options, max_time_min):
            made.append(_job(chunk, options, max_time_min))
    return made


def _chunks(members: Sequence[Standing], most: int, options: Any, max_time_min: int | None) -> Iterator[list[Standing]]:
    """Cut points into jobs of at most `most`, packed ones also so that all of them can finish in the job's time."""
    longest_min = min(options.job_max_min, max_time_min or math.inf)
    chunk: list[Standing] = []
    for standing in members:
        full = len(chunk) == most or (options.mode == "packed" and chunk and _minutes([*chunk, standing]) > longest_min)
        if full:
            yield chunk
            chunk = []
        chunk.append(standing)
    if chunk:
        yield chunk


def _minutes(members: Sequence[Standing]) -> int:
    """Return the time limit of a packed job: all its points' limits, and the control point's twice."""
    first = members[0]
    control = first.sweep.control(first.point.nodes, first.point.devices_per_node)
    limits = [standing.point.time_limit_min or 0 for standing in members]
    return math.ceil(sum(limits) + 2 * ((control.time_limit_min or 0) if control else 0)) + _JOB_SLACK_MIN


def _job(members: Sequence[Standing], options: Any, max_time_min: int | None) -> Job:
    first = members[0]
    sweep, point = first.sweep, first.point
    control = sweep.control(point.nodes, point.devices_per_node) if options.mode == "packed" else None
    longest = max(members, key=lambda standing: standing.point.time_limit_min or 0)
    minutes = _minutes(members) if options.mode == "packed" else _minutes([longest])
    return Job(
        name=jobs.new_name(sweep.study),
        mode=options.mode,
        nodes=point.nodes,
        devices_per_node=point.devices_per_node,
        time_limit_min=min(minutes, max_time_min or minutes),
        prune=sweep.rules.prune,
        span=options.span,
        points=tuple(standing.sweep.todo(standing.point, standing.key.repeat) for standing in members),
        control=sweep.todo(control, 0, control=True) if control else None,
    )
