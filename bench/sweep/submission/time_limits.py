"""Time limits of points that are about to be submitted, as measured neighbours correct them. Pure."""

from collections.abc import Sequence

from bench.spec import read_protocol
from bench.sweep import duration
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.status import PointStatus
from bench.sweep.submission.state import StudyState


def extend_time_limits(
    left: Sequence[PointStatus], view: StudyState, corrections: MeasuredCorrections
) -> list[PointStatus]:
    """Return points with the limits that they are to be submitted with.

    Neighbours lengthen a limit and never shorten it: that would gain little, and the next point may be unlike them. A
    point whose time once ran out gets the longest limit at once, so that no prediction can lose it.
    """
    return [
        point_status._replace(
            point=point_status.point.model_copy(
                update={"time_limit_min": _compute_limit_min(point_status, view, factor)}
            )
        )
        for point_status in left
        for factor in [max(1.0, corrections.correction(point_status.point).step)]
    ]


def _compute_limit_min(point_status: PointStatus, view: StudyState, factor: float) -> float | None:
    point = point_status.point
    step = point.forecast.step if point.forecast else None
    if point.bound_min is None or step is None:
        return point.time_limit_min
    if any(attempt.outcome == "timeout" for attempt in view.seen.of(point_status.key)):
        return point.bound_min
    protocol = read_protocol(point.spec["measure"])
    setup_min = point_status.sweep.scheduling.setup_min
    return duration.compute_limit_min(protocol, factor * step.high_s, setup_min, point.bound_min)
