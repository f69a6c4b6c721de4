"""Schedules of a pipeline as values: the actions of each rank in order. An engine runs them, a prediction simulates
them.

Stages are placed in a loop, stage s on rank s mod ranks; with one stage on each rank that is the plain placement. A
schedule is one list of actions for each rank.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "breadth_first"]
"""gpipe: all forwards, then all backwards (arXiv 1811.06965). 1f1b: backwards as early as possible (2006.09503).
interleaved: the same with several stages on a rank (2104.04473). breadth_first: each stage takes all micro-batches
before the rank's next one begins (2211.05953); on one rank that is layered gradient accumulation (2106.02679)."""

Kind = Literal[
    "forward", "backward",
    "send_states", "receive_states", "send_gradients", "receive_gradients",
    "gather", "release", "reduce",
]  # fmt: skip
"""states: results of a stage's forward for the next stage; gradients: results of its backward for the previous one.
gather, release: a stage's weights are made whole on its rank, and divided again. reduce: its gradients are summed over
copies, and divided."""

NO_MICRO_BATCH = -1


class Action(NamedTuple):
    """One action of a rank for one of its stages."""

    kind: Kind
    stage: int
    micro_batch: int = NO_MICRO_BATCH  # number within the step

    @property
    def computes(self) -> bool:
        return self.kind in ("forward", "backward")


Order = tuple[Action, ...]
"""Actions of one rank, in their order."""


class PipelineSize(NamedTuple):
    """A pipeline and its micro-batches in one step."""

    ranks: int
    stages_per_rank: int
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank, in the order of forward."""
        return range(rank, self.stages, self.ranks)


def find_obstacle(name: ScheduleName, size: PipelineSize) -> tuple[str, str] | None:
    """Return the reason why a schedule does not exist in this size, and the remedy; None if it exists."""
    ranks, stages, micro_batches = size
    if name in ("gpipe", "1f1b") and stages > 1:
        return f"it has one stage on a rank, and there are {stages}", "choose breadth_first, or interleaved"
    if name == "interleaved" and stages == 1:
        return "it has several stages on a rank, and there is one", "choose 1f1b, or raise parallel.stages_per_rank"
    if name == "interleaved" and micro_batches % ranks:
        rule = f"it takes micro-batches {ranks} at a time, and there are {micro_batches}"
        return rule, f"choose a multiple of {ranks} as batch.accumulation, or breadth_first"
    return None


def build_schedule(name: ScheduleName, size: PipelineSize) -> tuple[Order, ...]:
    """Return every rank's passes, sends and receives; ValueError for a schedule that does not exist."""
    return add_transfers(build_computation(name, size), size)


def build_computation(name: ScheduleName, size: PipelineSize) -> tuple[Order, ...]:
    """Return the forwards and backwards of every rank; ValueError for a schedule that does not exist."""
    if obstacle := find_obstacle(name, size):
        raise ValueError(f"{name}: {'; '.join(obstacle)}")
    return tuple(_BUILDERS[name](size, rank) for rank in range(size.ranks))


def _build_gpipe(size: PipelineSize, rank: int) -> Order:
    each = range(size.micro_batches)
    return (*(Action("forward", rank, micro) for micro in each), *(Action("backward", rank, micro) for micro in each))


def _build_breadth_first(size: PipelineSize, rank: int) -> Order:
    """Backward takes stages and micro-batches from the last one: the newest activations are used and freed first."""
    stages, each = size.stages_of(rank), range(size.micro_batches)
    forwards = (Action("forward", stage, micro) for stage in stages for micro in each)
    backwards = (Action("backward", stage, micro) for stage in reversed(stages) for micro in reversed(each))
    return (*forwards, *backwards)


def _build_one_forward_one_backward(size: PipelineSize, rank: int) -> Order:
    """Begin with just enough forwards for the first backward to have its gradient in time; then alternate the two."""
    ranks, chunks, micro_batches = size
    total, following = micro_batches * chunks, ranks - rank - 1  # ranks after this one

    def locate(count: int, *, forward: bool) -> tuple[int, int]:
        """Return stage and micro-batch of a rank's pass number `count`. Micro-batches come in groups, one for each
        rank, and each group goes through all of the rank's stages before the next group."""
        if chunks == 1:
            return rank, count
        group, place = divmod(count, ranks * chunks)
        chunk = place // ranks if forward else chunks - 1 - place // ranks
        return rank + chunk * ranks, group * ranks + count % ranks

    forwards = [Action("forward", *locate(count, forward=True)) for count in range(total)]
    backwards = [Action("backward", *locate(count, forward=False)) for count in range(total)]
    first = min(total, following if chunks == 1 else 2 * following + (chunks - 1) * ranks)
    alternating = (action for pair in zip(forwards[first:], backwards, strict=False) for action in pair)
    return (*forwards[:first], *alternating, *backwards[total - first :])


_BUILDERS: dict[ScheduleName, Callable[[PipelineSize, int], Order]] = {
    "gpipe": _build_gpipe,
    "1f1b": _build_one_forward_one_backward,
    "interleaved": _build_one_forward_one_backward,
    "breadth_first": _build_breadth_first,
}


def find_source(action: Action, size: PipelineSize) -> Action | None:
    """Return the pass of a neighbouring stage whose result a pass uses; None if it needs no other pass."""
    if action.kind == "forward" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "backward" and action.stage < size.stages - 1:
        return action._replace(stage=action.stage + 1)
    return None


def find_target(action: Action, size: PipelineSize) -> int | None:
    """Return the stage that uses the result of a pass; None if no stage does."""
    stage = action.stage + (1 if action.kind == "forward" else -1)
    return stage if 0 <= stage < size.stages else None


def add_transfers(computation: Sequence[Order], size: PipelineSize) -> tuple[Order, ...]:
    """Return the computation with its sends and receives. A send follows its pass; the receive stands at the same
    moment in the receiver's list, if every pass takes equally long.

    All lists follow one order of all actions, so two transfers come in the same order on both of their ranks: there is
    no deadlock, even where both ends of a transfer wait for each other.
    """
    lists: list[list[Action]] = [[] for _ in range(size.ranks)]
    places, done = [0] * size.ranks, set[Action | None]([None])
    while any(place < len(order) for place, order in zip(places, computation, strict=True)):
        ready = [
            order[place]
            for place, order in zip(places, computation, strict=True)
            if place < len(order) and find_source(order[place], size) in done
        ]
        if not ready:
            raise ValueError("no rank can go on: each waits for a pass that comes after its own next pass")
        # all passes of this moment before all transfers: a rank receives after the pass that it makes meanwhile
        for action in ready:
            places[size.rank_of(action.stage)] += 1
            lists[size.rank_of(action.stage)].append(action)
        for action in ready:
            _append_transfer(lists, action, size)
        done.update(ready)
    return tuple(tuple(order) for order in lists)


def _append_transfer(lists: list[list[Action]], action: Action, size: PipelineSize) -> None:
    """Append the transfer of a pass's result to its target, if that is on another rank."""
    target = find_target(action, size)
    sender = size.rank_of(action.stage)
    if target is None or (receiver := size.rank_of(target)) == sender:
        return
    forward = action.kind == "forward"
    lists[sender].append(action._replace(kind="send_states" if forward else "send_gradients"))
    lists[receiver].append(Action("receive_states" if forward else "receive_gradients", target, action.micro_batch))


def add_gathers(order: Order, ahead: int = 1) -> Order:
    """Return a rank's actions with those on the weights of its stages.

    A stage's weights are whole while it computes, and those of the `ahead` stages that compute next are on their way.
    A stage that comes next stays whole; all are released at the end. Gradients are reduced after a stage's last
    backward.
    """
    stages = [action.stage for action in order if action.computes]
    last = {action.stage: action for action in order if action.kind == "backward"}
    result, whole, place = list[Action](), list[int](), 0
    for action in order:
        if action.computes:
            coming = _list_next_stages(stages, place, ahead)
            # releases first, so that the memory of a finished stage is free for the next gather
            result += [Action("release", stage) for stage in whole if stage not in coming]
            result += [Action("gather", stage) for stage in coming if stage not in whole]
            whole, place = coming, place + 1
        result.append(action)
        if action == last.get(action.stage):
            result.append(Action("reduce", action.stage))
    return (*result, *(Action("release", stage) for stage in whole))


def _list_next_stages(stages: Sequence[int], place: int, ahead: int) -> list[int]:
    """Return the stage that computes at `place`, and the next different ones, in their order."""
    coming: dict[int, None] = {}
    for stage in stages[place:]:
        coming[stage] = None
        if len(coming) > ahead:
            break
    return list(coming)
