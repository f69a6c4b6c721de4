"""One rank as its supervisor sees it: a process, its output, and what it says of its own failure."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from bench.measure.channel import PIPE

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(signal_number: int) -> None:
    """In a new child: have the kernel send it `signal_number` when its parent dies, so that nothing is orphaned."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)


class RankProcess:
    """A rank's process in a session of its own, so that its loader processes end with it."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: dict[str, str], inherit: tuple[int, ...]
    ) -> None:
        self.rank, self.stopped = rank, False
        self.failure: dict[str, Any] | None = None
        self.heard = bytearray()  # output while `listening`
        self.listening = False
        self._told, self._partial = bytearray(), bytearray()
        self.output, output_end = _pipe()
        self.failures, failures_end = _pipe()
        self.process = subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), PIPE: str(failures_end)},
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            pass_fds=(*inherit, failures_end),
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
        os.close(output_end)
        os.close(failures_end)

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def drain(self, write: Callable[[int, bytes], None]) -> None:
        """Take what the rank wrote so far, without waiting, and give its output to `write`."""
        for line in self._read_lines(self.output, self._partial):
            write(self.rank, line)
            if self.listening:
                self.heard += line + b"\n"
        for line in self._read_lines(self.failures, self._told):
            self.failure = json.loads(line)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @staticmethod
    def _read_lines(descriptor: int, partial: bytearray) -> list[bytes]:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(descriptor, 65536):
                partial += chunk
        *lines, rest = bytes(partial).split(b"\n")
        partial[:] = rest
        return lines


def _pipe() -> tuple[int, int]:
    """Return a pipe's ends: ours, which never blocks, and the child's, inheritable by `pass_fds` alone."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    return ours, theirs
