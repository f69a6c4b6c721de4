"""One rank as its supervisor sees it: a process, its output, and what it says of its own failure."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.measure.channel import PIPE

_PR_SET_PDEATHSIG = 1
_DRAIN_BYTES = 1 << 20
_LINE_BYTES = 1 << 18  # more than a rank says of its failure
_libc = ctypes.CDLL(None, use_errno=True)


_forking = 0  # the process that forks; in a new child, its parent


def _note_forking() -> None:
    global _forking
    _forking = os.getpid()


os.register_at_fork(before=_note_forking)


def set_parent_death_signal(signal_number: int) -> None:
    """In a new child: have the kernel send it `signal_number` when its parent dies, so that nothing is orphaned. Of a
    parent that has died already the kernel says nothing more."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != _forking:
        os.kill(os.getpid(), signal_number)


class StartedProcess(Protocol):
    """A started rank, the leader of a session of its own, so that its loader processes can be ended with it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""


StartRank = Callable[[Sequence[str], dict[str, str], dict[str, int], int], StartedProcess]
"""`start(command, environment, descriptors, output)`: how a rank is started. It finds each of `descriptors` under the
number that the variable of that name tells it; `output` becomes its standard output and error."""


def start_process(
    command: Sequence[str], environment: dict[str, str], descriptors: dict[str, int], output: int
) -> subprocess.Popen[bytes]:
    """Start a rank afresh, as a child process."""
    return subprocess.Popen(
        command,
        env=environment | {name: str(descriptor) for name, descriptor in descriptors.items()},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=tuple(descriptors.values()),
        start_new_session=True,
        preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL),
    )


class RankProcess:
    """A rank's process and the pipes that it writes to."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: dict[str, str],
        descriptors: dict[str, int],
        start: StartRank,
    ) -> None:
        self.rank, self.stopped, self.survived = rank, False, False
        self.failure: dict[str, Any] | None = None
        self.stack_output = bytearray()  # output while `listening`
        self.listening = False
        self._failure_bytes, self._partial = bytearray(), bytearray()
        self._exit_code: int | None = None
        self.output, output_end = _open_pipe()
        self.failures, failures_end = _open_pipe()
        try:
            own = environment | {"RANK": str(rank)}
            self.process = start(command, own, descriptors | {PIPE: failures_end}, output_end)
        finally:
            os.close(output_end)
            os.close(failures_end)

    @property
    def exit_code(self) -> int | None:
        """How the rank ended, negative for a signal, or None while it runs. With its end go the loader processes that
        outlive it, while the number of their group is still the rank's: once it is waited for, another may get it."""
        if self._exit_code is None:
            with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
                if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                self.signal(signal.SIGKILL)
            self._exit_code = self.process.poll()
        return self._exit_code

    def drain(self, write: Callable[[int, bytes], None]) -> None:
        """Take what the rank wrote so far, without waiting, and give its output to `write`."""
        for line in self._read_lines(self.output, self._partial):
            write(self.rank, line)
            if self.listening:
                self.stack_output += line + b"\n"
        for line in self._read_lines(self.failures, self._failure_bytes):
            self.failure = json.loads(line)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to all that it started, unless it has ended."""
        if self._exit_code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Give back the pipes, after the end."""
        os.close(self.output)
        os.close(self.failures)

    @staticmethod
    def _read_lines(descriptor: int, partial: bytearray) -> list[bytes]:
        """Return the lines that have arrived. Of a rank that writes faster than it is read, or without an end, only so
        much is taken at a time, and so long a line: the pipe then holds it up."""
        left = _DRAIN_BYTES
        with contextlib.suppress(BlockingIOError):
            while left > 0 and (chunk := os.read(descriptor, 65536)):
                partial += chunk
                left -= len(chunk)
        *lines, rest = bytes(partial).split(b"\n")
        if len(rest) >= _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        partial[:] = rest
        return lines


def _open_pipe() -> tuple[int, int]:
    """Return a pipe's ends: ours, which never blocks, and the child's, inheritable by `pass_fds` alone."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    return ours, theirs
