"""Processes of zeroscale: the commands that start them, faster imports, and an identity of processes that stays unique
when process ids are reused."""

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


def build_module_command(module: str, *arguments: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that runs a Python module in its own process."""
    # Without -P, Python would import files of the current folder before libraries. -P does not affect PYTHONPATH.
    return [*python, "-P", "-m", module, *arguments]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports, and then exclude the imported objects from later collections.

    Imports create almost no garbage. Without collections they take a quarter less time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_stat(pid: int | str, root: Path = Path("/")) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program (proc(5)): state, parent, … Empty if the
    process has ended."""
    try:
        return (root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class ProcessIdentity(NamedTuple):
    """Identity of a process. A process id alone is not unique: the kernel reuses it, both before and after a reboot."""

    boot_id: str
    namespace: str  # of process ids: each container has its own
    started: int  # clock ticks from the boot to the start of the process


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process with this id; None if it has ended or /proc does not show it."""
    fields = read_stat(pid)
    if not fields or fields[0] in "ZX":  # a zombie has ended and waits only for its parent
        return None
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return ProcessIdentity(boot_id, str(Path("/proc/self/ns/pid").readlink()), int(fields[19]))
    return None
