"""Forecasts for a point before it runs: memory, time of a step, minutes of an attempt. No side effects."""

import contextlib
import math
from typing import Literal, NamedTuple

from bench.core.errors import NoPrediction, UserError
from bench.core.machine import Machine
from bench.core.spec import Device, Frozen, MeasureSpec, RunSpec
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time

FAR_OUT_FACTOR = 1.2
"""A point whose low estimate exceeds the device's memory by this factor does not run. Recorded peaks lie within 9 % of
their prediction (results/predictions); the margin is twice that. A point between memory and margin runs."""

Fits = Literal["fits", "may fit", "does not fit", "unknown"]


class MemoryForecast(Frozen):
    """Bytes that a point needs on a device."""

    low_bytes: int
    high_bytes: int
    tensor_bytes: int  # bytes of live tensors at the highest peak, included in both other values

    def corrected(self, factor: float) -> "MemoryForecast":
        """Return a copy with `factor` times as many bytes of tensors."""
        more = round((factor - 1) * self.tensor_bytes)
        return MemoryForecast(
            low_bytes=self.low_bytes + more, high_bytes=self.high_bytes + more, tensor_bytes=self.tensor_bytes + more
        )

    def fits(self, memory_bytes: int | None) -> Fits:
        """Return how this compares with a device of `memory_bytes`; None is an unknown device."""
        if memory_bytes is None:
            return "unknown"
        if self.high_bytes <= memory_bytes:
            return "fits"
        return "does not fit" if self.low_bytes > memory_bytes else "may fit"


class StepForecast(Frozen):
    """Seconds of an optimizer step."""

    low_s: float
    s: float
    high_s: float


class Forecast(Frozen):
    """Prediction for a point. None is unknown."""

    room: MemoryForecast | None = None
    step: StepForecast | None = None


def predict_forecast(spec: RunSpec, machine: Machine, device: str | None) -> Forecast:
    """Return the prediction for `spec` on a device, "cpu" or "cuda".

    It is empty if the device is still unknown, or if the family or the engine has no formulas.
    """
    if device is None:
        return Forecast()
    at: Device = "cpu" if device == "cpu" else "cuda"
    try:
        needed, step = predict_memory(spec, at, machine.memory_bytes), None
    except UserError:  # no formulas, or sizes beyond any device
        return Forecast()
    low, high = needed.device
    room = None
    if spec.model.compile == "none":  # compiled code keeps fewer tensors for the backward pass: not predicted
        room = MemoryForecast(low_bytes=low, high_bytes=high, tensor_bytes=max(needed.init_peak, needed.peak))
    with contextlib.suppress(UserError):  # the machine's file lacks a number
        time = predict_step_time(spec, machine, at)
        step = StepForecast(low_s=time.low_s, s=time.step_s, high_s=time.high_s)
    return Forecast(room=room, step=step)


def explain_unpredicted(spec: RunSpec) -> str | None:
    """Return why `spec` has no prediction on any machine; None if it has one."""
    try:
        predict_memory(spec)
    except NoPrediction as unknown:
        return str(unknown)
    except UserError:
        pass
    return None


START_S = (2.5, 17.0)
"""Seconds of an attempt besides its steps: the fewest with ranks forked from a process with torch imported (README,
packing), the most of the recorded cold starts. Building models of billions of parameters was not measured."""
MARGIN = 3.0
"""A time limit allows steps this many times as long as the high end of the prediction. Of 36 runs of the testbed with
fifteen other processes on its two cores, 28 took up to 3 times as long as on quiet cores, the worst 8.7 times. A point
that still reaches its limit gets the longest limit in its next attempt."""
LEAST_MIN = 2.0
"""Least predicted limit: a cold start takes 9 s, and the first build of a compiled op 30 s more."""
_INSPECTED = 3  # untimed steps after the window, for `measure.inspect`


class AttemptMinutes(NamedTuple):
    """Shortest and longest time of one attempt."""

    low: float
    high: float


def compute_shortest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps on a CPU."""
    return (_count_steps(protocol, step_s) + _INSPECTED * protocol.inspect) * step_s


def compute_longest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps on a GPU: its warm-up has a least time, and the host runs one block ahead."""
    return compute_shortest_s(protocol, step_s) + protocol.gpu_warmup_s + protocol.block_steps * step_s


def _count_steps(protocol: MeasureSpec, step_s: float) -> int:
    """Return the steps of warm-up and window; a window ends between two blocks of steps."""
    block, enough = protocol.block_steps, max(protocol.min_steps, math.ceil(protocol.window_s / step_s))
    blocks = math.ceil(min(enough, math.ceil(protocol.max_s / step_s)) / block)
    return protocol.warmup_steps + blocks * block


def compute_minutes(protocol: MeasureSpec, low_s: float, high_s: float) -> AttemptMinutes:
    """Return the minutes of an attempt whose steps take between `low_s` and `high_s`, its start included."""
    shortest_s = START_S[0] + compute_shortest_s(protocol, low_s)
    longest_s = START_S[1] + compute_longest_s(protocol, high_s)
    return AttemptMinutes(shortest_s / 60, longest_s / 60)


def compute_limit_min(protocol: MeasureSpec, high_s: float, setup_min: float, bound_min: float) -> float:
    """Return the time limit of an attempt whose steps are predicted to take at most `high_s`.

    `setup_min` are the minutes that a start may take. The limit never exceeds `bound_min`, the limit of a point without
    a prediction.
    """
    needed = setup_min + compute_longest_s(protocol, MARGIN * high_s) / 60
    return min(max(needed, LEAST_MIN), bound_min)


def compute_bound_min(protocol: MeasureSpec, setup_min: float) -> float:
    """Return the time limit of a point without a prediction.

    It is the time of a start and twice the longest window, as the length of the warm-up steps is unknown.
    """
    return setup_min + 2 * protocol.max_s / 60
