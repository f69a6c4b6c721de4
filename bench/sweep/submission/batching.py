"""How points become jobs. Pure, but for the jobs' names."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.errors import UserError
from bench.scheduling import SchedulingOptions
from bench.sweep.definition import RequestedRun, SweepPoint
from bench.sweep.jobs import Job, create_name
from bench.sweep.pruning import Siblings
from bench.sweep.status import PointStatus

_BEGIN_AND_END_MIN = 2  # of an allocation
_LIMIT_STEP_MIN = 5  # limits of points that share an array lie in one such stretch: each task may take the longest
SiblingsByPoint = Mapping[tuple[str, str], Siblings]


class JobBatcher:
    """Divides points into jobs: one each, job arrays of equal resources, or packed allocations of one shape.

    `options` are the launcher's; the cluster's limits are None where it has none. UserError for a point that can never
    finish there.
    """

    def __init__(
        self,
        options: SchedulingOptions,
        max_array_size: int | None = None,
        max_time_min: int | None = None,
        kin: SiblingsByPoint | None = None,
    ) -> None:
        self._options, self._kin = options, kin or {}
        self._max_array_size, self._max_time_min = max_array_size, max_time_min

    def jobs(self, left: Sequence[PointStatus]) -> list[Job]:
        """Return the jobs for points, in their order. Pure, but for the jobs' names."""
        by_shape: dict[tuple[Any, ...], list[PointStatus]] = {}
        for point_status in left:
            by_shape.setdefault(self._compute_group_key(point_status), []).append(point_status)
        return [self._build_job(chunk) for members in by_shape.values() for chunk in self._split(members)]

    def _compute_group_key(self, point_status: PointStatus) -> tuple[Any, ...]:
        """Return what points must agree in to share a job. Repeats of a point in one allocation, on the same nodes,
        would tell less than as many in several."""
        point, mode = point_status.point, self._options.mode
        limit = math.ceil((point.time_limit_min or 0) / _LIMIT_STEP_MIN) if mode == "array" else None
        repeat = point_status.key.repeat if mode == "packed" else None
        return point.nodes, point.devices_per_node, limit, repeat

    def _split(self, members: Sequence[PointStatus]) -> Iterator[list[PointStatus]]:
        """Cut points of one shape into jobs; packed ones so that all of their points can finish in the job's time."""
        mode, array = self._options.mode, self._max_array_size or len(members)
        longest_min = min(self._options.job_max_min, self._max_time_min or math.inf)
        chunk: list[PointStatus] = []
        for point_status in members:
            max_points = {"point": 1, "array": array, "packed": len(members)}[mode]
            too_long = mode == "packed" and self._compute_time_limit_min([*chunk, point_status]) > longest_min
            if chunk and (len(chunk) == max_points or too_long):
                yield chunk
                chunk = []
            chunk.append(point_status)
        yield chunk

    def _compute_time_limit_min(self, members: Sequence[PointStatus]) -> int:
        """Return the time limit of a job: its points' limits one after the other, and the control point's twice."""
        first, limits = members[0], [point_status.point.time_limit_min or 0 for point_status in members]
        points = sum(limits) if self._options.mode == "packed" else max(limits)
        control = self._find_control(first)
        limits_min = points + 2 * ((control.time_limit_min or 0) if control else 0)
        warning_min = self._options.warning_s / 60
        return math.ceil(limits_min + warning_min) + _BEGIN_AND_END_MIN

    def _find_control(self, point_status: PointStatus) -> SweepPoint | None:
        """Return the control point; only who runs a sequence of points can put one before and after it."""
        shape = point_status.point.nodes, point_status.point.devices_per_node
        return point_status.sweep.control(*shape) if self._options.mode == "packed" else None

    def _build_job(self, members: Sequence[PointStatus]) -> Job:
        first = members[0]
        sweep, point, control = first.sweep, first.point, self._find_control(first)
        minutes = self._compute_time_limit_min(members)
        if self._max_time_min is not None and minutes > self._max_time_min:
            rule = f"{point.config_id} may take a job of {minutes} min, and the partition allows {self._max_time_min}"
            raise UserError(f"launcher.time_limit_min={point.time_limit_min:.3g}", rule, "give it less time")
        return Job(
            name=create_name(sweep.study),
            mode=self._options.mode,
            nodes=point.nodes,
            devices_per_node=point.devices_per_node,
            time_limit_min=minutes,
            prune=sweep.rules.prune,
            attempts=sweep.rules.budget.attempts,
            span=self._options.span,
            points=tuple(map(self._request, members)),
            control=sweep.requested(control, 0, control=True) if control else None,
        )

    def _request(self, point_status: PointStatus) -> RequestedRun:
        key = point_status.key
        kin = self._kin.get((key.config_id, key.machine))
        return point_status.sweep.requested(point_status.point, key.repeat, again=point_status.final, kin=kin)
