"""Helper that simulates one step of a pipeline schedule. Tests compare its times with predictions and with measurements
on real ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engines.distributed.schedule import Action, Order, PipelineSize
from bench.engines.distributed.simulation import link_passes, simulate_passes


@dataclass(frozen=True)
class SimulatedStep:
    """Times of the passes of one simulated step, in seconds. Every rank begins at 0 s."""

    finish_s: dict[Action, float]  # end of each forward and backward pass, in seconds
    busy_s: tuple[float, ...]  # seconds that each rank spends in its passes
    passes_in_flight: tuple[int, ...]  # of each rank: most micro-batches between forward and backward

    @property
    def total_s(self) -> float:
        """Seconds from the start of the step to the end of the last pass."""
        return max(self.finish_s.values())

    @property
    def idle_s(self) -> tuple[float, ...]:
        """For each rank, the seconds in which it runs no pass, between the start of the step and the end of the last
        pass of any rank."""
        return tuple(self.total_s - busy_s for busy_s in self.busy_s)


def simulate_schedule(
    schedule: Sequence[Order],
    size: PipelineSize,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: float = 0.0,
) -> SimulatedStep:
    """Simulate one step of a pipeline schedule and return its times.

    `forward_s` and `backward_s` are the seconds of each stage for one micro-batch. A transfer between two ranks takes
    `hop_s` seconds and overlaps with computing. Raise ValueError if the schedule deadlocks.
    """
    passes = link_passes(schedule, size)
    ends_s = simulate_passes(passes, size, forward_s, backward_s, lambda source, target: hop_s)
    busy_s = [0.0] * size.ranks
    for (kind, stage, _), rank, _ in passes:
        busy_s[rank] += (forward_s if kind == "forward" else backward_s)[stage]
    finish_s = {one.action: end_s for one, end_s in zip(passes, ends_s, strict=True)}
    return SimulatedStep(finish_s, tuple(busy_s), tuple(count_passes_in_flight(order) for order in schedule))


def count_passes_in_flight(order: Order) -> int:
    """Return the largest number of micro-batches in flight on a rank. A micro-batch is in flight if its forward pass is
    finished and its backward pass is not. `order` has the actions of the rank in the order of execution."""
    now = most = 0
    for action in order:
        now += (action.kind == "forward") - (action.kind == "backward")
        most = max(most, now)
    return most
