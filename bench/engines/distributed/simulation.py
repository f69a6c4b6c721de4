"""A schedule in time, and what a rank holds while it goes through its list.

In time: when each pass ends, how long each rank has nothing to do, and how many passes it keeps. Held are passes
without their backward, states and gradients that wait to be taken up or to be sent, stages whose weights are whole, and
those whose gradients are. These are the executor's own rules, counted: an input lives until its pass has gone back,
what a pass made until it is sent.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.core.engine_costs import Counts, StageMoment
from bench.engines.distributed.schedule import Action, Order, PipelineSize, find_source, find_target

Hop = Callable[[int, int], float]
"""Seconds of a transfer from one rank of a pipeline to another."""
SENDS_PER_RANK = 2
"""Sends that are on their way at most, for each rank of a pipeline."""


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


def list_moments(order: Order, size: PipelineSize, rank: int) -> tuple[StageMoment, ...]:
    """Return the moments of a rank's order when most lives: of one pass of one stage those that no other one exceeds in
    everything."""
    return tuple(_keep_largest(_Walk(size, rank).run(order)))


class _Walk:
    """What a rank holds from action to action."""

    def __init__(self, size: PipelineSize, rank: int) -> None:
        self._size, self._stages = size, size.stages_of(rank)
        self._kept = dict.fromkeys(self._stages, 0)
        self._whole, self._unreduced, self._reduced = (dict.fromkeys(self._stages, 0) for _ in range(3))
        self._waiting, self._gradients = set[Action](), set[Action]()
        self._leaving = deque[Action]()

    def run(self, order: Order) -> Iterable[StageMoment]:
        """Yield every pass and every reduction."""
        for action in order:
            if action.kind == "forward":
                yield self._run_forward(action)
            elif action.kind == "backward":
                yield self._run_backward(action)
            elif action.kind == "reduce":
                yield self._note("reduce", action.stage)
                self._unreduced[action.stage], self._reduced[action.stage] = 0, 1
            elif action.kind in ("gather", "release"):
                self._whole[action.stage] = int(action.kind == "gather")
            else:
                self._transfer(action)

    def _transfer(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind == "receive_states":
            self._waiting.add(Action("forward", stage, micro_batch))
        elif kind == "receive_gradients":
            self._gradients.add(Action("backward", stage, micro_batch))
        elif len(self._leaving) > SENDS_PER_RANK * self._size.ranks:  # a pass has appended what it made
            self._leaving.popleft()

    def _run_forward(self, action: Action) -> StageMoment:
        self._waiting.discard(action)
        moment = self._note("forward", action.stage)
        self._kept[action.stage] += 1
        self._give(action, self._waiting)
        return moment

    def _run_backward(self, action: Action) -> StageMoment:
        self._kept[action.stage] -= 1
        self._unreduced[action.stage] = 1
        moment = self._note("backward", action.stage)
        self._gradients.discard(action)
        self._give(action, self._gradients)
        return moment

    def _give(self, action: Action, own: set[Action]) -> None:
        """Keep what a pass made for another stage of this rank, or until it is sent."""
        target = find_target(action, self._size)
        if target is None:
            return
        if target in self._stages:
            own.add(action._replace(stage=target))
        else:
            self._leaving.append(action)

    def _note(self, kind: Literal["forward", "backward", "reduce"], stage: int) -> StageMoment:
        kept, *states = (
            tuple(by_stage.values()) for by_stage in (self._kept, self._whole, self._unreduced, self._reduced)
        )
        waiting, gradients, leaving = map(len, (self._waiting, self._gradients, self._leaving))
        return StageMoment(kind, stage, kept, waiting, gradients, leaving, *states)


def _keep_largest(moments: Iterable[StageMoment]) -> list[StageMoment]:
    """Return those of which no other one of the same pass has as much of everything."""
    found: dict[tuple[str, int], list[tuple[Counts, StageMoment]]] = {}
    counted = {moment: _flatten(moment) for moment in moments}
    for moment, counts in sorted(counted.items(), key=lambda item: -sum(item[1])):
        rivals = found.setdefault((moment.kind, moment.stage), [])
        if not any(all(map(int.__ge__, other, counts)) for other, _ in rivals):
            rivals.append((counts, moment))
    return [moment for rivals in found.values() for _, moment in rivals]


def _flatten(moment: StageMoment) -> Counts:
    return (
        *moment.kept, moment.waiting, moment.gradients, moment.leaving, *moment.whole, *moment.unreduced,
        *moment.reduced,
    )  # fmt: skip
