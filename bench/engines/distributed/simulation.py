"""Simulation of a pipeline schedule. The results are the end time of each pass, and the data that a rank holds during
each of the rank's actions.

Four kinds of data are counted: inputs that passes keep for their backward, activations and gradients that wait to be
used or sent, whole weights of stages, and whole gradients of stages. Lifetimes are as in the module `executor`: an
input lives until the backward of its pass, and a result until it is sent.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from bench.core.engine_costs import Counts, Hop, StageMoment
from bench.engines.distributed.schedule import Action, Order, PipelineSize, find_source, find_target

SENDS_PER_RANK = 2
"""Limit of unfinished sends on a rank, as a multiple of the number of ranks of its pipeline."""


class LinkedPass(NamedTuple):
    """A pass, and the pass whose result it needs."""

    action: Action
    rank: int
    source: int | None  # index in the list of the pass whose result is needed; None: no pass


def link_passes(schedule: Sequence[Order], size: PipelineSize) -> tuple[LinkedPass, ...]:
    """Return all passes of a schedule, each after the pass whose result it needs. Raise ValueError if the schedule has
    a deadlock."""
    places: dict[Action, int] = {}
    passes = list[LinkedPass]()
    waiting = [[action for action in order if action.computes][::-1] for order in schedule]
    # each rank in turn advances as far as it can, so a pass is always appended after its source
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


def simulate_passes(
    passes: Sequence[LinkedPass], size: PipelineSize, forward_s: Sequence[float], backward_s: Sequence[float], hop: Hop
) -> list[float]:
    """Return the end time of each of `passes` in seconds. `forward_s` and `backward_s` have the seconds that each stage
    takes for one micro-batch. `hop` returns the seconds of a transfer between two ranks."""
    ends_s, free_s, ranks = list[float](), [0.0] * size.ranks, size.ranks
    # states come from the previous rank, gradients from the next one; a stage's neighbours may be on its own rank
    coming_s = [hop((rank - 1) % ranks, rank) if ranks > 1 else 0.0 for rank in range(ranks)]
    returning_s = [hop((rank + 1) % ranks, rank) if ranks > 1 else 0.0 for rank in range(ranks)]
    for (kind, stage, _), rank, source in passes:
        forward, begin_s = kind == "forward", free_s[rank]
        if source is not None:
            begin_s = max(begin_s, ends_s[source] + (coming_s if forward else returning_s)[rank])
        free_s[rank] = begin_s + (forward_s if forward else backward_s)[stage]
        ends_s.append(free_s[rank])
    return ends_s


def list_moments(order: Order, size: PipelineSize, rank: int) -> tuple[StageMoment, ...]:
    """Return the passes and reductions during which a rank's memory can be at its peak, each with the data that the
    rank then holds. A pass or reduction is left out if the rank holds at least as much data of every kind during
    another action of the same stage and kind."""
    found: dict[tuple[str, int], list[tuple[Counts, StageMoment]]] = {}
    counted = {
        one: (*one.kept, one.waiting, one.gradients, one.leaving, *one.whole, *one.unreduced, *one.reduced)
        for one in _Walk(size, rank).run(order)
    }
    # in order of decreasing sum, since a moment with a smaller sum cannot dominate one with a larger sum
    for moment, counts in sorted(counted.items(), key=lambda item: -sum(item[1])):
        rivals = found.setdefault((moment.kind, moment.stage), [])
        if not any(all(map(int.__ge__, other, counts)) for other, _ in rivals):
            rivals.append((counts, moment))
    return tuple(moment for rivals in found.values() for _, moment in rivals)


class _Walk:
    """Walk through the actions of one rank. It counts the data of each kind that the rank holds, and updates the counts
    with each action."""

    def __init__(self, size: PipelineSize, rank: int) -> None:
        self._size, self._stages = size, size.stages_of(rank)
        self._kept, self._whole, self._unreduced, self._reduced = (dict.fromkeys(self._stages, 0) for _ in range(4))
        self._waiting, self._gradients = set[Action](), set[Action]()
        self._leaving = deque[Action]()

    def run(self, order: Order) -> Iterable[StageMoment]:
        """Yield, for each forward pass, backward pass and reduction of `order`, the amounts of data that the rank holds
        during this action."""
        for action in order:
            kind, stage, _ = action
            if kind == "forward":
                self._waiting.discard(action)
                yield self._note(kind, stage)
                self._kept[stage] += 1
                self._hand_on(action, self._waiting)
            elif kind == "backward":
                # this pass is no longer counted as kept, and the stage's whole gradients exist from now on
                self._kept[stage] -= 1
                self._unreduced[stage] = 1
                yield self._note(kind, stage)
                self._gradients.discard(action)
                self._hand_on(action, self._gradients)
            elif kind == "reduce":
                yield self._note(kind, stage)
                self._unreduced[stage], self._reduced[stage] = 0, 1
            elif kind in ("gather", "release"):
                self._whole[stage] = int(kind == "gather")
            elif kind == "receive_states":
                self._waiting.add(action._replace(kind="forward"))
            elif kind == "receive_gradients":
                self._gradients.add(action._replace(kind="backward"))
            # a send; `_hand_on` has already appended the result of its pass
            elif len(self._leaving) > SENDS_PER_RANK * self._size.ranks:
                self._leaving.popleft()

    def _hand_on(self, action: Action, own: set[Action]) -> None:
        """Count the result of a pass as data that the rank holds. If the next stage is on this rank, add the pass that
        uses the result to `own`, the passes whose input is ready. Otherwise the result waits until it is sent."""
        target = find_target(action, self._size)
        if target is not None and target in self._stages:
            own.add(action._replace(stage=target))
        elif target is not None:
            self._leaving.append(action)

    def _note(self, kind: Literal["forward", "backward", "reduce"], stage: int) -> StageMoment:
        kept, *states = (
            tuple(by_stage.values()) for by_stage in (self._kept, self._whole, self._unreduced, self._reduced)
        )
        waiting, gradients, leaving = map(len, (self._waiting, self._gradients, self._leaving))
        return StageMoment(kind, stage, kept, waiting, gradients, leaving, *states)
