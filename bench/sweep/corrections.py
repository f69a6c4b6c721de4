"""What the measured runs of a study say of the predictions for its other points, and of their time limits."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.core import store
from bench.core.record import RunRecord
from bench.core.spec import read_protocol
from bench.core.store import RunAttempt
from bench.predict import neighbours
from bench.predict.neighbours import UNCORRECTED, Correction, Neighbour, PredictedRun
from bench.sweep import forecast
from bench.sweep.definition import SweepPoint
from bench.sweep.status import PointStatus, StudyState


class MeasuredCorrections:
    """The measured runs of a study beside their predictions; grows as the study goes on."""

    def __init__(self, points: Iterable[SweepPoint], attempts: Iterable[RunAttempt] = ()) -> None:
        """`attempts` are those made so far; they are read once somebody asks for a correction."""
        self._points = {(point.config_id, point.machine): point for point in points}
        self._unread = iter(attempts)
        self._known: dict[tuple[str, str, int, int], Neighbour] = {}  # by run: one may be taken in twice
        self._corrections: dict[tuple[str, str, str], Correction] = {}

    def add_point(self, point: SweepPoint) -> None:
        """Take in a point that was asked for since."""
        self._points[point.config_id, point.machine] = point

    def add(self, record: RunRecord) -> None:
        """Take in one run."""
        around = record.circumstance
        point = self._points.get((record.config_id, around.machine.name))
        if point and (neighbour := neighbours.compare_with_prediction(record, _build_predicted(point))):
            self._known[record.config_id, around.machine.name, around.repeat, around.attempt] = neighbour
            self._corrections.clear()

    def correction(self, point: SweepPoint) -> Correction:
        """Return by how much the prediction for a point is to be corrected."""
        for attempt in self._unread:
            if attempt.outcome == "ok" and (record := _read_record(attempt.folder / store.RECORD)):
                self.add(record)
        if not self._known:
            return UNCORRECTED
        model, engine = point.spec["model"], point.spec["engine"]
        place = neighbours.identify_model(model), engine["name"], point.machine
        if place not in self._corrections:
            self._corrections[place] = neighbours.compute_correction(
                neighbours.select_nearest([*self._known.values()], *place)
            )
        return self._corrections[place]


def _build_predicted(point: SweepPoint) -> PredictedRun | None:
    if point.forecast is None:
        return None
    step, room = point.forecast.step, point.forecast.room
    return PredictedRun(step.s if step else None, room.tensor_bytes if room else None)


def _read_record(path: Path) -> RunRecord | None:
    try:
        return store.read_record(path)
    except (OSError, store.Unreadable):
        return None


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
    return forecast.compute_limit_min(protocol, factor * step.high_s, setup_min, point.bound_min)
