"""Memory of one rank: live tensor bytes and their peak as the device's allocator counts them, and resident sets.

CUDA's caching allocator counts for itself; on a CPU torch's allocator is wrapped by one that does (cpu_allocator.cpp).
Either costs nothing that could be seen in a step, so the peak is that of the timed window itself.

What filled the memory that a rank ran out of is read as it fails, before it is gone.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import multiprocessing
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bench.core.files import get_cache_folder
from bench.core.record import MemoryShortage
from bench.measure.control_group import find_memory_limits

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def read_device_shortage(
    rank: int, device: torch.device, error: BaseException, others_bytes: int | None
) -> MemoryShortage:
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


def read_host_shortage(rank: int, device: torch.device, error: BaseException, root: Path = Path("/")) -> MemoryShortage:
    """Return what fills a host, or as much of it as this process may have; tensors are those on a CPU as `device`."""
    free, total = min(_list_limits(root))
    on_host = device.type == "cpu"
    return MemoryShortage(
        rank=rank,
        where="host",
        **_describe_request(error, free, total),
        live_bytes=read_live_bytes(device) if on_host else None,
        peak_bytes=read_peak_bytes(device) if on_host else None,
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


_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")


@dataclass
class MemoryTrace:
    """Live tensor bytes around and inside a block of code; filled in when the block ends, None where unknown."""

    before_bytes: int | None = None
    peak_bytes: int | None = None
    after_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # by the caching allocator


class PhasePeaks(NamedTuple):
    """The most that was live, and held by the caching allocator, since the last `reset_peak`; None where unknown."""

    allocated_bytes: int | None
    reserved_bytes: int | None


def install_counter(device: torch.device) -> None:
    """Start counting on `device`, before the first tensor that shall be counted. On a CPU this needs a C++ compiler,
    once for each version of torch; without one the memory of a run stays unknown, and its log says why."""
    if device.type == "cpu" and (library := _load_cpu_allocator()):
        library.zeroscale_install()


def pause_counting(device: torch.device, paused: bool) -> None:
    """Leave new tensors on a CPU uncounted, or count them again: for a benchmark of what counting costs."""
    if device.type == "cpu" and (library := _load_cpu_allocator()):
        library.zeroscale_count(not paused)


@contextmanager
def trace_memory(device: torch.device) -> Iterator[MemoryTrace]:
    """Trace live tensor bytes on `device` inside the block."""
    trace = MemoryTrace(before_bytes=read_live_bytes(device))
    reset_peak(device)
    yield trace
    trace.peak_bytes, trace.peak_reserved_bytes = read_peaks(device)
    trace.after_bytes = read_live_bytes(device)


def read_live_bytes(device: torch.device) -> int | None:
    """Return the bytes of all tensors that live on `device` in this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    library = _load_cpu_allocator()
    return int(library.zeroscale_live()) if library else None


def read_peak_bytes(device: torch.device) -> int | None:
    """Return the largest `read_live_bytes` since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    library = _load_cpu_allocator()
    return int(library.zeroscale_peak()) if library else None


def reset_peak(device: torch.device) -> None:
    """Start the peak anew from what lives now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif library := _load_cpu_allocator():
        library.zeroscale_forget_peak()


def count_reachable_bytes(device: torch.device) -> int:
    """Return the bytes of all distinct storages on `device` that Python can reach, gradients included: an independent
    count to hold `read_live_bytes` against. It misses what only C++ holds, and counts what other allocators gave."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf and candidate.requires_grad else None):
            if tensor is not None and tensor.device.type == device.type and tensor.layout is torch.strided:
                # stand-ins of torch.compile and of function transforms hold nothing, and say so
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # empty storages
    return sum(storages.values())


def read_loaders_rss_bytes() -> int | None:
    """Return the largest resident sets so far of this process's loaders together, the server that they are forked from
    included; None without any. Pages that they share are counted for each."""
    loaders = {loader.pid for loader in multiprocessing.active_children() if loader.pid}
    servers = {parent for loader in loaders if (parent := _read_status(loader, "PPid")) not in (None, 1, os.getpid())}
    peaks = [_read_status(number, "VmHWM") for number in loaders | servers if number]
    return sum(1024 * peak for peak in peaks if peak is not None) if loaders else None


def _read_status(process: int, name: str) -> int | None:
    """Return a number of a process's status; None of one that is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def read_peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_peaks(device: torch.device) -> PhasePeaks:
    """Return the peaks since `reset_peak`. A CPU has no caching allocator."""
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return PhasePeaks(read_peak_bytes(device), reserved)


def read_device_used_bytes(device: torch.device) -> int | None:
    """Return what is in use on a device by all processes, and by its own libraries; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class DeviceUsePeak:
    """The highest use of a device by all processes at any look. What the caching allocator has taken it keeps, so looks
    at the ends of phases and between blocks miss little."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def look(self) -> None:
        used = read_device_used_bytes(self._device)
        if used is not None:
            self.bytes = max(used, self.bytes or 0)


@functools.cache
def _load_cpu_allocator() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_compile_allocator()))
    except (OSError, subprocess.CalledProcessError) as error:
        compiler_output = getattr(error, "stderr", None)
        print(f"memory will be unknown: {error} {compiler_output or ''}", file=sys.stderr)
        return None
    for function in (library.zeroscale_live, library.zeroscale_peak):
        function.restype = ctypes.c_longlong
    return library


def _compile_allocator() -> Path:
    """Return the compiled allocator from the user's cache, compiling it first if need be (about a second)."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    key = hashlib.sha256(f"{torch.__version__} {abi} {_SOURCE.read_text()}".encode()).hexdigest()[:12]
    cache = get_cache_folder(os.environ)
    library = cache / f"cpu_allocator-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        root, own = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
        command = [
            os.environ.get("CXX", "c++"), "-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            "-I", str(root / "include"), "-o", str(own), str(_SOURCE), "-L", str(root / "lib"), "-lc10",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        own.replace(library)  # several ranks may compile at once; each finds a whole file
    return library
