"""Correct the predictions and time limits of points (configurations) by measured runs of the same study."""

import contextlib
from collections.abc import Iterable, Sequence

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
    """Computes corrections of predictions for a study's points. For this purpose, each measured run of the study is
    compared with the prediction for that run. Runs are added as the study proceeds."""

    def __init__(self, points: Iterable[SweepPoint], attempts: Iterable[RunAttempt] = ()) -> None:
        """`attempts` are the attempts made so far. Their records are read when a correction is first requested."""
        self._points = {(point.config_id, point.machine): point for point in points}
        self._unread = iter(attempts)
        self._known: dict[tuple[str, str, int, int], Neighbour] = {}  # by run, so that no run counts twice
        self._corrections: dict[tuple[str, str, str], Correction] = {}

    def add_point(self, point: SweepPoint) -> None:
        """Add a point that a search has proposed, so that its runs can be compared with its forecast."""
        self._points[point.config_id, point.machine] = point

    def add(self, record: RunRecord) -> None:
        """Add the record of one run to the measured runs from which corrections are computed. A record that cannot be
        compared with a prediction is ignored."""
        around = record.circumstance
        point = self._points.get((record.config_id, around.machine.name))
        if point is None or point.forecast is None:
            return
        step, room = point.forecast.step, point.forecast.room
        predicted = PredictedRun(step.s if step else None, room.tensor_bytes if room else None)
        if neighbour := neighbours.compare_with_prediction(record, predicted):
            self._known[record.config_id, around.machine.name, around.repeat, around.attempt] = neighbour
            self._corrections.clear()

    def correction(self, point: SweepPoint) -> Correction:
        """Return the factors by which to multiply the predicted memory and step time of a point. They come from the
        measured runs of the most similar points; without measured runs, they are 1."""
        for attempt in self._unread:
            if attempt.outcome == "ok":
                with contextlib.suppress(OSError, store.Unreadable):
                    self.add(store.read_record(attempt.folder / store.RECORD))
        if not self._known:
            return UNCORRECTED
        place = neighbours.identify_model(point.spec["model"]), point.spec["engine"]["name"], point.machine
        if place not in self._corrections:
            nearest = neighbours.select_nearest([*self._known.values()], *place)
            self._corrections[place] = neighbours.compute_correction(nearest)
        return self._corrections[place]


def extend_time_limits(
    left: Sequence[PointStatus], view: StudyState, corrections: MeasuredCorrections
) -> list[PointStatus]:
    """Return the points, each with the time limit for its next submission.

    Measured runs of similar points can lengthen a limit but never shorten it. A shorter limit would gain little, and
    the point may be slower than those runs suggest. A point that reached its limit in an earlier attempt gets the
    longest limit at once.
    """
    return [
        one._replace(point=one.point.model_copy(update={"time_limit_min": _compute_limit_min(one, view, corrections)}))
        for one in left
    ]


def _compute_limit_min(one: PointStatus, view: StudyState, corrections: MeasuredCorrections) -> float | None:
    point = one.point
    step = point.forecast.step if point.forecast else None
    if point.bound_min is None or step is None:
        return point.time_limit_min
    if any(attempt.outcome == "timeout" for attempt in view.seen.of(one.key)):
        return point.bound_min
    high_s = max(1.0, corrections.correction(point).step) * step.high_s
    protocol, setup_min = read_protocol(point.spec["measure"]), one.sweep.scheduling.setup_min
    return forecast.compute_limit_min(protocol, high_s, setup_min, point.bound_min)
