"""What a rank holds while it goes through its list of a schedule: passes without their backward, states and gradients
that wait to be taken up or to be sent, stages whose weights are whole, and those whose gradients are.

The executor's own rules, counted: an input lives until its pass has gone back, what a pass made until it is sent.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal

from bench.distributed.schedule import Action, Order, PipelineSize, find_target
from bench.engine_costs import Counts, StageMoment

SENDS_PER_RANK = 2
"""Sends that are on their way at most, for each rank of a pipeline."""


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
