"""A schedule in time: when each pass ends, how long each rank has nothing to do, and how many passes it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.distributed.schedule import Action, Order, PipelineSize, find_source


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
    finish_s: dict[Action, float] = {}
    free_s, busy_s = [0.0] * size.ranks, [0.0] * size.ranks
    waiting = [[action for action in order if action.computes][::-1] for order in schedule]
    while any(waiting):
        before = len(finish_s)
        for rank, left in enumerate(waiting):
            while left and (ready_s := _find_ready_s(left[-1], size, finish_s, hop_s)) is not None:
                action = left.pop()
                seconds = (forward_s if action.kind == "forward" else backward_s)[action.stage]
                free_s[rank] = finish_s[action] = max(free_s[rank], ready_s) + seconds
                busy_s[rank] += seconds
        if len(finish_s) == before:
            raise ValueError(f"the schedule does not end: {', '.join(str(left[-1]) for left in waiting if left)} wait")
    return SimulatedStep(finish_s, tuple(busy_s), tuple(count_passes_in_flight(order) for order in schedule))


def _find_ready_s(action: Action, size: PipelineSize, finish_s: dict[Action, float], hop_s: float) -> float | None:
    """Return when what a pass takes up is on its rank; None where that is not known yet."""
    source = find_source(action, size)
    if source is None:
        return 0.0
    if source not in finish_s:
        return None
    return finish_s[source] + (hop_s if size.rank_of(source.stage) != size.rank_of(action.stage) else 0.0)


def count_passes_in_flight(order: Order) -> int:
    """Return how many forwards of a rank are without their backward at most at once: what each keeps for it, lives."""
    now = most = 0
    for action in order:
        now += (action.kind == "forward") - (action.kind == "backward")
        most = max(most, now)
    return most
