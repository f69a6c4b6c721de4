"""The clock: seconds per optimizer step, the device synchronised at a block's edges and never inside a step."""

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Times consecutive steps: begin, one mark at the end of every step, end."""

    def begin(self) -> None:
        """Start a block; everything launched before has finished."""

    def mark(self) -> None:
        """Note the end of a step."""

    def end(self) -> list[float]:
        """Return the seconds of every step of the block, after the last has finished."""
        ...


class HostClock:
    """Monotonic host time: where a step's work ends when its call returns, as on a CPU."""

    def begin(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def end(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]


class DeviceClock:
    """CUDA events on the current stream: the host may run ahead of them as it would untimed."""

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._marks: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def end(self) -> list[float]:
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in zip(self._marks, self._marks[1:], strict=False)]


def create_clock(device: torch.device) -> Clock:
    """Return the clock for work on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()
