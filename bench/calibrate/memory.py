"""How fast a device copies within its own memory."""

from typing import TYPE_CHECKING

from bench.calibrate.timing import time_call

if TYPE_CHECKING:
    import torch

SIZE_BYTES = 2**29  # beyond any cache


def measure(device: "torch.device") -> float:
    """Return bytes per second of a copy, those read and those written counted both."""
    import torch

    source = torch.ones(SIZE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * SIZE_BYTES / time_call(lambda: target.copy_(source), device)
