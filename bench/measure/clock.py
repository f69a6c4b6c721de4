"""The clock: seconds per optimizer step, from the host's time or from events on a device that is never made to wait."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

ReadBlock = Callable[[], list[float]]
"""Returns the seconds of every step of a block, once the last of them has finished."""


class Clock(Protocol):
    """Times blocks of consecutive steps: begin, one mark at the end of every step, end."""

    @property
    def blocks_ahead(self) -> int:
        """How many blocks are to be under way still when the times of the one before them are read."""

    def drain(self) -> None:
        """Wait until everything that was launched has finished."""

    def begin(self) -> None:
        """Start a block behind what was launched before; what the device has not been given meanwhile is not timed."""

    def mark(self) -> None:
        """Note the end of a step."""

    def end(self) -> ReadBlock:
        """End the block; return what reads its times."""
        ...


class HostClock:
    """Monotonic host time: where a step's work ends when its call returns, as on a CPU."""

    blocks_ahead = 0

    def drain(self) -> None:
        """Nothing is ever left to finish."""

    def begin(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def end(self) -> ReadBlock:
        seconds = [later - earlier for earlier, later in pairwise(self._marks)]
        return lambda: seconds


class DeviceEvent(Protocol):
    """A place in a device's queue of work, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Take the place behind all that was launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has come here, whatever stands behind."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds from here to a later event."""
        ...


class DeviceClock:
    """Events on the device's current stream. A block is read while the next one is computed, so the device always has
    work in its queue and the host runs ahead as it would untimed; nothing waits for the device as a whole.

    A block's own first event keeps the time out in which a host that is slower than its device was busy between two
    blocks: where the device has work, it follows the last step of the block before at once. Of such a host's block the
    first step is longer by what the device computes in a step, and no more.
    """

    blocks_ahead = 1

    def __init__(self, create_event: Callable[[], DeviceEvent], synchronize: Callable[[], None]) -> None:
        self._create_event, self._synchronize = create_event, synchronize

    def drain(self) -> None:
        self._synchronize()

    def begin(self) -> None:
        self._marks: list[DeviceEvent] = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(self._record())

    def end(self) -> ReadBlock:
        """The block ends behind whatever was launched after its last step: copies of its losses to the host."""
        marks, closed = self._marks, self._record()
        return lambda: _read_events(marks, closed)

    def _record(self) -> DeviceEvent:
        event = self._create_event()
        event.record()
        return event


def _read_events(marks: Sequence[DeviceEvent], closed: DeviceEvent) -> list[float]:
    """Return the seconds between neighbouring events once the device has come to `closed`."""
    closed.synchronize()
    return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]


def create_clock(device: torch.device) -> Clock:
    """Return the clock for work on `device`."""
    if device.type != "cuda":
        return HostClock()
    # `blocking`: a host that waits for an event sleeps, and leaves its core to the loaders
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True, blocking=True), lambda: torch.cuda.synchronize(device)
    )
