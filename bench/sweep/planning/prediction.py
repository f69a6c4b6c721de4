"""What is predicted of points before they run: memory, and how long a step takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.config import compose
from bench.config.compose import StudyPoint
from bench.config.decode import check_rank
from bench.engine_costs import PlayedPass
from bench.errors import NoPrediction, UserError
from bench.predict.memory import LargestMicroBatch, MemoryPrediction, find_largest_micro_batch, host, predict_memory
from bench.predict.memory.host import HostMemory
from bench.predict.step_time import StepTime, predict_passes, predict_step_time
from bench.spec import Device
from bench.study import Study
from bench.sweep.planning import target
from bench.sweep.planning.overrides import GivenOverrides, find_study


class Prediction(NamedTuple):
    """What is predicted of one point; where something is None, why it is unknown stands beside it."""

    point: StudyPoint
    device: Device
    memory: MemoryPrediction | None  # of the rank that needs most
    memory_unknown: str
    time: StepTime | None
    time_unknown: str
    rehearsed_s: float | None = None  # that a step computes by a rehearsal

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a device; None: perhaps, or one of both is unknown."""
        room = self.point.composed.machine.memory_bytes
        return self.memory.fits(room) if self.memory and room is not None else None

    def describe_fit(self) -> str:
        """Return in words whether it fits."""
        if self.point.composed.machine.memory_bytes is None:
            return "size of the device unknown"
        return {True: "fits", False: "does not fit", None: "may fit"}[self.fits]

    def host(self) -> HostMemory | None:
        """Return what a node's host needs, where something is kept there."""
        return host.predict_host_memory(self.point.composed.spec, self.device, self.point.composed.machine.memory_bytes)

    def list_passes(self) -> Sequence[PlayedPass]:
        """Return when each pass of a pipeline's step is made; nothing where there is none or no time is known."""
        composed = self.point.composed
        return predict_passes(composed.spec, composed.machine, self.device, self.rehearsed_s) if self.time else ()

    def largest_micro_batch(self) -> LargestMicroBatch | None:
        """Return the largest micro-batch that fits; None where the size of a device is unknown. It costs as much as
        thirty predictions."""
        room = self.point.composed.machine.memory_bytes
        return find_largest_micro_batch(self.point.composed.spec, room, self.device) if room else None


def predict_points(
    study: Study | str | Path | None,
    overrides: GivenOverrides,
    config_dir: Path | None,
    *,
    straggler: float,
    data_wait_s: float,
    rehearsed_s: float | None,
) -> list[Prediction]:
    """Return what is predicted of every point that is asked for."""
    composed, given = find_study(study, overrides, config_dir, "predict")
    points = compose.compose_points(composed, given, config_dir, lambda one: one.machine.device, check_rank).points
    return [_predict_point(point, straggler, data_wait_s, rehearsed_s) for point in points]


def _predict_point(point: StudyPoint, straggler: float, data_wait_s: float, rehearsed_s: float | None) -> Prediction:
    spec, machine, device = point.composed.spec, point.composed.machine, target.find_predicted_device(point.composed)
    try:
        needed = predict_memory(spec, device, machine.memory_bytes)
    except NoPrediction as unknown:
        return Prediction(point, device, None, str(unknown), None, str(unknown))
    try:
        time = predict_step_time(
            spec, machine, device, straggler=straggler, data_wait_s=data_wait_s, rehearsed_s=rehearsed_s
        )
    except UserError as lacking:  # a number that the machine's file has not
        return Prediction(point, device, needed, "", None, str(lacking))
    return Prediction(point, device, needed, "", time, "", rehearsed_s)
