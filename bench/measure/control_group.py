"""Limits and counters of the control groups (cgroups) that contain this process.

The system, a container or a scheduler sets such limits. Both cgroup versions of the kernel are supported.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_MEMORY = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))  # version 2, version 1
# A memory limit of at least this number of bytes means "no limit". For this, version 1 writes a number near 2^63.
_UNLIMITED = 2**60


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders that may be this process's control group for a controller such as `memory`. The most likely
    folder comes first.

    Several folders are possible inside a container. There, /proc may show the path that the control group has on the
    host. However, the container may have mounted the group at the top of its cgroup file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            folder = root / "sys/fs/cgroup" / controllers
            found += [folder / path.strip("/"), folder]
    return found


def read_number(path: Path, name: str) -> int | None:
    """Return the number in a line such as `VmRSS: 12 kB` or `oom_kill 3` of a file; None if there is no such line or
    file."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE):
            return int(found[1])
    return None


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return the number of processes in this process's control group that the kernel's out-of-memory killer has ended
    so far.

    If no control group counts such processes, return the number for the whole host. All files are read under `root`.
    """
    names = ("memory.events", "memory.oom_control")  # version 2, version 1
    groups = (folder / name for folder in own_groups("memory", root) for name in names)
    counts = (read_number(path, "oom_kill") for path in (*groups, root / "proc/vmstat"))
    return next((count for count in counts if count is not None), 0)


def read_throttled_s(root: Path = Path("/")) -> float | None:
    """Return the seconds, summed over cores, for which CPU quotas have throttled this process's control groups so far.

    If several of these groups count throttled time, return the largest value. Return None if no group counts it.
    """
    units = {"throttled_usec": 1e6, "throttled_time": 1e9}  # versions 2 and 1; units per second
    counters = [folder / "cpu.stat" for folder in _list_enclosing("cpu", root)]
    read = ((read_number(path, name), unit) for path in counters for name, unit in units.items())
    return max((count / unit for count, unit in read if count is not None), default=None)


def read_quota_cores(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota of this process's control groups, in cores; None if no group has a quota."""
    quotas = []
    for folder in _list_enclosing("cpu", root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except (OSError, ValueError):
            continue
        if quota != "max" and float(quota) > 0:
            quotas.append(float(quota) / float(period))
    return min(quotas, default=None)


def find_memory_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return a pair (used bytes, limit in bytes) for each of this process's control groups that limits memory."""
    found = []
    for folder in _list_enclosing("memory", root):
        for names in _MEMORY:
            try:
                used, limit = (int((folder / name).read_text()) for name in names)
            except (OSError, ValueError):  # version 2 writes `max` for "no limit"
                continue
            found += [(used, limit)] if limit < _UNLIMITED else []
    return found


def _list_enclosing(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group for a controller, and then of all parent groups."""
    # The limits of all parent groups apply too.
    for own in own_groups(controller, root):
        for folder in (own, *own.parents):
            if folder == root / "sys/fs":
                break
            yield folder
