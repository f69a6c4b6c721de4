"""What a rank does in a step, seen in untimed steps after the window: bytes per collective, and the time outside of
them (collectives make everybody wait, so stragglers do not show in step times); FLOPs where no formula tells them."""

import statistics
import time
from dataclasses import dataclass, field

import torch

from bench.measure.collectives import CollectiveCounter, wait_for
from bench.measure.flops import count_flops
from bench.measure.loop import Trainer
from bench.record import Collective

_STEPS = 3


@dataclass
class Inspection:
    """What this rank saw of itself."""

    collectives: dict[str, Collective] = field(default_factory=dict)  # of one step
    outside_collectives_s: float = 0.0  # of one step, the wait for its data included
    flops: int | None = None  # of one step, if they were to be counted


def inspect(trainer: Trainer, device: torch.device, *, counts_flops: bool) -> Inspection:
    """Make a few more optimizer steps under observation; none of them is timed as a step."""
    seen, outside = Inspection(), []
    for _ in range(_STEPS):
        wait_for(device)
        trainer.peers.barrier()
        counter, begin = CollectiveCounter(lambda: wait_for(device)), time.perf_counter()
        with counter:
            trainer.step()
        wait_for(device)
        outside.append(time.perf_counter() - begin - counter.inside_s)
        seen.collectives = {
            kind: Collective(calls=calls, payload_bytes=counter.payload_bytes[kind])
            for kind, calls in sorted(counter.calls.items())
        }
    seen.outside_collectives_s = statistics.median(outside)
    if counts_flops:
        seen.flops = count_flops(trainer.step)
    return seen
