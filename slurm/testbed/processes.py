"""Processes of a testbed: started inside one of its machines, identified by pid and start time, and reliably ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layout import Problem

_NAMESPACES = Path("/run/netns")
# Longer than the kernel needs, also for a process that exits with much memory.
_END_S = 10.0


@dataclass(frozen=True)
class Process:
    """A process by pid and start time: a pid may be used again, but not with the same start time until a reboot."""

    pid: int
    started: int  # clock ticks since boot

    @property
    def alive(self) -> bool:
        return _find(self.pid) == self

    def send(self, number: int) -> None:
        """Send a signal to this process, and never to a later one with the same pid."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass  # it has ended in the meantime
        finally:
            os.close(handle)

    def end(self, grace_s: float = 0) -> None:
        """Kill this process and wait for its end; with a grace time, send SIGTERM first."""
        if grace_s:
            self.send(signal.SIGTERM)
            _wait_until_gone([self], grace_s)
        self.send(signal.SIGKILL)
        if not _wait_until_gone([self], _END_S):
            raise Problem(f"process {self.pid}", f"still running {_END_S:g} s after SIGKILL", "try `down` again")


def _find(pid: int) -> Process | None:
    """Return the running process with this pid, or None."""
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
    """Return all processes in a machine: its daemons, the jobs, and their descendants."""
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
        except OSError:  # it has ended, or is a zombie
            continue
        if (namespace.st_dev, namespace.st_ino) == (wanted.st_dev, wanted.st_ino) and (
            process := _find(int(entry.name))
        ):
            found.append(process)
    return found


def clear(machine: str) -> None:
    """Kill every process in a machine, also those that start meanwhile."""
    deadline = time.monotonic() + _END_S
    while living := in_machine(machine):
        if time.monotonic() > deadline:
            raise Problem(machine, f"{len(living)} processes still running after SIGKILL", "try `down` again")
        for process in living:
            process.send(signal.SIGKILL)
        _wait_until_gone(living, _END_S)


def inside(machine: str, command: Sequence[str]) -> list[str]:
    """Return the words that run `command` in a machine with its network, hosts and host name, under the same pid."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', machine, *command]
    return ["ip", "netns", "exec", machine, *named]


def start(command: Sequence[str], environment: Mapping[str, str], log: Path, record: Callable[[Process], None]) -> None:
    """Start a daemon that outlives this process, and `record` it before it does anything.

    A shell waits for a line of input before it executes the command. If this process dies before the record is written,
    the line never comes.
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
    assert process and gate.stdin  # it waits for the line
    record(process)
    gate.stdin.write(b"\n")
    gate.stdin.close()
