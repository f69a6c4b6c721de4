"""The control groups of this process: what the system, a container or a scheduler allows it, and what they count."""

from collections.abc import Iterator
from pathlib import Path

_MEMORY = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))  # by version
_UNLIMITED = 2**60


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders in which the group of this process for a controller, of either version, may be found, the
    likeliest first. In a container its path may be that on the host, and what is mounted is the group itself."""
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


def throttled_s(root: Path = Path("/")) -> float | None:
    """Return for how long quotas of processor time have held back the processes of this one's group so far, or of one
    around it, in seconds added up over cores; None where no group counts it."""
    found = []
    for folder in _around("cpu", root):
        counters = _numbers(folder / "cpu.stat")
        if "throttled_usec" in counters:
            found.append(counters["throttled_usec"] / 1e6)
        elif "throttled_time" in counters:
            found.append(counters["throttled_time"] / 1e9)
    return max(found, default=None)


def quota_cores(root: Path = Path("/")) -> float | None:
    """Return the processor time that this process's groups allow, in cores: the least of its own group's quota and of
    those around it; None where there is none."""
    quotas = (_quota(folder) for folder in _around("cpu", root))
    return min((quota for quota in quotas if quota), default=None)


def find_memory_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (used, allowed) of the memory of this process's group and of each one around it that has a limit, in
    bytes. What a version calls unlimited is more than any machine has."""
    found = []
    for folder in _around("memory", root):
        for names in _MEMORY:
            try:
                used, allowed = (int((folder / name).read_text()) for name in names)
            except (OSError, ValueError):  # `max` is no number
                continue
            found += [(used, allowed)] if allowed < _UNLIMITED else []
    return found


def _around(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group for a controller, and of the groups around it."""
    for own in own_groups(controller, root):
        for folder in (own, *own.parents):
            if folder == root / "sys/fs":
                break
            yield folder


def _quota(folder: Path) -> float | None:
    """Return the quota of one group, by the files of either version."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return float(quota) / float(period) if quota != "max" and float(quota) > 0 else None


def _numbers(path: Path) -> dict[str, int]:
    """Return a file of names and numbers; empty where it cannot be read."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}
