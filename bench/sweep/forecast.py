"""What formulas say of a point before it has run, kept with what was asked: its memory and the time of a step."""

import contextlib
from typing import Literal

from bench.errors import NoPrediction, UserError
from bench.machine import Machine
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.spec import Device, Frozen, RunSpec

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
