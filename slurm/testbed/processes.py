"""Processes of a testbed. They are started on one of its machines, and identified by process id and start time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layout import Problem

_NAMESPACES = Path("/run/netns")
# Maximum seconds for a process to end after SIGKILL. The kernel needs less time to free the memory of a large process.
_END_S = 10.0


@dataclass(frozen=True)
class Process:
    """Process identified by its process id and start time.

    After a process has ended, the kernel may give its process id to a new process. The start time distinguishes the two
    processes.
    """

    pid: int
    started: int  # clock ticks since boot

    @property
    def alive(self) -> bool:
        return _find(self.pid) == self

    def send(self, number: int) -> None:
        """Send a signal to this process, but not to a later process with the same process id."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass  # the process has ended in the meantime
        finally:
            os.close(handle)

    def end(self, grace_s: float = 0) -> None:
        """End this process with SIGKILL, and wait until it has ended.

        If `grace_s` is positive, send SIGTERM first, and wait at most this number of seconds before SIGKILL.
        """
        if grace_s:
            self.send(signal.SIGTERM)
            _wait_until_gone([self], grace_s)
        self.send(signal.SIGKILL)
        if not _wait_until_gone([self], _END_S):
            raise Problem(f"process {self.pid}", f"still running {_END_S:g} s after SIGKILL", "try `down` again")


def _find(pid: int) -> Process | None:
    """Return the running process with this process id; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]))


def _wait_until_gone(processes: Sequence[Process], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(process.alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def in_machine(machine: str) -> list[Process]:
    """Return all processes on a machine of the testbed: its daemons, jobs, and their descendants."""
    try:
        wanted = (_NAMESPACES / machine).stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            namespace = (entry / "ns/net").stat()
        except OSError:  # the process has ended, or is a zombie
            continue
        if (namespace.st_dev, namespace.st_ino) == (wanted.st_dev, wanted.st_ino) and (
            process := _find(int(entry.name))
        ):
            found.append(process)
    return found


def clear(machine: str) -> None:
    """Kill every process on a machine, including processes that start during this call."""
    deadline = time.monotonic() + _END_S
    while living := in_machine(machine):
        if time.monotonic() > deadline:
            raise Problem(machine, f"{len(living)} processes still running after SIGKILL", "try `down` again")
        for process in living:
            process.send(signal.SIGKILL)
        _wait_until_gone(living, _END_S)


def inside(machine: str, command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` on a machine of the testbed, with the network, /etc/hosts and host name
    of that machine.

    Each program in the command line replaces itself by the next program. So if a process is started with this command
    line, its process id is later the process id of `command`.
    """
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', machine, *command]
    return ["ip", "netns", "exec", machine, *named]


def start(command: Sequence[str], environment: Mapping[str, str], log: Path, record: Callable[[Process], None]) -> None:
    """Start a daemon that outlives this process. Call `record(process)` before the daemon's program begins to run.

    The command is started by a shell that first waits for a line of input. If this process dies before `record` has
    returned, the shell receives no line and the daemon never starts.
    """
    with log.open("ab") as output:
        gate = subprocess.Popen(
            ["sh", "-c", 'read -r _ && exec "$@" </dev/null', "gate", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
    process = _find(gate.pid)
    assert process and gate.stdin  # the shell is waiting for the line
    record(process)
    gate.stdin.write(b"\n")
    gate.stdin.close()
