"""How points become jobs. Pure, but for the jobs' names."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.errors import UserError
from bench.scheduling import SchedulingOptions
from bench.sweep.asked import Point, Todo
from bench.sweep.jobs import Job, new_name
from bench.sweep.pruning import Kin
from bench.sweep.standing import Standing

_BEGIN_AND_END_MIN = 2  # of an allocation
_ALIKE_MIN = 5  # limits of points that share an array lie in one such stretch: each task may take the longest
Kinships = Mapping[tuple[str, str], Kin]


class Grouping:
    """Divides points into jobs: one each, job arrays of equal resources, or packed allocations of one shape.

    `options` are the launcher's; the cluster's limits are None where it has none. UserError for a point that can never
    finish there.
    """

    def __init__(
        self,
        options: SchedulingOptions,
        max_array_size: int | None = None,
        max_time_min: int | None = None,
        kin: Kinships | None = None,
    ) -> None:
        self._options, self._kin = options, kin or {}
        self._max_array_size, self._max_time_min = max_array_size, max_time_min

    def jobs(self, left: Sequence[Standing]) -> list[Job]:
        """Return the jobs for points, in their order. Pure, but for the jobs' names."""
        alike: dict[tuple[Any, ...], list[Standing]] = {}
        for standing in left:
            alike.setdefault(self._shared(standing), []).append(standing)
        return [self._job(chunk) for members in alike.values() for chunk in self._chunks(members)]

    def _shared(self, standing: Standing) -> tuple[Any, ...]:
        """Return what points must agree in to share a job. Repeats of a point in one allocation, on the same nodes,
        would tell less than as many in several."""
        point, mode = standing.point, self._options.mode
        limit = math.ceil((point.time_limit_min or 0) / _ALIKE_MIN) if mode == "array" else None
        repeat = standing.key.repeat if mode == "packed" else None
        return point.nodes, point.devices_per_node, limit, repeat

    def _chunks(self, members: Sequence[Standing]) -> Iterator[list[Standing]]:
        """Cut points of one shape into jobs; packed ones so that all of their points can finish in the job's time."""
        mode, array = self._options.mode, self._max_array_size or len(members)
        longest_min = min(self._options.job_max_min, self._max_time_min or math.inf)
        chunk: list[Standing] = []
        for standing in members:
            most = {"point": 1, "array": array, "packed": len(members)}[mode]
            too_long = mode == "packed" and self._minutes([*chunk, standing]) > longest_min
            if chunk and (len(chunk) == most or too_long):
                yield chunk
                chunk = []
            chunk.append(standing)
        yield chunk

    def _minutes(self, members: Sequence[Standing]) -> int:
        """Return the time limit of a job: its points' limits one after the other, and the control point's twice."""
        first, limits = members[0], [standing.point.time_limit_min or 0 for standing in members]
        points = sum(limits) if self._options.mode == "packed" else max(limits)
        control = self._control(first)
        limits_min = points + 2 * ((control.time_limit_min or 0) if control else 0)
        warning_min = self._options.warning_s / 60
        return math.ceil(limits_min + warning_min) + _BEGIN_AND_END_MIN

    def _control(self, standing: Standing) -> Point | None:
        """Return the control point; only who runs a sequence of points can put one before and after it."""
        shape = standing.point.nodes, standing.point.devices_per_node
        return standing.sweep.control(*shape) if self._options.mode == "packed" else None

    def _job(self, members: Sequence[Standing]) -> Job:
        first = members[0]
        sweep, point, control = first.sweep, first.point, self._control(first)
        minutes = self._minutes(members)
        if self._max_time_min is not None and minutes > self._max_time_min:
            rule = f"{point.config_id} may take a job of {minutes} min, and the partition allows {self._max_time_min}"
            raise UserError(f"launcher.time_limit_min={point.time_limit_min:.3g}", rule, "give it less time")
        return Job(
            name=new_name(sweep.study),
            mode=self._options.mode,
            nodes=point.nodes,
            devices_per_node=point.devices_per_node,
            time_limit_min=minutes,
            prune=sweep.rules.prune,
            span=self._options.span,
            points=tuple(map(self._todo, members)),
            control=sweep.todo(control, 0, control=True) if control else None,
        )

    def _todo(self, standing: Standing) -> Todo:
        key = standing.key
        kin = self._kin.get((key.config_id, key.machine))
        return standing.sweep.todo(standing.point, key.repeat, again=standing.final, kin=kin)
