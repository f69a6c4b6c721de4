"""Memory of one rank: live tensor bytes and their peak as the device's allocator counts them, and resident sets.

CUDA's caching allocator counts for itself; on a CPU torch's allocator is wrapped by one that does (cpu_allocator.cpp).
Either costs nothing that could be seen in a step, so the peak is that of the timed window itself.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bench.files import get_cache_folder

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
