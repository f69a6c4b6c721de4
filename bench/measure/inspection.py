"""What a rank does in a step, seen in untimed steps after the window: bytes per collective, and the time before the
first one (collectives make everybody wait, so stragglers do not show in step times)."""

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bench.measure.collectives import CollectiveCounter
from bench.measure.loop import Trainer
from bench.record import Collective

_STEPS = 3


@dataclass
class Inspection:
    """What this rank saw of itself."""

    collectives: dict[str, Collective] = field(default_factory=dict)  # of one step
    before_collectives_s: float | None = None  # None where a step has no collective


def inspect(trainer: Trainer, device: torch.device) -> Inspection:
    """Make a few more optimizer steps under observation; none of them is timed as a step."""
    seen, before = Inspection(), []
    for _ in range(_STEPS):
        wait_for(device)
        dist.barrier()
        counter, begin = CollectiveCounter(before_first=lambda: wait_for(device)), time.perf_counter()
        fetched = trainer.fetch()
        with counter:
            trainer.step(fetched)
        if counter.first_at is not None:
            before.append(counter.first_at - begin)
        seen.collectives = {
            kind: Collective(calls=calls, payload_bytes=counter.payload_bytes[kind])
            for kind, calls in sorted(counter.calls.items())
        }
    seen.before_collectives_s = statistics.median(before) if before else None
    return seen


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
