"""How a process of our own is started, and how it imports."""

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


def build_module_command(module: str, *arguments: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that runs a module in a process of its own.

    -P: else files of the current folder are imported before the libraries' and ours; PYTHONPATH counts as ever.
    """
    return [*python, "-P", "-m", module, *arguments]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Search for no garbage while libraries are imported, which leave next to none, nor later through what lives by
    then: a quarter of the time of their imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class ProcessIdentity(NamedTuple):
    """A process among all that ever had its number: numbers are used again, after a boot and before."""

    boot_id: str
    namespace: str  # in which its number counts: containers have their own
    started: int  # clock ticks after the boot


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return which process has this number now; None if there is none, or where the kernel does not say."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ended = fields[0] in "ZX"  # it only waits for its parent
        return None if ended else ProcessIdentity(boot_id, str(Path("/proc/self/ns/pid").readlink()), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None
