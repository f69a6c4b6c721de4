"""A schedule in time: when each pass ends, how long each rank has nothing to do, and how many passes it keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.distributed.schedule import Action, Order, PipelineSize, find_source

Hop = Callable[[int, int], float]
"""Seconds of a transfer from one rank of a pipeline to another."""


@dataclass(frozen=True)
class SimulatedStep:
    """What became of one step's passes, of which every rank begins at 0 s."""

    finish_s: dict[Action, float]  # of each forward and backward
    busy_s: tuple[float, ...]  # that each rank computes
    passes_in_flight: tuple[int, ...]  # on each rank, forwards without their backward, at most at once

    @property
    def total_s(self) -> float:
        """From the first pass to the end of the last one."""
        return max(self.finish_s.values())

    @property
    def idle_s(self) -> tuple[float, ...]:
        """That each rank does not compute, until the last one has ended."""
        return tuple(self.total_s - busy_s for busy_s in self.busy_s)


def simulate_schedule(
    schedule: Sequence[Order],
    size: PipelineSize,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: float = 0.0,
) -> SimulatedStep:
    """Return the times of a schedule from the seconds that each stage takes for one micro-batch, and a transfer
    between two ranks, beside which both compute. ValueError if it never ends."""
    passes = link_passes(schedule, size)
    ends_s = play_passes(passes, size, forward_s, backward_s, lambda source, target: hop_s)
    busy_s = [0.0] * size.ranks
    for (kind, stage, _), rank, _ in passes:
        busy_s[rank] += (forward_s if kind == "forward" else backward_s)[stage]
    finish_s = {one.action: end_s for one, end_s in zip(passes, ends_s, strict=True)}
    return SimulatedStep(finish_s, tuple(busy_s), tuple(count_passes_in_flight(order) for order in schedule))


class LinkedPass(NamedTuple):
    """A pass, and which other one it waits for."""

    action: Action
    rank: int
    source: int | None  # place in the list of the pass whose result it takes up; None: it needs nobody else's


def link_passes(schedule: Sequence[Order], size: PipelineSize) -> tuple[LinkedPass, ...]:
    """Return all passes of a schedule, each behind those that it waits for. ValueError if the schedule never ends."""
    places: dict[Action, int] = {}
    passes = list[LinkedPass]()
    waiting = [[action for action in order if action.computes][::-1] for order in schedule]
    while any(waiting):
        before = len(passes)
        for rank, left in enumerate(waiting):
            while left:
                source = find_source(left[-1], size)
                if source is not None and source not in places:
                    break
                places[left[-1]] = len(passes)
                passes.append(LinkedPass(left.pop(), rank, None if source is None else places[source]))
        if len(passes) == before:
            raise ValueError(f"the schedule does not end: {', '.join(str(left[-1]) for left in waiting if left)} wait")
    return tuple(passes)


def play_passes(
    passes: Sequence[LinkedPass], size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> list[float]:
    """Return when each pass ends, from the seconds that each stage takes for one micro-batch."""
    ends_s, free_s, ranks = list[float](), [0.0] * size.ranks, size.ranks
    # states come from the rank before, gradients from the one behind; a stage's neighbours may be on its own rank
    coming_s = [hop((rank - 1) % ranks, rank) if ranks > 1 else 0.0 for rank in range(ranks)]
    returning_s = [hop((rank + 1) % ranks, rank) if ranks > 1 else 0.0 for rank in range(ranks)]
    for (kind, stage, _), rank, source in passes:
        forward, begin_s = kind == "forward", free_s[rank]
        if source is not None:
            begin_s = max(begin_s, ends_s[source] + (coming_s if forward else returning_s)[rank])
        end_s = begin_s + (forward_s if forward else backward_s)[stage]
        free_s[rank] = end_s
        ends_s.append(end_s)
    return ends_s


def count_passes_in_flight(order: Order) -> int:
    """Return how many forwards of a rank are without their backward at most at once: what each keeps for it, lives."""
    now = most = 0
    for action in order:
        now += (action.kind == "forward") - (action.kind == "backward")
        most = max(most, now)
    return most
