"""What is predicted of points before they run: memory, and how long a step takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.config import compose
from bench.config.compose import StudyPoint
from bench.config.decode import check_rank
from bench.core.engine_costs import SimulatedPass
from bench.core.errors import NoPrediction, UserError
from bench.core.spec import Device
from bench.core.study import Study
from bench.predict.memory import (
    HostMemory,
    LargestMicroBatch,
    MemoryPrediction,
    find_largest_micro_batch,
    format_gigabytes,
    predict_host_memory,
    predict_memory,
)
from bench.predict.step_time import StepTime, predict_passes, predict_step_time
from bench.predict.workload import USUAL, Software, find_software
from bench.sweep import inputs
from bench.sweep.advise.remedies import NO_REMEDY, list_remedies
from bench.sweep.inputs import GivenOverrides, find_study


class Prediction(NamedTuple):
    """What is predicted of one point; where something is None, why it is unknown stands beside it."""

    point: StudyPoint
    device: Device
    memory: MemoryPrediction | None  # of the rank that needs most
    memory_unknown: str
    time: StepTime | None
    time_unknown: str
    rehearsed_s: float | None = None  # that a step computes by a rehearsal
    software: Software = USUAL
    config_dir: Path | None = None  # folder of the user's own group files

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a device; None: perhaps, or one of both is unknown."""
        room = self.point.composed.machine.memory_bytes
        return self.memory.fits(room) if self.memory and room is not None else None

    @property
    def by_class(self) -> bool:
        """Whether the interval of its time is that of a class of software: nothing was calibrated or rehearsed."""
        found = self.point.composed.machine.calibration
        return (
            self.time is not None
            and self.device == "cuda"
            and self.rehearsed_s is None
            and not (found and found.matmul)
        )

    def describe_fit(self) -> str:
        """Return in words whether it fits."""
        if self.point.composed.machine.memory_bytes is None:
            return "size of the device unknown"
        return {True: "fits", False: "does not fit", None: "may fit"}[self.fits]

    def host(self) -> HostMemory | None:
        """Return what a node's host needs, where something is kept there."""
        return predict_host_memory(self.point.composed.spec, self.device, self.point.composed.machine.memory_bytes)

    def list_passes(self) -> Sequence[SimulatedPass]:
        """Return when each pass of a pipeline's step is made; nothing where there is none or no time is known."""
        composed = self.point.composed
        if self.time is None:
            return ()
        return predict_passes(composed.spec, composed.machine, self.device, self.rehearsed_s, software=self.software)

    def largest_micro_batch(self) -> LargestMicroBatch | None:
        """Return the largest micro-batch that fits; None where the size of a device is unknown. It costs as much as
        thirty predictions."""
        room = self.point.composed.machine.memory_bytes
        return find_largest_micro_batch(self.point.composed.spec, room, self.device) if room else None

    def describe_remedy(self) -> str:
        """Return in words what would fit in place of a point that does not; empty for every other point. It costs as
        much as fifty predictions."""
        if self.fits is not False:
            return ""
        remedies = list_remedies(self.point.composed, self.point.overrides, self.config_dir, self.device)
        return "; ".join(remedies) or NO_REMEDY


def predict_points(
    study: Study | str | Path | None,
    overrides: GivenOverrides,
    config_dir: Path | None,
    *,
    straggler: float,
    data_wait_s: float,
    rehearsed_s: float | None,
    software: str | None = None,
) -> list[Prediction]:
    """Return what is predicted of every point that is asked for; `software` may stand among the overrides, too."""
    composed, given = find_study(study, overrides, config_dir, "predict")
    named = [str(value) for key, values in given if key == "software" for value in values]
    named += [] if software is None else [software]
    if len(named) > 1:
        raise UserError(f"software={','.join(named)}", "one class of software at a time", "call predict once for each")
    chosen = find_software(named[0]) if named else USUAL
    given = [(key, values) for key, values in given if key != "software"]
    points = compose.compose_points(composed, given, config_dir, lambda one: one.machine.device, check_rank).points
    found = [_predict_point(point, straggler, data_wait_s, rehearsed_s, chosen) for point in points]
    return [one._replace(config_dir=config_dir) for one in found]


def _predict_point(
    point: StudyPoint, straggler: float, data_wait_s: float, rehearsed_s: float | None, software: Software
) -> Prediction:
    spec, machine, device = point.composed.spec, point.composed.machine, inputs.find_predicted_device(point.composed)
    try:
        needed = predict_memory(spec, device, machine.memory_bytes)
    except NoPrediction as unknown:
        return Prediction(point, device, None, str(unknown), None, str(unknown))
    room = machine.memory_bytes
    if room is not None and needed.fits(room) is False:
        least = f"needs at least {format_gigabytes(needed.device[0])} GB of {format_gigabytes(room)}"
        return Prediction(point, device, needed, "", None, f"does not fit: {least}", rehearsed_s, software)
    try:
        time = predict_step_time(
            spec, machine, device, straggler=straggler, data_wait_s=data_wait_s, rehearsed_s=rehearsed_s,
            software=software,
        )  # fmt: skip
    except UserError as lacking:  # a number that the machine's file has not
        return Prediction(point, device, needed, "", None, str(lacking), rehearsed_s, software)
    return Prediction(point, device, needed, "", time, "", rehearsed_s, software)
