"""Processes of zeroscale: their command, their imports, and their identity among reused process numbers."""

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


def build_module_command(module: str, *arguments: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that runs a module in its own process."""
    # -P: otherwise Python imports files of the current folder before libraries. PYTHONPATH works as always.
    return [*python, "-P", "-m", module, *arguments]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Switch garbage collection off during imports, and exclude their objects from it later.

    Imports leave almost no garbage, so this saves a quarter of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class ProcessIdentity(NamedTuple):
    """Identity of a process: the kernel reuses numbers, within a boot and after the next one."""

    boot_id: str
    namespace: str  # of process numbers: containers have their own
    started: int  # clock ticks after the boot


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process with this number; None if there is none, or where /proc does not show it."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ended = fields[0] in "ZX"  # a zombie, which waits only for its parent
        return None if ended else ProcessIdentity(boot_id, str(Path("/proc/self/ns/pid").readlink()), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None
