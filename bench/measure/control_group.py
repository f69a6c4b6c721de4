"""Control groups (cgroups) of this process: the limits set by the system, a container or a scheduler, and their counts.

Both versions of the kernel's interface are read.
"""

from collections.abc import Iterator
from pathlib import Path

_MEMORY = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))  # by version
# In bytes; version 1 writes a number near 2^63 for "no limit".
_UNLIMITED = 2**60


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders that may be this process's group for a controller, the likeliest first.

    In a container the path may be the host's, while the group itself is mounted at the top.
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
    """Return the seconds for which CPU quotas have held back this process's groups so far, summed over cores.

    The group with the largest count is taken. None if no group counts it.
    """
    found = []
    for folder in _list_enclosing("cpu", root):
        counters = _read_counters(folder / "cpu.stat")
        found += [counters[name] / unit for name, unit in _THROTTLED.items() if name in counters]
    return max(found, default=None)


_THROTTLED = {"throttled_usec": 1e6, "throttled_time": 1e9}  # by version, in units per second


def read_quota_cores(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota of this process's groups, in cores; None without a quota."""
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
    """Return (used, limit) in bytes of each of this process's groups that limits memory."""
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
    """Yield the folders of this process's group for a controller, and of the groups around it."""
    # A limit of any group around this one holds as well.
    for own in own_groups(controller, root):
        for folder in (own, *own.parents):
            if folder == root / "sys/fs":
                break
            yield folder


def _read_counters(path: Path) -> dict[str, int]:
    """Return a file of names and numbers; empty if it cannot be read."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}
