"""Pipeline schedules as plain data: for each rank, the list of its actions in order. An engine executes the lists;
predictions simulate them.

With n ranks, stage s lies on rank s mod n. With one stage per rank, stage s therefore lies on rank s.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "breadth_first"]
"""Names of schedules. gpipe: all forwards, then all backwards (arXiv 1811.06965). 1f1b: each backward as early as
possible (arXiv 2006.09503). interleaved: 1f1b with several stages per rank (arXiv 2104.04473). breadth_first: one stage
computes all micro-batches before the next stage of the rank begins (arXiv 2211.05953). On a single rank, breadth_first
is layered gradient accumulation (arXiv 2106.02679)."""

Kind = Literal[
    "forward", "backward",
    "send_states", "receive_states", "send_gradients", "receive_gradients",
    "gather", "release", "reduce",
]  # fmt: skip
"""Kinds of actions. States are the results (activations) of a stage's forward, which go to the next stage. Gradients
are the results of its backward, which go to the previous stage. gather makes the weights of a stage whole on its
rank; release frees the whole weights again. reduce sums the stage's gradients over data-parallel copies and keeps the
rank's partition."""

NO_MICRO_BATCH = -1


class Action(NamedTuple):
    """One action (of a `kind` such as forward, send or gather) that a rank executes for one of its stages."""

    kind: Kind
    stage: int
    micro_batch: int = NO_MICRO_BATCH  # index within the step

    @property
    def computes(self) -> bool:
        return self.kind in ("forward", "backward")


Order = tuple[Action, ...]
"""Actions of one rank in execution order."""


class PipelineSize(NamedTuple):
    """Size of a pipeline: ranks, stages per rank, and micro-batches per step."""

    ranks: int
    stages_per_rank: int
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank has, in the order of the forward pass."""
        return range(rank, self.stages, self.ranks)


def find_obstacle(name: ScheduleName, size: PipelineSize) -> tuple[str, str] | None:
    """Return the reason why a schedule does not exist for this pipeline size, and the remedy; None if it exists."""
    ranks, stages, micro_batches = size
    if name in ("gpipe", "1f1b") and stages > 1:
        return (
            f"this schedule supports one stage per rank, but there are {stages}",
            "choose breadth_first, or interleaved",
        )
    if name == "interleaved" and stages == 1:
        return "this schedule needs several stages per rank", "choose 1f1b, or set parallel.stages_per_rank=2 or more"
    if name == "interleaved" and micro_batches % ranks:
        rule = f"this schedule processes {ranks} micro-batches at a time, but there are {micro_batches}"
        return rule, f"set batch.accumulation to a multiple of {ranks}, or choose breadth_first"
    return None


def build_schedule(name: ScheduleName, size: PipelineSize) -> tuple[Order, ...]:
    """Return the passes, sends and receives of each rank. Raise ValueError if the schedule does not exist for this
    size."""
    return add_transfers(build_computation(name, size), size)


def build_computation(name: ScheduleName, size: PipelineSize) -> tuple[Order, ...]:
    """Return the forward and backward passes of each rank. Raise ValueError if the schedule does not exist for this
    size."""
    if obstacle := find_obstacle(name, size):
        raise ValueError(f"{name}: {'; '.join(obstacle)}")
    return tuple(_BUILDERS[name](size, rank) for rank in range(size.ranks))


def _build_gpipe(size: PipelineSize, rank: int) -> Order:
    each = range(size.micro_batches)
    return (*(Action("forward", rank, micro) for micro in each), *(Action("backward", rank, micro) for micro in each))


def _build_breadth_first(size: PipelineSize, rank: int) -> Order:
    """Return the passes of a rank. Backward takes stages and micro-batches in reverse order, so that the newest
    activations are used and freed first."""
    stages, each = size.stages_of(rank), range(size.micro_batches)
    forwards = (Action("forward", stage, micro) for stage in stages for micro in each)
    backwards = (Action("backward", stage, micro) for stage in reversed(stages) for micro in reversed(each))
    return (*forwards, *backwards)


def _build_one_forward_one_backward(size: PipelineSize, rank: int) -> Order:
    """Return the passes of a rank: some forwards, then forwards and backwards in turn, then the remaining backwards. A
    rank with more ranks after it begins with more forwards, because its first gradient arrives later."""
    ranks, chunks, micro_batches = size
    total, following = micro_batches * chunks, ranks - rank - 1  # ranks after this one

    def locate(count: int, *, forward: bool) -> tuple[int, int]:
        """Return the stage and the micro-batch of the rank's pass number `count`. Every `ranks` micro-batches form a
        group. The rank runs one group through all of its stages, and then starts the next group."""
        if chunks == 1:
            return rank, count
        group, place = divmod(count, ranks * chunks)
        chunk = place // ranks if forward else chunks - 1 - place // ranks
        return rank + chunk * ranks, group * ranks + count % ranks

    # As in Megatron-LM: one forward for each later rank. With several stages: two for each later rank, and one group
    # for each further stage.
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
    """Return the pass of a neighbouring stage whose result this pass needs. Return None if it needs none."""
    if action.kind == "forward" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "backward" and action.stage < size.stages - 1:
        return action._replace(stage=action.stage + 1)
    return None


def find_target(action: Action, size: PipelineSize) -> int | None:
    """Return the stage that uses the result of a pass. Return None if no stage does."""
    stage = action.stage + (1 if action.kind == "forward" else -1)
    return stage if 0 <= stage < size.stages else None


def add_transfers(computation: Sequence[Order], size: PipelineSize) -> tuple[Order, ...]:
    """Return the passes of each rank in `computation` with sends and receives added. Each send follows the pass whose
    result it sends. The receives are placed under the assumption that all passes take equally long. Under this
    assumption, one rank reaches the send at the same time as the other rank reaches the receive.

    The actions of all ranks follow one global order. Two transfers between the same ranks therefore have the same order
    on both ranks. So there is no deadlock, even if a send and its receive block until both have started.
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
        # all passes that are ready come before their transfers, so a rank receives after its own concurrent pass
        for action in ready:
            places[size.rank_of(action.stage)] += 1
            lists[size.rank_of(action.stage)].append(action)
        for action in ready:
            _append_transfer(lists, action, size)
        done.update(ready)
    return tuple(tuple(order) for order in lists)


def _append_transfer(lists: list[list[Action]], action: Action, size: PipelineSize) -> None:
    """Append the send and the receive of a pass's result if its target stage is on another rank."""
    target = find_target(action, size)
    sender = size.rank_of(action.stage)
    if target is None or (receiver := size.rank_of(target)) == sender:
        return
    forward = action.kind == "forward"
    lists[sender].append(action._replace(kind="send_states" if forward else "send_gradients"))
    lists[receiver].append(Action("receive_states" if forward else "receive_gradients", target, action.micro_batch))


def add_gathers(order: Order, ahead: int = 1) -> Order:
    """Return the actions of a rank (`order`) with the gathers, releases and reductions of its stages added.

    The weights of a stage are whole while the stage computes. Meanwhile, the weights of the `ahead` stages that compute
    next are gathered. If the weights of one of these stages are already whole, they are kept and not gathered again.
    All weights are released at the end of the step. The gradients of a stage are reduced after its last backward.
    """
    # one entry for all consecutive passes of a stage, so that long schedules stay fast
    stages = [stage for stage, _ in itertools.groupby(action.stage for action in order if action.computes)]
    last = {action.stage: action for action in order if action.kind == "backward"}
    result, whole, place = list[Action](), list[int](), 0
    for action in order:
        if action.computes:
            place += action.stage != stages[place]
            coming = _list_next_stages(stages, place, ahead)
            # releases come first, so that the memory of a finished stage is free for the next gather
            result += [Action("release", stage) for stage in whole if stage not in coming]
            result += [Action("gather", stage) for stage in coming if stage not in whole]
            whole = coming
        result.append(action)
        # reduced at once, so that the stage's whole gradients are freed before the next stage allocates its own
        if action == last.get(action.stage):
            result.append(Action("reduce", action.stage))
    return (*result, *(Action("release", stage) for stage in whole))


def _list_next_stages(stages: Sequence[int], place: int, ahead: int) -> list[int]:
    """Return different stages in the order in which they compute: the stage at position `place` of `stages`, and the
    stages that compute after it. `ahead` is the number of these later stages."""
    coming: dict[int, None] = {}
    for stage in stages[place:]:
        coming[stage] = None
        if len(coming) > ahead:
            break
    return list(coming)
