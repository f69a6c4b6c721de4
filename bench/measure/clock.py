"""Clocks that measure the seconds of each optimizer step: with the host's clock on a CPU, and with events on a GPU.

Recording an event never makes the device wait.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

ReadBlock = Callable[[], list[float]]
"""Function that waits until the last step of a block has finished, and returns the seconds of every step of the block.
"""


class Clock:
    """Clock for blocks of consecutive steps. Call `begin`, then `mark` at the end of every step, then `end`.

    This class reads the host's monotonic clock. Use it for a device such as a CPU, whose work is finished when the
    function that makes the step returns.
    """

    blocks_ahead = 0
    """Number of later blocks that are launched before the times of a block are read."""

    def drain(self) -> None:
        """Wait until the device has finished all launched work."""

    def begin(self) -> None:
        """Start a block of steps. The time of the first step begins when the device has finished all work launched so
        far. Time in which the device is idle before the block is not counted."""
        self._times = [time.perf_counter()]

    def mark(self) -> None:
        """Record the end of a step."""
        self._times.append(time.perf_counter())

    def end(self) -> ReadBlock:
        """End the block, and return the function that reads the times of its steps."""
        seconds = [later - earlier for earlier, later in pairwise(self._times)]
        return lambda: seconds


class DeviceClock(Clock):
    """Clock that records events on the device's current stream.

    The times of a block are read while the next block runs. So the device always has work in its queue, and the host
    runs ahead of the device as in an untimed training.

    Each block begins with its own event, which the host records after its work between two blocks. The time of the
    first step begins when the device reaches this event. A busy device reaches the event right after the last step of
    the previous block. An idle device reaches the event as soon as it is recorded. So no step time includes the host's
    work between two blocks. On an idle device, the time of the first step includes the host's launch of this step.
    """

    blocks_ahead = 1

    def __init__(self, create_event: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        self._create_event, self._synchronize = create_event, synchronize

    def drain(self) -> None:
        self._synchronize()

    def begin(self) -> None:
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        self._marks.append(self._record())

    def end(self) -> ReadBlock:
        # The closing event follows the copies of losses to the host, which are launched after the last step.
        marks, closed = self._marks, self._record()

        def read() -> list[float]:
            closed.synchronize()
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]

        return read

    def _record(self) -> Any:
        event = self._create_event()
        event.record()
        return event


def create_clock(device: torch.device) -> Clock:
    """Return the clock for steps on `device`."""
    if device.type != "cuda":
        return Clock()
    # With `blocking`, the host sleeps while it waits for an event. Its core is then free for DataLoader processes.
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True, blocking=True), lambda: torch.cuda.synchronize(device)
    )
