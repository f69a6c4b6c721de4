"""Clocks: seconds per optimizer step, from the host's time or from events that never make the device wait."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

ReadBlock = Callable[[], list[float]]
"""Returns the seconds of every step of a block, once the last of them has finished."""


class Clock:
    """Times blocks of consecutive steps: begin, one mark at the end of every step, end.

    This class reads the host's monotonic time, for devices on which a step has finished when its call returns: CPUs.
    """

    blocks_ahead = 0
    """Number of blocks that are still running when the times of the block before them are read."""

    def drain(self) -> None:
        """Wait until all launched work has finished."""

    def begin(self) -> None:
        """Start a block after the work launched so far. Time in which the device has no work is not counted."""
        self._times = [time.perf_counter()]

    def mark(self) -> None:
        """Note the end of a step."""
        self._times.append(time.perf_counter())

    def end(self) -> ReadBlock:
        """End the block; return the function that reads its times."""
        seconds = [later - earlier for earlier, later in pairwise(self._times)]
        return lambda: seconds


class DeviceEvent(Protocol):
    """A position in a device's queue of work, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Take the position after all work launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached this position."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds from here to a later event."""
        ...


class DeviceClock(Clock):
    """Events on the device's current stream.

    A block is read while the next block runs. The device always has work in its queue, and the host runs ahead as it
    would untimed.

    A block begins with an event of its own, which excludes host work between two blocks where the host is slower than
    its device. A busy device reaches that event right after the last step of the previous block. On an idle device the
    first step of the block also contains its own launch.
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
        # Recorded after the work that follows the last step: copies of its losses to the host.
        marks, closed = self._marks, self._record()

        def read() -> list[float]:
            closed.synchronize()
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]

        return read

    def _record(self) -> DeviceEvent:
        event = self._create_event()
        event.record()
        return event


def create_clock(device: torch.device) -> Clock:
    """Return the clock for work on `device`."""
    if device.type != "cuda":
        return Clock()
    # blocking: a host that waits for an event sleeps, and its core is free for the loaders
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True, blocking=True), lambda: torch.cuda.synchronize(device)
    )
