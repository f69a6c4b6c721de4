"""The supervisor's side of the fork server: asks it for ranks and waits for them like for children of its own."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from bench.supervisor.rank_process import end_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_STARTUP_S = 300.0  # imports from a network file system that everybody else reads too
_ANSWER_S = 30.0
_WAIT_S = 0.02


class ForkServer:
    """One node's fork server, for all points of a job. OSError when it is gone."""

    def __init__(self, device: str) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.fork_server", str(theirs.fileno()), device],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGKILL),
            )

    def wait_until_ready(self) -> None:
        """Wait for the imports. Before the first rank and not with it: a supervisor that is busy starting a rank is
        silent, and the others would take it for lost."""
        self._receive(_STARTUP_S)

    def start(
        self, command: Sequence[str], environment: dict[str, str], descriptors: dict[str, int], output: int
    ) -> "Forked":
        """Fork a rank; `command` is that of a rank started afresh, and its arguments are used."""
        request = {"arguments": command[3:], "environment": environment, "descriptors": list(descriptors)}
        socket.send_fds(self._connection, [json.dumps(request).encode()], [output, *descriptors.values()])
        return Forked(int(self._receive(_ANSWER_S)["pid"]))

    def close(self) -> None:
        """End the server; ranks that it forked are not its children any more and go on."""
        self._connection.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, timeout_s: float) -> dict[str, int]:
        self._connection.settimeout(timeout_s)
        message = self._connection.recv(1 << 16)
        if not message:
            raise ConnectionError(f"the fork server ended with {self._process.wait()}")
        plain: dict[str, int] = json.loads(message)
        return plain


class Forked:
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

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(_WAIT_S)
        return code
