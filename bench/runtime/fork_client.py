"""The supervisor's side of the fork server: asks it for ranks and waits for them like for children of its own."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.measure.environment import choose_openmp_variables
from bench.processes import build_module_command
from bench.runtime.process import set_parent_death_signal
from bench.spec import RunSpec

_PR_SET_CHILD_SUBREAPER = 36
_STARTUP_S = 300.0  # imports from a network file system that everybody else reads too
_ANSWER_S = 30.0
_KILL_S = 5.0
_REAP_S = 1.0  # for what was killed with a rank to be gone


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
