"""Forecasts of a point before it has run: its memory, the time of a step, the minutes of an attempt. Pure."""

import contextlib
import math
from typing import Literal, NamedTuple

from bench.core.errors import NoPrediction, UserError
from bench.core.machine import Machine
from bench.core.spec import Device, Frozen, MeasureSpec, RunSpec
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time

FAR_OUT_FACTOR = 1.2
"""A device's memory times this is far out of memory: a point whose low estimate is above need not run. Recorded peaks
lie within 9 % of their prediction (results/predictions), and this is twice that. What lies between is run."""

Fits = Literal["fits", "may fit", "does not fit", "unknown"]


class MemoryForecast(Frozen):
    """Bytes that a device must have."""

    low_bytes: int
    high_bytes: int
    tensor_bytes: int  # of both: live tensors at the highest peak

    def corrected(self, factor: float) -> "MemoryForecast":
        """Return this with `factor` times as many bytes of tensors."""
        more = round((factor - 1) * self.tensor_bytes)
        return MemoryForecast(
            low_bytes=self.low_bytes + more, high_bytes=self.high_bytes + more, tensor_bytes=self.tensor_bytes + more
        )

    def fits(self, memory_bytes: int | None) -> Fits:
        """Whether a device with so much memory is enough."""
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
    """What is predicted of a point. None is unknown."""

    room: MemoryForecast | None = None
    step: StepForecast | None = None


def predict_forecast(spec: RunSpec, machine: Machine, device: str | None) -> Forecast:
    """Return what can be predicted of `spec`: nothing where its device, "cpu" or "cuda", is not known yet, or where its
    family or its engine does not say what decides it."""
    if device is None:
        return Forecast()
    at: Device = "cpu" if device == "cpu" else "cuda"
    try:
        needed, step = predict_memory(spec, at, machine.memory_bytes), None
    except UserError:  # or sizes that nothing can hold
        return Forecast()
    low, high = needed.device
    room = None
    if spec.model.compile == "none":  # what a compiler keeps for backward is not predicted, but it is less
        room = MemoryForecast(low_bytes=low, high_bytes=high, tensor_bytes=max(needed.init_peak, needed.peak))
    with contextlib.suppress(UserError):  # a number that the machine's file lacks
        time = predict_step_time(spec, machine, at)
        step = StepForecast(low_s=time.low_s, s=time.step_s, high_s=time.high_s)
    return Forecast(room=room, step=step)


def explain_unpredicted(spec: RunSpec) -> str | None:
    """Return why nothing can be predicted of `spec` on any machine; None where something can."""
    try:
        predict_memory(spec)
    except NoPrediction as unknown:
        return str(unknown)
    except UserError:
        pass
    return None


START_S = (2.5, 17.0)
"""Seconds that an attempt takes beside its steps: forked from a process that has done its imports (README, packing);
and the slowest of the recorded runs, from cold. How long models of billions of parameters take to build was not
measured."""
MARGIN = 3.0
"""A time limit holds if steps take this many times as long as the high end of the prediction. Of 36 runs of the testbed
with fifteen other processes on its two cores, 28 took up to 3 times as long as on quiet ones, the worst 8.7 times;
a point whose time runs out all the same has the longest limit in its next attempt."""
LEAST_MIN = 2.0
"""No predicted limit is shorter: a cold start takes 9 s, and building an op for the first time 30 s more."""
_INSPECTED = 3  # untimed steps after the window


class AttemptMinutes(NamedTuple):
    """Of one attempt, from and to."""

    low: float
    high: float


def compute_shortest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps on a CPU."""
    return (_count_steps(protocol, step_s) + _INSPECTED * protocol.inspect) * step_s


def compute_longest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps on a GPU, which warms up by time too and is one block ahead."""
    return compute_shortest_s(protocol, step_s) + protocol.gpu_warmup_s + protocol.block_steps * step_s


def _count_steps(protocol: MeasureSpec, step_s: float) -> int:
    """Return the steps of warm-up and window; times are looked at between blocks."""
    block, enough = protocol.block_steps, max(protocol.min_steps, math.ceil(protocol.window_s / step_s))
    window = min(_round_up_to_blocks(enough, block), _round_up_to_blocks(math.ceil(protocol.max_s / step_s), block))
    return protocol.warmup_steps + window


def _round_up_to_blocks(steps: int, block: int) -> int:
    """Return `steps` in whole blocks."""
    return -(-steps // block) * block


def compute_minutes(protocol: MeasureSpec, low_s: float, high_s: float) -> AttemptMinutes:
    """Return how long an attempt takes whose steps take between `low_s` and `high_s`, its start included."""
    low, high = START_S
    return AttemptMinutes(
        (low + compute_shortest_s(protocol, low_s)) / 60, (high + compute_longest_s(protocol, high_s)) / 60
    )


def compute_limit_min(protocol: MeasureSpec, high_s: float, setup_min: float, bound_min: float) -> float:
    """Return the time limit of an attempt whose steps are predicted to take at most `high_s`.

    `setup_min` is what a start may take, `bound_min` the limit where nothing is predicted, which this never exceeds.
    """
    needed = setup_min + compute_longest_s(protocol, MARGIN * high_s) / 60
    return min(max(needed, LEAST_MIN), bound_min)


def compute_bound_min(protocol: MeasureSpec, setup_min: float) -> float:
    """Return the limit where nothing is predicted: what a start may take, and twice the longest window, since nobody
    knows how long the warm-up's steps are."""
    return setup_min + 2 * protocol.max_s / 60
