"""What filled the memory that a rank ran out of, and what was lacking: read as it fails, before it is gone."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.measure import memory
from bench.measure.control_group import find_memory_limits
from bench.record import MemoryShortage

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def of_device(rank: int, device: torch.device, error: BaseException, others_bytes: int | None) -> MemoryShortage:
    """Return what fills a GPU; `others_bytes` is somebody else's. Written by torch's manual, not tried on one yet."""
    free, total = torch.cuda.mem_get_info(device)
    return MemoryShortage(
        rank=rank,
        where="device",
        **_describe_request(error, free, total),
        live_bytes=torch.cuda.memory_allocated(device),
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        others_bytes=others_bytes,
    )


def of_host(rank: int, device: torch.device, error: BaseException, root: Path = Path("/")) -> MemoryShortage:
    """Return what fills a host, or as much of it as this process may have; tensors are those on a CPU as `device`."""
    free, total = min(_list_limits(root))
    on_host = device.type == "cpu"
    return MemoryShortage(
        rank=rank,
        where="host",
        **_describe_request(error, free, total),
        live_bytes=memory.read_live_bytes(device) if on_host else None,
        peak_bytes=memory.read_peak_bytes(device) if on_host else None,
        resident_bytes=_read_kibibytes(root / "proc/self/status", "VmRSS"),
    )


def parse_requested_bytes(message: str) -> int | None:
    """Return what an allocator says that it was asked for: torch's on a GPU by a rounded unit, on a CPU in bytes."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", message, re.IGNORECASE)
    return round(float(found[1]) * 1024 ** _UNITS.index(found[2])) if found else None


def _describe_request(error: BaseException, free: int, total: int) -> dict[str, int | None]:
    """Return what was requested and lacking of memory that has so many bytes."""
    requested = parse_requested_bytes(str(error))
    lacking = None if requested is None else max(0, requested - free)
    return {"requested_bytes": requested, "lacking_bytes": lacking, "free_bytes": free, "total_bytes": total}


def _list_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (free, in all) of the host, of each control group around this process, and of its address space."""
    meminfo = root / "proc/meminfo"
    yield _read_kibibytes(meminfo, "MemAvailable") or 0, _read_kibibytes(meminfo, "MemTotal") or 0
    for used, most in find_memory_limits(root):
        yield max(0, most - used), most
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield max(0, most - pages * os.sysconf("SC_PAGE_SIZE")), most


def _read_kibibytes(path: Path, name: str) -> int | None:
    """Return an entry of the kernel's, in bytes; None where there is none."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
