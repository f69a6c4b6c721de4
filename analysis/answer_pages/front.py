"""Cost against time of every choice that advice weighed, and the Pareto front: what nothing beats in both."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.predict.advice import rate_doubt
from bench.predict.advice.choices import Choice

if TYPE_CHECKING:
    from bench.advising.search import Answer

BEST = 8
"""Choices of each engine and number of nodes that are drawn: the fastest, which are the cheapest of them, too."""
_TOKENS = 1e6  # where no number of tokens is asked for


class CostUnits(NamedTuple):
    """What time and cost are called, and how many of a second and of a device-second are one of them."""

    time: str
    cost: str
    seconds: float
    device_seconds: float


class CostPoint(NamedTuple):
    """A choice with its time and cost; both are `scale` times the seconds of a step."""

    choice: Choice
    doubt: int  # as `rate_doubt` has it
    scale: tuple[float, float]

    @property
    def at(self) -> tuple[float, float]:
        return self._compute(self.choice.estimate.step_s)

    @property
    def low(self) -> tuple[float, float]:
        return self._compute(self.choice.estimate.low_s)

    @property
    def high(self) -> tuple[float, float]:
        return self._compute(self.choice.estimate.high_s)

    def _compute(self, step_s: float) -> tuple[float, float]:
        return self.scale[0] * step_s, self.scale[1] * step_s


class CostLimits(NamedTuple):
    """The longest time and the highest cost that were asked for, in the units of the points."""

    time: float | None
    cost: float | None


def choose_units(answer: "Answer") -> CostUnits:
    """Return the units: hours or days of the training that is asked for and its price or node-hours, else what a
    million tokens take."""
    question, price = answer.query.question, answer.query.price
    if not question.has_length:
        cost, size = ("cost of a million tokens", 3600 / price) if price else ("device-seconds per million tokens", 1.0)
        return CostUnits("s per million tokens", cost, 1.0, size)
    long = (question.hours(answer.advice.winner, answer.advice.winner.estimate.step_s) or 0) >= 48
    devices = answer.advice.winner.spec.devices_per_node
    cost, size = ("cost", 3600 / price) if price else ("node-hours", 3600.0 * devices)
    return CostUnits("days" if long else "hours", cost, 86400.0 if long else 3600.0, size)


def list_points(answer: "Answer", units: CostUnits) -> list[CostPoint]:
    """Return every choice that was weighed, the cheapest first."""
    question, points = answer.query.question, []
    for choice in answer.choices:
        hours = question.hours(choice, 1.0)  # for each second of a step
        steps = _TOKENS / choice.time.tokens if hours is None else 3600 * hours
        scale = steps / units.seconds, steps * choice.spec.world_size / units.device_seconds
        if math.isfinite(steps):  # else failures leave no time to train
            points.append(CostPoint(choice, rate_doubt(choice, question), scale))
    return sorted(points, key=lambda point: (point.at[1], point.at[0]))


def find_front(points: Iterable[CostPoint]) -> list[CostPoint]:
    """Return those that no other beats in time without costing more, the fastest first; of equals the first."""
    front: list[CostPoint] = []
    for point in sorted(points, key=lambda one: one.at):
        if not front or point.at[1] < front[-1].at[1]:
            front.append(point)
    return front


def select_drawn(points: Sequence[CostPoint], kept: Sequence[CostPoint]) -> list[CostPoint]:
    """Return the BEST of each engine and number of nodes, and what is `kept` whatever else."""
    drawn, counts = [], dict[tuple[str, int], int]()
    always = {id(point) for point in kept}
    for point in points:
        group = point.choice.spec.engine.name, point.choice.spec.nodes
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= BEST or id(point) in always:
            drawn.append(point)
    return drawn


def compute_limits(answer: "Answer", units: CostUnits) -> CostLimits:
    """Return the limits that were asked for."""
    question, devices = answer.query.question, answer.advice.winner.spec.devices_per_node
    time = 3600 * question.deadline_h / units.seconds if question.deadline_h else None
    cost = 3600 * devices * question.node_hours / units.device_seconds if question.node_hours else None
    return CostLimits(time, cost)
