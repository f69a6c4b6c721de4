"""Memory of one rank: live tensor bytes and their peak as the device's allocator counts them, and resident sets.

CUDA's caching allocator counts by itself. On a CPU torch's allocator is wrapped by one that counts (cpu_allocator.cpp).
Neither has a measurable cost in a step, so the peak is that of the timed window itself.

When a rank runs out of memory, the use of that memory is read at the failure, before it is freed.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import logging
import multiprocessing
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bench.core.files import get_cache_folder
from bench.core.record import MemoryShortage
from bench.measure.control_group import find_memory_limits

_LOGGER = logging.getLogger(__name__)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def read_device_shortage(
    rank: int, device: torch.device, error: BaseException, others_bytes: int | None
) -> MemoryShortage:
    """Return the use of a GPU's memory; `others_bytes` is that of processes outside of the run.

    Written by torch's manual, and not tried on a GPU yet.
    """
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
    """Return the use of the host's memory within the tightest limit of this process.

    The bytes of tensors are known if the rank's `device` is a CPU.
    """
    free, total = min(_list_limits(root))
    on_host, resident = device.type == "cpu", _read_number(root / "proc/self/status", "VmRSS")
    return MemoryShortage(
        rank=rank,
        where="host",
        **_describe_request(error, free, total),
        live_bytes=read_live_bytes(device) if on_host else None,
        peak_bytes=read_peak_bytes(device) if on_host else None,
        resident_bytes=None if resident is None else 1024 * resident,
    )


def parse_requested_bytes(message: str) -> int | None:
    """Return the bytes that an allocator's message says were requested, rounded on a GPU; None without them."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", message, re.IGNORECASE)
    return round(float(found[1]) * 1024 ** _UNITS.index(found[2])) if found else None


def _describe_request(error: BaseException, free: int, total: int) -> dict[str, int | None]:
    requested = parse_requested_bytes(str(error))
    lacking = None if requested is None else max(0, requested - free)
    return {"requested_bytes": requested, "lacking_bytes": lacking, "free_bytes": free, "total_bytes": total}


def _list_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the bytes (free, total) of the host, of each control group around this process and of its address space."""
    free, total = (1024 * (_read_number(root / "proc/meminfo", name) or 0) for name in ("MemAvailable", "MemTotal"))
    yield free, total
    for used, limit in find_memory_limits(root):
        yield max(0, limit - used), limit
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * os.sysconf("SC_PAGE_SIZE")), limit


def _read_number(path: Path, name: str) -> int | None:
    """Return the number of an entry such as `VmRSS: 12 kB`; None without the entry or the file."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+)", path.read_text(), re.MULTILINE):
            return int(found[1])
    return None


@dataclass
class MemoryTrace:
    """Live tensor bytes around and inside a block of code, filled in when the block ends; None where unknown."""

    before_bytes: int | None = None
    peak_bytes: int | None = None
    after_bytes: int | None = None
    peak_reserved_bytes: int | None = None  # by the caching allocator


class PhasePeaks(NamedTuple):
    """Peaks of live bytes, and of bytes held by the caching allocator, since `reset_peak`; None where unknown."""

    allocated_bytes: int | None
    reserved_bytes: int | None


def install_counter(device: torch.device) -> None:
    """Start counting on `device`; call it before the first tensor that counts.

    On a CPU this needs a C++ compiler, once for each version of torch. Without one the memory of a run stays unknown,
    and its log has the reason.
    """
    if device.type == "cpu" and (library := _load_cpu_allocator()):
        library.zeroscale_install()


def pause_counting(device: torch.device, paused: bool) -> None:
    """Stop counting new tensors on a CPU, or count them again. For a benchmark of the cost of counting."""
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
    """Restart the peak from the bytes that live now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif library := _load_cpu_allocator():
        library.zeroscale_forget_peak()


def count_reachable_bytes(device: torch.device) -> int:
    """Return the bytes of all distinct storages on `device` that Python can reach, gradients included.

    An independent check of `read_live_bytes`. It misses storages that only C++ holds, and includes those of other
    allocators.
    """
    gc.collect()  # unreachable tensors in cycles would count
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf and candidate.requires_grad else None):
            if tensor is not None and tensor.device.type == device.type and tensor.layout is torch.strided:
                # Stand-ins of torch.compile and of function transforms have no storage, and raise.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # empty storages
    return sum(storages.values())


def read_loaders_rss_bytes() -> int | None:
    """Return the sum of the peak resident sets of this process's loaders, and of the server that forks them.

    Pages that they share are counted for each of them. None without loaders.
    """
    loaders = {loader.pid for loader in multiprocessing.active_children() if loader.pid}
    parents = {_read_number(Path(f"/proc/{loader}/status"), "PPid") for loader in loaders}
    numbers = loaders | (parents - {None, 1, os.getpid()})
    peaks = [_read_number(Path(f"/proc/{number}/status"), "VmHWM") for number in numbers]
    return sum(1024 * peak for peak in peaks if peak is not None) if loaders else None


def read_peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_peaks(device: torch.device) -> PhasePeaks:
    """Return the peaks since `reset_peak`. A CPU has no caching allocator."""
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return PhasePeaks(read_peak_bytes(device), reserved)


def read_device_used_bytes(device: torch.device) -> int | None:
    """Return the bytes in use on a device by all processes and its own libraries; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class DeviceUsePeak:
    """The highest sampled use of a device by all processes.

    The caching allocator returns no memory, so samples at the ends of phases and between blocks miss little.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def sample(self) -> None:
        used = read_device_used_bytes(self._device)
        if used is not None:
            self.bytes = max(used, self.bytes or 0)


@functools.cache
def _load_cpu_allocator() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_compile_allocator()))
    except (OSError, subprocess.CalledProcessError) as error:
        _LOGGER.warning("memory will be unknown: %s %s", error, getattr(error, "stderr", None) or "")
        return None
    for function in (library.zeroscale_live, library.zeroscale_peak):
        function.restype = ctypes.c_longlong
    return library


def _compile_allocator() -> Path:
    """Return the compiled allocator from the user's cache; compile it first if it is missing, in about a second."""
    source, abi = Path(__file__).with_name("cpu_allocator.cpp"), int(torch._C._GLIBCXX_USE_CXX11_ABI)
    key = hashlib.sha256(f"{torch.__version__} {abi} {source.read_text()}".encode()).hexdigest()[:12]
    cache = get_cache_folder(os.environ)
    library = cache / f"cpu_allocator-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        root, own = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
        command = [
            os.environ.get("CXX", "c++"), "-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            "-I", str(root / "include"), "-o", str(own), str(source), "-L", str(root / "lib"), "-lc10",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        # Several ranks may compile at once; each finds a complete file.
        own.replace(library)
    return library
