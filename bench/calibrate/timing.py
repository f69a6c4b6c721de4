"""How long one call of something takes, by the clock of the host and with the device awaited at both ends."""

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FILL_S = 0.02  # so long in all at least: a thousand times what the clock and waiting for a device cost
_BATCHES = 5
_LONG_S = 0.5  # in all: what takes so long needs no company


def time_call(work: Callable[[], object], device: "torch.device") -> float:
    """Return the seconds of one call of `work`: median over batches of calls that together fill FILL_S, after calls
    that allocate and choose kernels. Between the calls of a batch nothing is awaited, as in a step."""
    from bench.measure.collectives import wait_for

    def batch(calls: int) -> float:
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        return (time.perf_counter() - begin) / calls

    batch(1)
    single_s = batch(1)
    batches = max(1, min(_BATCHES, math.floor(_LONG_S / single_s)))
    calls = max(1, math.ceil(FILL_S / batches / single_s))
    return statistics.median(batch(calls) for _ in range(batches))
