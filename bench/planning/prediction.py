"""What is predicted of points before they run: memory, and how long a step takes."""

from pathlib import Path
from typing import NamedTuple

from bench import config
from bench.config import Point
from bench.decode import check_rank
from bench.errors import NoPrediction, UserError
from bench.planning import target
from bench.planning.overrides import Given, study_of
from bench.predict.memory import Memory, Micro, host, largest_micro_batch, memory
from bench.predict.memory.host import Host
from bench.predict.step_time import Time, step_time
from bench.spec import Device
from bench.study import Study


class Prediction(NamedTuple):
    """What is predicted of one point; where something is None, why it is unknown stands beside it."""

    point: Point
    device: Device
    memory: Memory | None  # of the rank that needs most
    memory_unknown: str
    time: Time | None
    time_unknown: str

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a device; None: perhaps, or one of both is unknown."""
        room = self.point.asked.machine.memory_bytes
        return self.memory.fits(room) if self.memory and room is not None else None

    def host(self) -> Host | None:
        """Return what a node's host needs, where something is kept there."""
        return host.host(self.point.asked.spec, self.device, self.point.asked.machine.memory_bytes)

    def largest_micro_batch(self) -> Micro | None:
        """Return the largest micro-batch that fits; None where the size of a device is unknown. It costs as much as
        thirty predictions."""
        room = self.point.asked.machine.memory_bytes
        return largest_micro_batch(self.point.asked.spec, room, self.device) if room else None


def predict(
    study: Study | str | Path | None,
    overrides: Given,
    config_dir: Path | None,
    *,
    straggler: float,
    data_wait_s: float,
    rehearsed_s: float | None,
) -> list[Prediction]:
    """Return what is predicted of every point that is asked for."""
    asked, given = study_of(study, overrides, config_dir, "predict")
    points = config.points(asked, given, config_dir, lambda one: one.machine.device, check_rank).points
    return [_predicted(point, straggler, data_wait_s, rehearsed_s) for point in points]


def _predicted(point: Point, straggler: float, data_wait_s: float, rehearsed_s: float | None) -> Prediction:
    spec, machine, device = point.asked.spec, point.asked.machine, target.kind(point.asked)
    try:
        needed = memory(spec, device, machine.memory_bytes)
    except NoPrediction as unknown:
        return Prediction(point, device, None, str(unknown), None, str(unknown))
    try:
        time = step_time(spec, machine, device, straggler=straggler, data_wait_s=data_wait_s, rehearsed_s=rehearsed_s)
    except UserError as lacking:  # a number that the machine's file has not
        return Prediction(point, device, needed, "", None, str(lacking))
    return Prediction(point, device, needed, "", time, "")
