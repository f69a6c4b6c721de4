"""Communication from a rank to the supervisor of its node: a heartbeat in shared memory, and a pipe for the details of
a failure.

The supervisor reads the heartbeat whenever it polls. Writing a heartbeat costs the rank less than a microsecond and
does not interrupt a timed step.
"""

import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.core.record import MemoryShortage, OutcomeKind
from bench.measure.control_group import count_oom_kills
from bench.measure.failures import OUT_OF_MEMORY, classify_error

# Names of environment variables that a supervisor sets for its ranks. These two contain file descriptors.
PIPE, PULSE = "ZEROSCALE_FAILURE_PIPE", "ZEROSCALE_PULSE"
# File descriptor of the socket on which rank 0 listens for the other ranks.
LISTENER = "ZEROSCALE_LISTENER"
# Seconds since the epoch when the supervisor started the rank.
STARTED_AT = "ZEROSCALE_STARTED_AT"
STACKS_SIGNAL = signal.SIGUSR2  # not SIGUSR1, which NCCL may catch
_TRACEBACK_CHARACTERS = 8000
# Binary format of one rank's heartbeat: time in seconds, step, phase, number of completed steps.
_SLOT = struct.Struct("<dq48sq")


FindShortage = Callable[[OutcomeKind, BaseException], MemoryShortage | None]
"""Function that gets an outcome (`oom` for device memory or `host_oom` for host memory) and the exception that led to
this outcome. It returns how much of the exhausted memory was in use, or None if that is unknown."""


class RankProgress(NamedTuple):
    """Progress of a rank at its last heartbeat: time in seconds of this machine's monotonic clock, phase, and step
    number (-1 outside the training loop)."""

    at: float
    phase: str
    step: int
    ended_steps: int = 0  # steps of the training loop completed by this process


class SharedHeartbeat:
    """Heartbeats of all ranks of a node in one anonymous shared memory file, with one slot per rank."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SLOT.size * ranks)

    @classmethod
    def create(cls, ranks: int) -> "SharedHeartbeat":
        """Return a new set of heartbeats whose file descriptor child processes can inherit."""
        descriptor = os.memfd_create("zeroscale-pulse", 0)
        os.ftruncate(descriptor, _SLOT.size * ranks)
        return cls(descriptor, ranks)

    def write(self, slot: int, phase: str, step: int, ended_steps: int = 0) -> None:
        # pack_into is not used, because it clears the slot before it writes. A reader could then see the time 0, which
        # is the time of the boot, and the rank would seem to have been silent since then.
        begin = slot * _SLOT.size
        beat = _SLOT.pack(time.monotonic(), step, phase.encode(), ended_steps)
        self._memory[begin : begin + _SLOT.size] = beat

    def read(self, slot: int) -> RankProgress:
        at, step, phase, ended_steps = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
        return RankProgress(at, phase.rstrip(b"\0").decode(), step, ended_steps)


class Channel:
    """Sender of a rank's progress and failure to its supervisor. It does nothing in a process that no supervisor
    started."""

    def __init__(self, pipe: int | None, heartbeat: SharedHeartbeat | None, slot: int) -> None:
        self._pipe, self._heartbeat, self._slot = pipe, heartbeat, slot
        self.phase = "start"
        # First step of this process; not 0 in a training that was resumed.
        self._first_step: int | None = None
        # Number of out-of-memory kills before this rank started. It is subtracted from the number at a failure, because
        # only kills after the start of this rank count.
        self._oom_kills = count_oom_kills()

    @classmethod
    def open(cls) -> "Channel":
        """Return the channel that this process inherited from its supervisor.

        The call also registers a handler that prints the stacks of all threads on `STACKS_SIGNAL`.
        """
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
        if PIPE not in os.environ:
            return cls(None, None, 0)
        heartbeat = SharedHeartbeat(int(os.environ[PULSE]), int(os.environ["LOCAL_WORLD_SIZE"]))
        return cls(int(os.environ[PIPE]), heartbeat, int(os.environ["LOCAL_RANK"]))

    def beat(self, phase: str, step: int = -1) -> None:
        """Write a heartbeat: this rank is in `phase`, at `step` of the training loop (-1 outside the loop)."""
        self.phase = phase
        if self._first_step is None and step >= 0:
            self._first_step = step
        if self._heartbeat:
            self._heartbeat.write(self._slot, phase, step, max(0, step - (self._first_step or 0)))

    def fail(self, error: BaseException, find_shortage: FindShortage = lambda kind, error: None) -> None:
        """Send to the supervisor the exception that ended this rank, and the outcome that follows from the exception.

        If device memory or host memory ran out, `find_shortage` is called. Its result is sent too: how much of the
        exhausted memory was in use.
        """
        if self._pipe is None:
            return
        oom_kills = count_oom_kills() - self._oom_kills
        kind, rule = classify_error(error, oom_kills)
        shortage = find_shortage(kind, error) if kind in OUT_OF_MEMORY else None
        if shortage:
            kind, rule = classify_error(error, oom_kills, shortage.others_bytes)
        message: dict[str, Any] = {
            "outcome": kind,
            "rule": rule,
            "exception": type(error).__name__,
            "message": str(error)[:2000],
            "phase": self.phase,
            "traceback": strip_folders("".join(traceback.format_exception(error)))[-_TRACEBACK_CHARACTERS:],
        }
        if shortage:
            message["shortage"] = shortage.model_dump(exclude_none=True, exclude={"rank"})
        line = (json.dumps(message) + "\n").encode()
        # One call of os.write may write only a part of the line, because the pipe has limited space.
        while line:
            line = line[os.write(self._pipe, line) :]


def strip_folders(text: str) -> str:
    """Return the traceback `text` with file names relative to the folders in `sys.path`. A record then does not contain
    a user's installation path."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text
