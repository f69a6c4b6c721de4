"""Forecast a point (configuration) before it runs: its memory, its step time, and the duration of one attempt. No side
effects."""

import contextlib
import math
from typing import Literal, NamedTuple

from bench.core.errors import NoPrediction, UserError
from bench.core.machine import Machine
from bench.core.spec import Device, Frozen, MeasureSpec, RunSpec
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time

FAR_OUT_FACTOR = 1.2
"""A point does not run if the low end of its predicted memory exceeds the device's memory by more than this factor.

Recorded peaks lie within 9 % of their prediction (results/predictions). The margin of 20 % is about twice that.
"""

Fits = Literal["fits", "may fit", "does not fit", "unknown"]


class MemoryForecast(Frozen):
    """Predicted range of the bytes that a point needs on one device, from low to high."""

    low_bytes: int
    high_bytes: int
    tensor_bytes: int  # bytes of live tensors at the highest peak, included in both other values

    def corrected(self, factor: float) -> "MemoryForecast":
        """Return a copy in which the bytes of tensors are multiplied by `factor`; other bytes stay the same."""
        more = round((factor - 1) * self.tensor_bytes)
        return MemoryForecast(
            low_bytes=self.low_bytes + more, high_bytes=self.high_bytes + more, tensor_bytes=self.tensor_bytes + more
        )

    def fits(self, memory_bytes: int | None) -> Fits:
        """Return whether the predicted range of bytes is below a device's `memory_bytes` ("fits"), above it ("does not
        fit"), or contains it ("may fit"). Return "unknown" if `memory_bytes` is None."""
        if memory_bytes is None:
            return "unknown"
        if self.high_bytes <= memory_bytes:
            return "fits"
        return "does not fit" if self.low_bytes > memory_bytes else "may fit"


class StepForecast(Frozen):
    """Predicted seconds of one optimizer step, with the low and high end of the prediction's interval."""

    low_s: float
    s: float
    high_s: float


class Forecast(Frozen):
    """Predicted memory and step time of a point. A value is None if it is unknown."""

    room: MemoryForecast | None = None
    step: StepForecast | None = None


def predict_forecast(spec: RunSpec, machine: Machine, device: str | None) -> Forecast:
    """Return the predicted memory and step time of `spec` on a machine whose devices are "cpu" or "cuda".

    Both are None if `device` is None (not known yet), or if the model family or the engine has no formulas.
    """
    if device is None:
        return Forecast()
    at: Device = "cpu" if device == "cpu" else "cuda"
    try:
        needed, step = predict_memory(spec, at, machine.memory_bytes), None
    except UserError:  # no formulas, or sizes beyond any device
        return Forecast()
    low, high = needed.device
    room = MemoryForecast(low_bytes=low, high_bytes=high, tensor_bytes=max(needed.init_peak, needed.peak))
    with contextlib.suppress(UserError):  # the machine's file lacks a number
        time = predict_step_time(spec, machine, at)
        step = StepForecast(low_s=time.low_s, s=time.step_s, high_s=time.high_s)
    return Forecast(room=room, step=step)


def explain_unpredicted(spec: RunSpec) -> str | None:
    """Return the reason why `spec` has no prediction on any machine; None if it has a prediction."""
    try:
        predict_memory(spec)
    except NoPrediction as unknown:
        return str(unknown)
    except UserError:
        pass
    return None


START_S = (2.5, 17.0)
"""Least and greatest number of seconds that an attempt takes in addition to its steps. The least is for ranks that are
forked from a process with torch already imported (README, packing). The greatest is that of recorded cold starts.
Models with billions of parameters may take longer to build; this was not measured."""
MARGIN = 3.0
"""A time limit allows for steps that take this many times the high end of the predicted step time.

On the testbed, 36 runs shared its two cores with fifteen other processes. Of these runs, 28 took up to 3 times as long
as on quiet cores, and the slowest took 8.7 times as long. A point that still reaches its limit gets the longest limit
in its next attempt.
"""
LEAST_MIN = 2.0
"""Shortest time limit, in minutes, that is derived from a prediction. A cold start takes 9 s, and the first build of a
compiled op takes 30 s more."""
_INSPECTED = 3  # untimed steps after the window, for `measure.inspect`


class AttemptMinutes(NamedTuple):
    """Shortest and longest predicted duration of one attempt, in minutes."""

    low: float
    high: float


def compute_shortest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps of an attempt on a CPU, if one step takes `step_s` seconds. This includes warm-up
    steps and untimed steps after the window."""
    return (_count_steps(protocol, step_s) + _INSPECTED * protocol.inspect) * step_s


def compute_longest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps of an attempt on a GPU, if one step takes `step_s` seconds.

    With the same step time, an attempt takes longer on a GPU than on a CPU. On a GPU, the warm-up has a minimum
    duration, and the host runs one block of steps ahead of the GPU.
    """
    return compute_shortest_s(protocol, step_s) + protocol.gpu_warmup_s + protocol.block_steps * step_s


def _count_steps(protocol: MeasureSpec, step_s: float) -> int:
    """Return the number of steps in warm-up and measurement window. Steps run in blocks, and the window ends only
    between two blocks."""
    block, enough = protocol.block_steps, max(protocol.min_steps, math.ceil(protocol.window_s / step_s))
    blocks = math.ceil(min(enough, math.ceil(protocol.max_s / step_s)) / block)
    return protocol.warmup_steps + blocks * block


def compute_minutes(
    protocol: MeasureSpec, low_s: float, high_s: float, evaluations: tuple[float, float] = (0.0, 0.0)
) -> AttemptMinutes:
    """Return the shortest and longest duration, in minutes, of an attempt whose steps take between `low_s` and `high_s`
    seconds. The start of the attempt is included. The evaluations of a training take as long as between
    `evaluations[0]` and `evaluations[1]` steps."""
    shortest_s = START_S[0] + compute_shortest_s(protocol, low_s) + evaluations[0] * low_s
    longest_s = START_S[1] + compute_longest_s(protocol, high_s) + evaluations[1] * high_s
    return AttemptMinutes(shortest_s / 60, longest_s / 60)


def compute_limit_min(
    protocol: MeasureSpec, high_s: float, setup_min: float, bound_min: float, evaluations: float = 0.0
) -> float:
    """Return the time limit, in minutes, of an attempt whose steps are predicted to take at most `high_s` seconds. The
    evaluations of a training take as long as `evaluations` steps.

    `setup_min` is the number of minutes that the start may take. The limit never exceeds `bound_min`, the limit of a
    point (configuration) without a prediction.
    """
    slow_s = MARGIN * high_s
    needed = setup_min + (compute_longest_s(protocol, slow_s) + evaluations * slow_s) / 60
    return min(max(needed, LEAST_MIN), bound_min)


def compute_bound_min(protocol: MeasureSpec, setup_min: float, step_s: float | None = None) -> float:
    """Return the longest time limit that an attempt gets, in minutes. It is the limit of a point without a prediction.

    The limit is `setup_min` minutes for the start, plus twice the longest measurement window. One of the two windows
    stands for the warm-up steps, because their duration is unknown. If the steps are predicted to take up to `step_s`
    seconds, and all of them therefore take longer than two windows, the limit is longer.
    """
    predicted_s = compute_longest_s(protocol, step_s) if step_s else 0.0
    return setup_min + max(2 * protocol.max_s, predicted_s) / 60
