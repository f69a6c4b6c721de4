"""Predict memory and step time of points (configurations) before they run."""

import math
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.config import compose
from bench.config.compose import StudyPoint
from bench.config.decode import check_rank
from bench.core.engine_costs import SimulatedPass
from bench.core.errors import NoPrediction, UserError
from bench.core.formatting import format_interval
from bench.core.spec import Device
from bench.core.study import Pair, Study
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
from bench.sweep.advise.questions import list_words
from bench.sweep.advise.remedies import NO_REMEDY, list_remedies
from bench.sweep.inputs import GivenOverrides, find_study


class Prediction(NamedTuple):
    """Prediction for one point (configuration). If memory or time is None, the field `memory_unknown` or `time_unknown`
    gives the reason."""

    point: StudyPoint
    device: Device
    memory: MemoryPrediction | None  # of the rank that needs the most memory
    memory_unknown: str
    time: StepTime | None
    time_unknown: str
    rehearsed_s: float | None = None  # computing time of a step, measured by a rehearsal
    software: Software = USUAL
    config_dir: Path | None = None  # folder of the user's own configuration groups

    @property
    def fits(self) -> bool | None:
        """Return whether the point fits into a device's memory. None if the predicted range contains the memory size,
        or if memory size or prediction is unknown."""
        room = self.point.composed.machine.memory_bytes
        return self.memory.fits(room) if self.memory and room is not None else None

    @property
    def by_class(self) -> bool:
        """Return whether the uncertainty interval of the predicted step time comes from published step times of the
        same class of training software, such as ZeRO. This is so for a GPU that has neither a calibration nor a
        rehearsal (one rank's measured computing time)."""
        found = self.point.composed.machine.calibration
        known = self.rehearsed_s is not None or bool(found and found.matmul)
        return self.time is not None and self.device == "cuda" and not known

    def __repr__(self) -> str:
        spec = self.point.composed.spec
        point = f"{self.point.config_id} {spec.model.name} {spec.engine.name} micro {spec.batch.micro}"
        return f"<Prediction {point}: {self.describe()}>"

    def describe(self) -> str:
        """Return one line with the memory per device, whether it fits, the step time and the throughput."""
        if self.memory is None:
            return self.memory_unknown
        low, high = self.memory.device
        span = f"{format_gigabytes(low)}–{format_gigabytes(high)}" if high > low else format_gigabytes(low)
        step, time = f"no step time: {self.time_unknown}", self.time
        if self.fits is False:
            step = "no step time"
        if time:
            tokens = (time.tokens / seconds for seconds in (time.step_s, time.high_s, time.low_s))
            step = f"{format_interval(time.step_s, time.low_s, time.high_s)} s a step"
            step += f", {format_interval(*tokens)} tokens/s"
        return f"{span} GB: {self.describe_fit()}; {step}"

    def describe_fit(self) -> str:
        """Return a text that says whether the point fits into a device's memory."""
        if self.point.composed.machine.memory_bytes is None:
            return "device memory unknown"
        return {True: "fits", False: "does not fit", None: "may fit"}[self.fits]

    def host(self) -> HostMemory | None:
        """Return the host memory that a node needs; None if nothing is offloaded to the host."""
        return predict_host_memory(self.point.composed.spec, self.device, self.point.composed.machine.memory_bytes)

    def list_passes(self) -> Sequence[SimulatedPass]:
        """Return the simulated time of each pass (forward or backward of one micro-batch on one stage) in a pipeline's
        step. Empty without a pipeline or without a predicted step time."""
        composed = self.point.composed
        if self.time is None:
            return ()
        return predict_passes(composed.spec, composed.machine, self.device, self.rehearsed_s, software=self.software)

    def largest_micro_batch(self) -> LargestMicroBatch | None:
        """Return the largest micro-batch that fits; None if the memory size of the device is unknown.

        A call takes about as long as thirty predictions.
        """
        room = self.point.composed.machine.memory_bytes
        return find_largest_micro_batch(self.point.composed.spec, room, self.device) if room else None

    def describe_remedy(self) -> str:
        """Return a text with changes that would make a point fit into memory. Empty for a point that fits or may fit.

        A call takes about as long as fifty predictions.
        """
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
    """Return the prediction for every point of a study. `straggler` is the computing time of the slowest rank divided
    by that of the other ranks. `data_wait_s` is the number of seconds for which a step waits for its batches.
    `rehearsed_s` is the number of computing seconds per step, measured in a rehearsal (one rank alone); None without a
    rehearsal. The class of training software (eager, usual or fused) is given as `software` or as an override
    `software=NAME`."""
    _check_number("straggler", straggler, lambda number: number >= 1, "a factor of at least 1; set for example 1.1")
    seconds = "a number of seconds above 0; set for example 0.01"
    _check_number("data_wait_s", data_wait_s, lambda number: number >= 0, seconds)
    if rehearsed_s is not None:
        _check_number("rehearsed_s", rehearsed_s, lambda number: number > 0, seconds)
    composed, given = find_study(study, overrides, config_dir, "predict")
    name, given = inputs.take_name(given, "software", software, "class of software", "predict")
    chosen = USUAL if name is None else find_software(name)
    if foreign := [key for key, _ in given if key in list_words()]:
        raise UserError(foreign[0], "is an argument of `zeroscale advise` only", "remove it, or use `zeroscale advise`")
    small: Sequence[Pair] = ()
    if composed != Study(name="adhoc"):  # a study is predicted as `sweep` would measure it
        small = inputs.choose_small_base(composed, given, config_dir)
        composed = composed.model_copy(update={"base": composed.base | dict(small)})
    with inputs.mention_small(small):
        points = compose.compose_points(composed, given, config_dir, lambda one: one.machine.device, check_rank).points
    terms = straggler, data_wait_s, rehearsed_s, chosen
    return [_predict_point(point, *terms)._replace(config_dir=config_dir) for point in points]


def _check_number(name: str, value: object, valid: Callable[[float], bool], rule: str) -> None:
    """Raise UserError unless `value` is a finite number for which `valid` is true. `rule` is a text for the message:
    what the value must be and, after a semicolon, how to correct the value."""
    if not (isinstance(value, numbers.Real) and math.isfinite(value) and valid(float(value))):
        must, _, remedy = rule.partition("; ")
        raise UserError(f"{name}={value!r}", f"must be {must}", remedy)


def _predict_point(
    point: StudyPoint, straggler: float, data_wait_s: float, rehearsed_s: float | None, software: Software
) -> Prediction:
    spec, machine, device = point.composed.spec, point.composed.machine, inputs.find_predicted_device(point.composed)
    # Memory first: no time is predicted for a point that does not fit.
    room = machine.memory_bytes
    try:
        needed = predict_memory(spec, device, room)
    except NoPrediction as unknown:
        return Prediction(point, device, None, str(unknown), None, str(unknown))
    time, unknown_time = None, ""
    if room is not None and needed.fits(room) is False:
        least = f"needs at least {format_gigabytes(needed.device[0])} GB, and the device has {format_gigabytes(room)}"
        unknown_time = f"does not fit: {least}"
    else:
        try:
            time = predict_step_time(
                spec, machine, device, straggler=straggler, data_wait_s=data_wait_s, rehearsed_s=rehearsed_s,
                software=software,
            )  # fmt: skip
        except UserError as lacking:  # the machine's file lacks a number
            unknown_time = str(lacking)
    return Prediction(point, device, needed, "", time, unknown_time, rehearsed_s, software)
