"""What a rank does in a step, seen in untimed steps after the window: bytes per collective, the time outside of them
(collectives make everybody wait, so stragglers do not show in step times), FLOPs where no formula tells them, and what
its engine tells of a step."""

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from bench.engine_facts import Member
from bench.engines import OptionalMembers
from bench.measure.collectives import CollectiveCounter, wait_for
from bench.measure.flops import count_flops
from bench.measure.loop import Trainer
from bench.record import Collective, TimedPass

_STEPS = 3


@dataclass
class Inspection:
    """What this rank saw of itself."""

    collectives: dict[str, Collective] = field(default_factory=dict)  # of one step
    outside_collectives_s: float = 0.0  # of one step: waiting for its data included, for transfers of neighbours not
    flops: int | None = None  # of one step, if they were to be counted
    idle_s: float | None = None  # of one step; None where the engine does not tell
    passes: list[TimedPass] = field(default_factory=list)  # of one step; empty where the engine does not tell
    step_phases_s: dict[str, float] = field(default_factory=dict)  # of one step; empty where the engine does not tell


def inspect(
    trainer: Trainer, engine: OptionalMembers, members: Collection[Member], device: torch.device, *, counts_flops: bool
) -> Inspection:
    """Make a few more optimizer steps under observation; none of them is timed as a step. `members` are those that the
    engine has."""
    seen, outside = Inspection(), []
    for _ in range(_STEPS):
        wait_for(device)
        trainer.peers.barrier()
        counter, begin = CollectiveCounter(lambda: wait_for(device)), time.perf_counter()
        with counter:
            trainer.step()
        wait_for(device)
        own_s = time.perf_counter() - begin - counter.inside_s
        outside.append(max(0.0, own_s - _ask_transfer_wait_s(engine, members)))
        seen.collectives = {
            kind: Collective(calls=calls, payload_bytes=counter.payload_bytes[kind])
            for kind, calls in sorted(counter.calls.items())
        }
    seen.outside_collectives_s = statistics.median(outside)
    _ask_engine(trainer, engine, members, device, seen)
    if counts_flops:
        seen.flops = count_flops(trainer.step)
    return seen


def _ask_transfer_wait_s(engine: OptionalMembers, members: Collection[Member]) -> float:
    """Return what the engine tells of waiting that is in no collective: who waits for a neighbour would look as slow as
    whom it waits for."""
    if "transfer_wait_s" in members:
        return engine.transfer_wait_s()
    return engine.idle_s() if "idle_s" in members else 0.0


def _ask_engine(
    trainer: Trainer, engine: OptionalMembers, members: Collection[Member], device: torch.device, seen: Inspection
) -> None:
    """Add what the engine tells of a few steps that nothing else observes."""
    idle, phases = list[float](), []
    for _ in range(_STEPS if {"idle_s", "step_phases_s"}.intersection(members) else 0):
        trainer.peers.barrier()
        trainer.step()
        wait_for(device)
        if "idle_s" in members:
            idle.append(engine.idle_s())
        if "step_phases_s" in members:
            phases.append(engine.step_phases_s())
    if idle and "list_passes" in members:
        seen.passes = engine.list_passes()
    seen.idle_s = statistics.median(idle) if idle else None
    names = phases[0] if phases else {}
    seen.step_phases_s = {name: statistics.median(step[name] for step in phases) for name in names}
