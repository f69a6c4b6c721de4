"""Ranks as their supervisor sees them: processes that are started afresh or by the fork server, their output in one
log, and the reports of their own failures.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from bench.core.private import mask_tokens
from bench.core.processes import build_module_command
from bench.core.spec import RunSpec
from bench.measure.channel import PIPE
from bench.measure.environment import choose_openmp_variables

_LOG_LIMIT_BYTES = 16 * 2**20
_WAITING_LINES = 4096
_PR_SET_PDEATHSIG = 1
_DRAIN_BYTES = 1 << 20
_LINE_BYTES = 1 << 18  # more than a rank says of its failure
_libc = ctypes.CDLL(None, use_errno=True)
_forking = 0  # the process that forks; in a new child, its parent
_PR_SET_CHILD_SUBREAPER = 36
_STARTUP_S = 300.0  # imports from a network file system that everybody else reads too
_ANSWER_S = 30.0
_KILL_S = 5.0
_REAP_S = 1.0  # for what was killed with a rank to be gone


def install_handlers(interrupt: Callable[[int], None]) -> None:
    """From now on call `interrupt` with the number of every such signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, frame: interrupt(sent))


class RankLog:
    """All ranks' output in one file, each line behind its rank, written by a thread of its own. A disk that is full
    loses lines, and so does one that stalls for too long; neither delays a rank."""

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = lambda path: path.open("ab", buffering=0)):
        """`open_file(path)` returns the file, open for appending; it may take as long as it likes."""
        self._waiting: list[bytes] = []
        self._left, self._lost = _LOG_LIMIT_BYTES, 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_writing, args=(path, open_file), daemon=True)
        self._thread.start()

    def write(self, rank: int, line: bytes) -> None:
        """Take a line, without waiting for the file."""
        with self._changed:
            if self._left <= 0:
                return
            if len(self._waiting) >= _WAITING_LINES:
                self._lost += 1
                return
            self._note_lost_lines()
            self._left -= len(line)
            text = line if self._left > 0 else b"(the log is cut here: it reached its limit)"
            self._waiting.append(b"[%d] %s\n" % (rank, mask_tokens(text)))
            self._changed.notify()

    def close(self, patience_s: float) -> None:
        """Take no more, and give the file system so long at most for what was taken."""
        with self._changed:
            self._note_lost_lines()
            self._left, self._closing = 0, True
            self._changed.notify()
        self._thread.join(patience_s)

    def _note_lost_lines(self) -> None:
        if self._lost:
            self._waiting.append(b"(%d lines are lost here: the file system did not take them)\n" % self._lost)
            self._lost = 0

    def _keep_writing(self, path: Path, open_file: Callable[[Path], BinaryIO]) -> None:
        with contextlib.suppress(OSError), open_file(path) as file:
            while lines := self._take():
                with contextlib.suppress(OSError):
                    file.write(b"".join(lines))

    def _take(self) -> list[bytes]:
        """Wait for lines and return them; none after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            lines, self._waiting = self._waiting, []
            return lines


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


class ForkServer:
    """One node's fork server, for all points of a job. OSError when it is gone."""

    def __init__(self, device: str, specs: Sequence[RunSpec]) -> None:
        """It imports what ranks of `specs` will."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        used = {spec.engine.backend for spec in specs}, {spec.model.family for spec in specs}
        self._arguments = device, *(",".join(sorted(names)) for names in used)
        # libgomp reads how its threads wait when it is loaded, which is before a rank's own environment is set
        self._environment = choose_openmp_variables(device, max((spec.devices_per_node for spec in specs), default=1))
        self._ranks = list[ForkedRank]()
        self._launch()

    def _launch(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                build_module_command("bench.runtime.fork_server", str(theirs.fileno()), *self._arguments),
                env=self._environment | dict(os.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL),
            )

    def wait_until_ready(self) -> None:
        """Wait for the imports. Before the first rank and not with it: a supervisor that is busy starting a rank is
        silent, and the others would take it for lost."""
        self._receive(_STARTUP_S)

    @property
    def has_ended(self) -> bool:
        """Whether the server was killed: nothing is wrong with the node, and the ranks that it forked go on."""
        return self._process.poll() is not None

    def restart(self) -> None:
        """Start a server in the place of one that has ended, and wait for its imports; between two points."""
        self._connection.close()
        self._launch()
        self.wait_until_ready()

    def start(
        self, command: Sequence[str], environment: dict[str, str], descriptors: dict[str, int], output: int
    ) -> "ForkedRank":
        """Fork a rank; `command` is that of a rank started afresh, and its arguments are used."""
        arguments = command[len(build_module_command("")) :]
        request = {"arguments": arguments, "environment": environment, "descriptors": list(descriptors)}
        # In a file: an environment may be larger than a message.
        with os.fdopen(os.memfd_create("zeroscale-request"), "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._connection, [b"{}"], [file.fileno(), output, *descriptors.values()])
        self._ranks.append(ForkedRank(int(self._receive(_ANSWER_S)["pid"])))
        return self._ranks[-1]

    def reap(self) -> None:
        """Wait for the processes that ranks left behind, which this one adopted: until then each counts against the
        user's limit of processes."""
        self._ranks = [rank for rank in self._ranks if rank.poll() is None]
        ours = {self._process.pid, *(rank.pid for rank in self._ranks)}
        until = time.monotonic() + _REAP_S
        while (left := set(_list_children()) - ours) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_REAP_S / 50)

    def close(self) -> None:
        """End the server; ranks that it forked are not its children any more and go on."""
        self._connection.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # not even that ends it in an uninterruptible call
                self._process.wait(_KILL_S)

    def _receive(self, timeout_s: float) -> dict[str, int]:
        self._connection.settimeout(timeout_s)
        message = self._connection.recv(1 << 16)
        if not message:
            raise ConnectionError(f"the fork server ended with {self._process.wait()}")
        plain: dict[str, int] = json.loads(message)
        return plain


class ForkedRank:
    """A rank that was forked; waited for like a subprocess."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code


def _list_children() -> Iterator[int]:
    """Yield the children of this process, those included that have ended and were not waited for."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(process.name)
