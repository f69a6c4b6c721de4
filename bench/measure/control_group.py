"""Limits and counters of the control groups (cgroups) that contain this process.

The system, a container or a scheduler sets such limits. Both cgroup versions of the kernel are supported.
"""

from collections.abc import Iterator
from pathlib import Path

_MEMORY = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))  # version 2, version 1
# Bytes from which a limit means "no limit". Version 1 writes a number near 2^63.
_UNLIMITED = 2**60


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders that may be this process's control group for a controller such as `memory`, the most likely
    folder first.

    In a container, the path in /proc may be the path on the host, while the group itself is mounted at the top.
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


def read_throttled_s(root: Path = Path("/")) -> float | None:
    """Return the seconds, summed over cores, for which CPU quotas have throttled this process's control groups so far.

    If several of these groups count throttled time, return the largest value. Return None if no group counts it.
    """
    found = []
    for folder in _list_enclosing("cpu", root):
        counters = _read_counters(folder / "cpu.stat")
        found += [counters[name] / unit for name, unit in _THROTTLED.items() if name in counters]
    return max(found, default=None)


_THROTTLED = {"throttled_usec": 1e6, "throttled_time": 1e9}  # versions 2 and 1; units per second


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


def _read_counters(path: Path) -> dict[str, int]:
    """Return the counters in a file with one name and one number per line; empty if the file cannot be read."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}
