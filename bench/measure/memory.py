"""Memory of one rank: by the CUDA allocator's counters, or on a CPU by allocator events anchored to live storages."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Trace:
    """Live tensor bytes while a block of code ran; filled in when the block ends."""

    before_bytes: int | None = None
    peak_bytes: int | None = None
    after_bytes: int | None = None
    drift: float | None = field(default=None)  # events against storages, relative to what lives afterwards


@contextmanager
def traced(device: torch.device) -> Iterator[Trace]:
    """Trace the peak of live tensor bytes on `device` inside the block. Slows a CPU block down: never time one."""
    trace = Trace()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        trace.before_bytes = torch.cuda.memory_allocated(device)
        yield trace
        torch.cuda.synchronize(device)
        trace.peak_bytes = torch.cuda.max_memory_allocated(device)
        trace.after_bytes = torch.cuda.memory_allocated(device)
        return
    trace.before_bytes = live_storage_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield trace
    changes = _allocation_changes(profiler)
    del profiler
    trace.after_bytes = live_storage_bytes()
    running = highest = 0
    for change in changes:
        running += change
        highest = max(highest, running)
    # Frees made on threads that the profiler does not see (gloo's own) are missing from the events. What lives at both
    # edges is counted for itself; a difference means lost events, and the peak is uncertain by as much.
    trace.peak_bytes = max(trace.before_bytes + highest, trace.after_bytes)
    lost = trace.before_bytes + running - trace.after_bytes
    trace.drift = lost / max(trace.after_bytes, 1)


def live_storage_bytes() -> int:
    """Return the bytes of all distinct CPU tensor storages that Python can reach, gradients included."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf and candidate.requires_grad else None):
            if tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # empty storages
    return sum(storages.values())


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rss_bytes() -> int:
    """Return the resident set of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peaks(device: torch.device) -> None:
    """Start the allocator's peaks anew, where the allocator counts (CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def window_peak_bytes(device: torch.device) -> int | None:
    """Return the allocator's peak since `forget_peaks`; None on a CPU, whose allocator counts nothing."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def device_counters(device: torch.device) -> tuple[int | None, int | None]:
    """Return (peak reserved by the caching allocator, in use on the device by all), in bytes; None on a CPU."""
    if device.type != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), total - free


def _allocation_changes(profiler: profile) -> list[int]:
    """Return allocated (positive) and freed (negative) bytes of CPU tensors in the order of time."""
    kineto: Any = profiler.profiler.kineto_results if profiler.profiler else None
    events = [(event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]"]
    return [change for _, change in sorted(events, key=lambda event: event[0])]
