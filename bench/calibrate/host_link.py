"""How fast a device and its host exchange what offloading moves."""

from typing import TYPE_CHECKING

from bench.calibrate.timing import time_call

if TYPE_CHECKING:
    import torch

SIZE_BYTES = 2**28


def measure(device: "torch.device") -> float:
    """Return bytes per second one way between a GPU and page-locked host memory, of the slower direction."""
    import torch

    there = torch.ones(SIZE_BYTES // 4, device=device)
    here = torch.ones(SIZE_BYTES // 4, pin_memory=True)
    up = time_call(lambda: there.copy_(here, non_blocking=True), device)
    down = time_call(lambda: here.copy_(there, non_blocking=True), device)
    return SIZE_BYTES / max(up, down)
