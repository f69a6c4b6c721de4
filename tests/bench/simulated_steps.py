"""Times of one step of a schedule, an oracle for predictions and real ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engines.distributed.schedule import Action, Order, PipelineSize
from bench.engines.distributed.simulation import link_passes, simulate_passes


@dataclass(frozen=True)
class SimulatedStep:
    """Times of one step's passes; every rank begins at 0 s."""

    finish_s: dict[Action, float]  # of each forward and backward
    busy_s: tuple[float, ...]  # of each rank, in its passes
    passes_in_flight: tuple[int, ...]  # largest number of each rank's forwards without their backward

    @property
    def total_s(self) -> float:
        """Time from the first pass to the end of the last pass."""
        return max(self.finish_s.values())

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Of each rank outside its passes, until the last pass of all ranks has ended."""
        return tuple(self.total_s - busy_s for busy_s in self.busy_s)


def simulate_schedule(
    schedule: Sequence[Order],
    size: PipelineSize,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: float = 0.0,
) -> SimulatedStep:
    """Return the times of a schedule from each stage's seconds for one micro-batch, and the seconds of a transfer
    between two ranks, during which both compute. ValueError if it never ends."""
    passes = link_passes(schedule, size)
    ends_s = simulate_passes(passes, size, forward_s, backward_s, lambda source, target: hop_s)
    busy_s = [0.0] * size.ranks
    for (kind, stage, _), rank, _ in passes:
        busy_s[rank] += (forward_s if kind == "forward" else backward_s)[stage]
    finish_s = {one.action: end_s for one, end_s in zip(passes, ends_s, strict=True)}
    return SimulatedStep(finish_s, tuple(busy_s), tuple(count_passes_in_flight(order) for order in schedule))


def count_passes_in_flight(order: Order) -> int:
    """Return the largest number of a rank's forwards without their backward."""
    now = most = 0
    for action in order:
        now += (action.kind == "forward") - (action.kind == "backward")
        most = max(most, now)
    return most
