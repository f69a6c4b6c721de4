"""Memory of one rank: bytes of live tensors, their peak, and the resident set of the process.

CUDA's caching allocator counts live bytes itself. On a CPU, torch's allocator is wrapped by a counting allocator
(cpu_allocator.cpp). Neither allocator slows a step measurably, so the peak is taken in the timed window itself. In a
rehearsal by shapes for a GPU, the counting allocator imitates CUDA's.

If a rank runs out of memory, it records how much memory is in use before the memory is freed.
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
from pathlib import Path
from typing import NamedTuple

import torch

from bench.core.engine_costs import CUBLAS_BYTES
from bench.core.files import get_cache_folder
from bench.core.record import MemoryShortage
from bench.measure.control_group import find_memory_limits, read_number

_LOGGER = logging.getLogger(__name__)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def read_device_shortage(
    rank: int, device: torch.device, error: BaseException, others_bytes: int | None
) -> MemoryShortage:
    """Return how much of a GPU's memory is in use after a rank ran out of it. `error` is the exception.

    `others_bytes` is the memory used by processes outside of the run. The code follows torch's manual and has not been
    tested on a GPU yet.
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
    """Return how much host memory is in use after a rank ran out of it. Several limits apply, such as the memory of the
    host and the limit of a control group. The limit with the least free memory is reported. `error` is the exception.

    The bytes of tensors are known only if `device` is a CPU.
    """
    free, total = min(_list_limits(root))
    on_host, resident = device.type == "cpu", read_number(root / "proc/self/status", "VmRSS")
    return MemoryShortage(
        rank=rank,
        where="host",
        **_describe_request(error, free, total),
        live_bytes=read_live_bytes(device) if on_host else None,
        peak_bytes=read_peak_bytes(device) if on_host else None,
        resident_bytes=None if resident is None else 1024 * resident,
    )


def parse_requested_bytes(message: str) -> int | None:
    """Return the size in bytes of the failed request, as stated in an allocator's message. None if the message does not
    state it.

    Messages of the GPU allocator contain rounded values.
    """
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", message, re.IGNORECASE)
    return round(float(found[1]) * 1024 ** _UNITS.index(found[2])) if found else None


def _describe_request(error: BaseException, free: int, total: int) -> dict[str, int | None]:
    requested = parse_requested_bytes(str(error))
    lacking = None if requested is None else max(0, requested - free)
    return {"requested_bytes": requested, "lacking_bytes": lacking, "free_bytes": free, "total_bytes": total}


def _list_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the bytes (free, total) of each memory limit of this process.

    The limits are the memory of the host, the limit of each enclosing control group, and the limit of the address
    space.
    """
    free, total = (1024 * (read_number(root / "proc/meminfo", name) or 0) for name in ("MemAvailable", "MemTotal"))
    yield free, total
    for used, limit in find_memory_limits(root):
        yield max(0, limit - used), limit
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * os.sysconf("SC_PAGE_SIZE")), limit


class PhasePeaks(NamedTuple):
    """Peaks since `reset_peak`: bytes of live tensors, and bytes reserved by the caching allocator; None if unknown."""

    allocated_bytes: int | None
    reserved_bytes: int | None


def install_counter(device: torch.device, *, imitates_gpu: bool = False) -> None:
    """Start counting the memory of tensors on `device`. Call this before the first tensor is created.

    On a CPU, this needs a C++ compiler once for each version of torch. Without a compiler the memory of a run stays
    unknown, and a warning in its log states the reason. With `imitates_gpu`, tensors on the CPU are counted as CUDA's
    caching allocator would count and reserve them. The workspaces of cuBLAS are then counted from the start.
    """
    if device.type == "cpu" and (library := _load_cpu_allocator()):
        library.zeroscale_install()
        if imitates_gpu:
            library.zeroscale_imitate(CUBLAS_BYTES)


def find_least_reserved_bytes(device: torch.device) -> int | None:
    """Return the least memory of a GPU with which its caching allocator could serve all requests so far, in bytes; None
    if no allocator of a GPU is imitated on `device`.

    If a GPU is full, the allocator gives back all segments without a used block, and tries again. So it may need less
    than it reserves on a GPU with enough memory. The result suffices, and is found by bisection. The choice
    of blocks depends on the limit. So a lower limit may suffice as well, and a slightly higher one may not.
    """
    library = _load_cpu_allocator() if device.type == "cpu" else None
    low, high = 0, int(library.zeroscale_most_reserved()) if library else -1
    if high < 0 or library is None:
        return None
    while high - low > max(high // 1000, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if library.zeroscale_suffices(middle) else (middle, high)
    return high


def read_live_bytes(device: torch.device) -> int | None:
    """Return the bytes of all live tensors of this process on `device`; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    library = _load_cpu_allocator()
    return int(library.zeroscale_live()) if library else None


def read_peak_bytes(device: torch.device) -> int | None:
    """Return the largest value of `read_live_bytes` since `reset_peak`, in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    library = _load_cpu_allocator()
    return int(library.zeroscale_peak()) if library else None


def reset_peak(device: torch.device) -> None:
    """Set the peak to the current bytes of live tensors."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif library := _load_cpu_allocator():
        library.zeroscale_forget_peak()


def count_reachable_bytes(device: torch.device) -> int:
    """Return the bytes of all distinct tensor storages on `device` that Python can reach, gradients included.

    This is an independent check of `read_live_bytes`. It misses storages that only C++ code holds, and includes
    storages from other allocators.
    """
    gc.collect()  # otherwise unreachable tensors in reference cycles would count
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf and candidate.requires_grad else None):
            if tensor is not None and tensor.device.type == device.type and tensor.layout is torch.strided:
                # Fake tensors of torch.compile and of function transforms have no storage, and raise an exception.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # empty storages
    return sum(storages.values())


def read_loaders_rss_bytes() -> int | None:
    """Return the sum in bytes of the peak resident sets of the DataLoader processes and of the server that forks them.

    Pages shared between these processes are counted once per process. None if this process has no DataLoader processes.
    """
    loaders = {loader.pid for loader in multiprocessing.active_children() if loader.pid}
    parents = {read_number(Path(f"/proc/{loader}/status"), "PPid") for loader in loaders}
    numbers = loaders | (parents - {None, 1, os.getpid()})
    peaks = [read_number(Path(f"/proc/{number}/status"), "VmHWM") for number in numbers]
    return sum(1024 * peak for peak in peaks if peak is not None) if loaders else None


def read_peak_rss_bytes() -> int:
    """Return the peak resident set of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_peaks(device: torch.device) -> PhasePeaks:
    """Return the memory peaks since `reset_peak`. A CPU has no caching allocator, so `reserved_bytes` is None, unless
    the allocator of a GPU is imitated."""
    reserved: int | None = None
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
    elif library := _load_cpu_allocator():
        reserved = int(library.zeroscale_reserved_peak())
    return PhasePeaks(read_peak_bytes(device), None if reserved == -1 else reserved)


def read_device_used_bytes(device: torch.device) -> int | None:
    """Return the used bytes of a GPU, including those of other processes and of CUDA libraries; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def sample_device_peak(device: torch.device, peak_bytes: int | None = None) -> int | None:
    """Return the highest memory use of a GPU so far, by all processes together; None on a CPU. `peak_bytes` is the
    result of the previous call.

    Samples at the ends of phases and between blocks of steps miss little, because the caching allocator keeps freed
    memory.
    """
    used = read_device_used_bytes(device)
    return None if used is None else max(used, peak_bytes or 0)


@functools.cache
def _load_cpu_allocator() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_compile_allocator()))
    except (OSError, subprocess.CalledProcessError) as error:
        why = f"{error} {getattr(error, 'stderr', None) or ''}"
        _LOGGER.warning("memory will be unknown, because its counter cannot be compiled: %s", why)
        return None
    for name in ("live", "peak", "reserved_peak", "most_reserved"):
        getattr(library, f"zeroscale_{name}").restype = ctypes.c_longlong
    library.zeroscale_imitate.argtypes = library.zeroscale_suffices.argtypes = [ctypes.c_longlong]
    return library


def _compile_allocator() -> Path:
    """Return the path of the compiled counting allocator in the user's cache.

    If it is missing, it is compiled first, which takes about a second.
    """
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
        # Several ranks may compile at the same time. The rename is atomic, so each finds a complete file.
        own.replace(library)
    return library
