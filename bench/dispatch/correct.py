"""Time limits of points that are about to be submitted, as measured neighbours correct them. Pure."""

from collections.abc import Sequence

from bench.dispatch.view import View
from bench.spec import MeasureSpec
from bench.sweep import duration
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.standing import Standing


def corrected(left: Sequence[Standing], view: View, neighbourhood: Neighbourhood) -> list[Standing]:
    """Return points with the limits that they are to be submitted with.

    Neighbours lengthen a limit and never shorten it: that would gain little, and the next point may be unlike them. A
    point whose time once ran out gets the longest limit at once, so that no prediction can lose it.
    """
    return [
        standing._replace(
            point=standing.point.model_copy(update={"time_limit_min": _limit_min(standing, view, factor)})
        )
        for standing in left
        for factor in [max(1.0, neighbourhood.correction(standing.point).step)]
    ]


def _limit_min(standing: Standing, view: View, factor: float) -> float | None:
    point = standing.point
    step = point.forecast.step if point.forecast else None
    if point.bound_min is None or step is None:
        return point.time_limit_min
    if any(attempt.outcome == "timeout" for attempt in view.seen.of(standing.key)):
        return point.bound_min
    protocol = MeasureSpec.model_validate(point.spec["measure"])
    setup_min = standing.sweep.scheduling.setup_min
    return duration.limit_min(protocol, factor * step.high_s, setup_min, point.bound_min)
