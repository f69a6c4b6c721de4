"""What the host pays to start one operation, however small."""

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CALLS = 200  # fewer than a GPU's queue holds: a full one would make the host wait
_BATCHES = 25


def measure(device: "torch.device") -> float:
    """Return the host's seconds per operation, median over batches: a product of 16 numbers with a weight that wants a
    gradient, through torch's dispatcher and its graph as in a forward pass. On a GPU the work itself is not awaited; on
    a CPU it is too small to count."""
    import torch

    from bench.measure.collectives import wait_for

    numbers = torch.ones(16, device=device)
    weight = torch.ones(16, device=device, requires_grad=True)

    def batch() -> float:
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            numbers * weight
        return (time.perf_counter() - begin) / _CALLS

    batch()
    return statistics.median(batch() for _ in range(_BATCHES))
