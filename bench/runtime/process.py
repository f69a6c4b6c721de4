"""Processes of ranks, which are started as new Python processes or by the fork server.

The output of all ranks goes to one log, and each rank reports its failure over a pipe.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from bench.core.private import mask_tokens
from bench.core.processes import build_module_command, read_stat
from bench.core.spec import RunSpec
from bench.measure.channel import PIPE
from bench.measure.environment import choose_openmp_variables

_LOG_LIMIT_BYTES = 16 * 2**20
# Maximum number of lines kept in memory while the file system is stalled. Further lines are dropped.
_WAITING_LINES = 4096
_PR_SET_PDEATHSIG = 1
_DRAIN_BYTES = 1 << 20
# Maximum bytes of a line. A rank's report of its failure needs less.
_LINE_BYTES = 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)
# Process id of the last process that forked. In a new child, it is therefore the process id of the parent.
_forking = 0
_PR_SET_CHILD_SUBREAPER = 36
# Maximum seconds for the imports of the fork server. On a busy network file system, the imports take minutes.
_STARTUP_S = 300.0
_ANSWER_S = 30.0
_KILL_S = 5.0
# Seconds to wait for the end of processes that were killed together with a rank.
_REAP_S = 1.0


def install_handlers(interrupt: Callable[[int], None]) -> None:
    """Install handlers for SIGINT and SIGTERM that call `interrupt` with the number of the signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, frame: interrupt(sent))


class RankLog:
    """Log file with the output of all ranks, written by a separate thread. Each line begins with the number of its
    rank.

    If the disk is full or stalls for too long, lines are lost, but a rank is never delayed.
    """

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = lambda path: path.open("ab", buffering=0)):
        """Start the writing thread. In this thread, `open_file(path)` opens the file for appending, and may block for
        any length of time."""
        self._waiting: list[bytes] = []
        self._left, self._lost = _LOG_LIMIT_BYTES, 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_writing, args=(path, open_file), daemon=True)
        self._thread.start()

    def write(self, rank: int, line: bytes) -> None:
        """Add a line of a rank's output without waiting for the file."""
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
        """Stop accepting lines. Wait at most `patience_s` seconds until all accepted lines are written."""
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
        """Wait for new lines and return them; return an empty list after the log was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            lines, self._waiting = self._waiting, []
            return lines


def _note_forking() -> None:
    global _forking
    _forking = os.getpid()


os.register_at_fork(before=_note_forking)


def set_parent_death_signal(signal_number: int) -> None:
    """Request that the kernel sends `signal_number` to this process when its parent dies.

    Call this in a new child process, so that the child does not outlive its parent.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
    # If the parent died before the call, the kernel sends nothing.
    if os.getppid() != _forking:
        os.kill(os.getpid(), signal_number)


def start_child(
    command: Sequence[str], death_signal: int = signal.SIGTERM, *, stdin: int = subprocess.DEVNULL, **options: Any
) -> subprocess.Popen[Any]:
    """Start a child process, which receives `death_signal` when this process dies. `options` are further arguments of
    Popen.

    The child leads its own session, so Ctrl-C on a terminal does not reach the child.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        start_new_session=True,
        preexec_fn=lambda: set_parent_death_signal(death_signal),
        **options,
    )


StartedProcess: TypeAlias = "subprocess.Popen[bytes] | ForkedRank"
"""Started rank. It leads its own session, so that its DataLoader processes can be ended together with it."""

StartRank = Callable[[Sequence[str], dict[str, str], dict[str, int], int], StartedProcess]
"""Function `start(command, environment, descriptors, output)` that starts a rank.

`descriptors` maps names of environment variables to file descriptors. The rank inherits the file descriptors, and each
of these variables contains the number of its file descriptor. `output` is the file descriptor for the standard output
and standard error of the rank.
"""


def start_process(
    command: Sequence[str], environment: dict[str, str], descriptors: dict[str, int], output: int
) -> subprocess.Popen[bytes]:
    """Start a rank as a child process with its own Python interpreter. `descriptors` maps names of environment
    variables to file descriptors. The rank inherits the file descriptors, and each of these variables contains the
    number of its file descriptor. `output` is the file descriptor for the rank's standard output and standard error."""
    own = environment | {name: str(descriptor) for name, descriptor in descriptors.items()}
    inherited = tuple(descriptors.values())
    return start_child(command, signal.SIGKILL, env=own, stdout=output, stderr=output, pass_fds=inherited)


class RankProcess:
    """Process of a rank, with two pipes: one for the rank's output, and one for its report of a failure."""

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
        # Output that arrives while `listening` is true. The supervisor sets `listening` to true before it makes the
        # rank print its stacks.
        self.stack_output = bytearray()
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
        """Exit code of the rank, negative for a signal; None while the rank runs.

        The first reading after the rank's end also kills the rank's DataLoader processes.
        """
        if self._exit_code is None:
            # The group is killed before the rank is reaped. After that, the group's id may belong to other processes.
            with contextlib.suppress(ChildProcessError):  # the process was already reaped elsewhere
                if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                self.signal(signal.SIGKILL)
            self._exit_code = self.process.poll()
        return self._exit_code

    def drain(self, write: Callable[[int, bytes], None]) -> None:
        """Read the output that the rank has written so far, without waiting. Pass each line to `write(rank, line)`."""
        for line in self._read_lines(self.output, self._partial):
            write(self.rank, line)
            if self.listening:
                self.stack_output += line + b"\n"
        for line in self._read_lines(self.failures, self._failure_bytes):
            self.failure = json.loads(line)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to the processes that it started. Do nothing if the rank has ended."""
        if self._exit_code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close the pipes after the rank has ended."""
        os.close(self.output)
        os.close(self.failures)

    @staticmethod
    def _read_lines(descriptor: int, partial: bytearray) -> list[bytes]:
        """Return the complete lines that have arrived in the pipe.

        `partial` keeps the incomplete last line for the next call. The bytes per call and per line are limited. If a
        rank writes faster than its pipe is read, the rank must wait.
        """
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
    """Return the two ends of a new pipe: this process's end, which does not block, and the child's end.

    A child process inherits the child's end only if the argument `pass_fds` of `subprocess.Popen` contains it.
    """
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    return ours, theirs


class ForkServer:
    """Connection to the fork server of a node, which forks the ranks of all runs of a job.

    The methods raise OSError after the server has ended.
    """

    def __init__(self, device: str, specs: Sequence[RunSpec]) -> None:
        """Start the fork server, a process that imports the modules that the ranks of `specs` need, and then forks
        ranks."""
        # Forked ranks become children of this process, which can wait for them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        used = {spec.engine.backend for spec in specs}, {spec.model.family for spec in specs}
        self._arguments = device, *(",".join(sorted(names)) for names in used)
        # libgomp reads these variables when it is loaded, which is before a rank's own environment is set.
        self._environment = choose_openmp_variables(device, max((spec.devices_per_node for spec in specs), default=1))
        self._ranks = list[ForkedRank]()
        self._launch()

    def _launch(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = build_module_command("bench.runtime.fork_server", str(theirs.fileno()), *self._arguments)
            environment = self._environment | dict(os.environ)
            self._process = start_child(command, signal.SIGKILL, env=environment, pass_fds=(theirs.fileno(),))

    def wait_until_ready(self) -> None:
        """Wait until the fork server has imported all modules that ranks need.

        Call this before the first rank starts. If a supervisor waited while it starts a rank, it would send no reports
        in that time, and would be regarded as lost.
        """
        self._receive(_STARTUP_S)

    @property
    def has_ended(self) -> bool:
        """True if the server process has ended, for example because it was killed. Ranks that it forked still run."""
        return self._process.poll() is not None

    def restart(self) -> None:
        """Start a new fork server after the previous process has ended, and wait until it has imported the modules that
        ranks need. Call this between runs."""
        self._connection.close()
        self._launch()
        self.wait_until_ready()

    def start(
        self, command: Sequence[str], environment: dict[str, str], descriptors: dict[str, int], output: int
    ) -> "ForkedRank":
        """Fork a rank. `command` is the full command of a rank process; only its arguments are used."""
        arguments = command[len(build_module_command("")) :]
        request = {"arguments": arguments, "environment": environment, "descriptors": list(descriptors)}
        # The request is sent as a file, because an environment may be larger than a message.
        with os.fdopen(os.memfd_create("zeroscale-request"), "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._connection, [b"{}"], [file.fileno(), output, *descriptors.values()])
        self._ranks.append(ForkedRank(int(self._receive(_ANSWER_S)["pid"])))
        return self._ranks[-1]

    def reap(self) -> None:
        """Collect the exit codes of ended processes that ranks left behind and that this process adopted.

        Otherwise they would remain as zombies, which count against the user's process limit.
        """
        self._ranks = [rank for rank in self._ranks if rank.poll() is None]
        ours = {self._process.pid, *(rank.pid for rank in self._ranks)}
        until = time.monotonic() + _REAP_S
        while (left := _find_children() - ours) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_REAP_S / 50)

    def close(self) -> None:
        """End the server. Its forked ranks continue to run, because they are children of this process."""
        self._connection.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # In an uninterruptible system call, the server survives SIGKILL.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_S)

    def _receive(self, timeout_s: float) -> dict[str, int]:
        self._connection.settimeout(timeout_s)
        message = self._connection.recv(1 << 16)
        if not message:
            raise ConnectionError(f"the fork server ended with {self._process.wait()}")
        plain: dict[str, int] = json.loads(message)
        return plain


class ForkedRank:
    """Forked rank, with the same interface as `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the rank runs."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code


def _find_children() -> set[int]:
    """Return the process ids of all children of this process, zombies included."""
    own = [str(os.getpid())]
    return {int(process.name) for process in Path("/proc").glob("[0-9]*") if read_stat(process.name)[1:2] == own}
