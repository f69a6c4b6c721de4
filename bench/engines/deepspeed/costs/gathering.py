"""Replay (simulation) of a step of ZeRO stage 3, module by module: the weights that DeepSpeed's coordinator gathers and
releases, and the gradients that are reduced.

In its first steps, DeepSpeed 0.19.8 records the order in which modules run (its trace). The replay follows a later
step. Sources: _fetch_sub_module_impl, __params_to_release and __release_param of
runtime/zero/partitioned_param_coordinator.py, AllGatherCoalescedHandle of partition_parameters.py,
reduce_independent_p_g_buckets_and_remove_grads of stage3.py.

The number of ranks changes only the padding of tensors, not the coordinator's decisions. One replay therefore serves
all configurations of a sweep that have the same model and the same options (`GatheringLimits`).
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.core.engine_costs import Array, ModelSizes
from bench.core.network import EqualTensors, WeightModule


class GatheringLimits(NamedTuple):
    """DeepSpeed's options that decide when weights are gathered and released, and when gradients are reduced. Sizes are
    numbers of elements."""

    prefetch: int  # stage3_prefetch_bucket_size
    live: int  # stage3_max_live_parameters
    reuse: int  # stage3_max_reuse_distance
    persistence: int  # stage3_param_persistence_threshold
    bucket: int  # reduce_bucket_size
    contiguous: bool  # contiguous_gradients
    checkpointing: bool  # activation checkpointing, an option of the spec


class PassReplay(NamedTuple):
    """Simulated forward or backward pass: the weights and gradients in memory at each stop, one row per stop. A stop is
    the execution of one module.

    Some fields are numbers of elements. The other fields are numbers of tensors, with one column for each tensor size
    (each entry of the model's `all_tensors`). They count tensors instead of elements because padding depends on the
    number of ranks, which the simulation does not know.
    """

    segment: Array  # (stops,)
    exact: Array  # (stops,): elements of weights without padding, which were copied out of a flat tensor
    padded: Array  # (stops, sizes): number of padded weights, gathered alone or in flat tensors
    fresh: Array  # (stops,): elements of gradients outside the bucket
    reduced: Array  # (stops, sizes): number of gradients in the bucket that is reduced at this stop
    gathers: int  # calls in the whole pass
    gathered: int  # elements gathered in the whole pass


class WeightFetch(NamedTuple):
    """A stop: the execution of one module in a simulated step. If the module has a weight, the weight is gathered for
    this execution. The execution is part of forward, of the recomputation of a checkpointed block, or of backward."""

    module: WeightModule
    releases: bool  # its weight may be released afterwards
    completes: bool  # the weight's gradient is complete afterwards


@functools.lru_cache(maxsize=256)
def replay(model: ModelSizes, limits: GatheringLimits) -> tuple[PassReplay, PassReplay]:
    """Simulate a step of ZeRO stage 3. Return the weights and gradients in memory while each module runs, first for the
    forward pass and then for the backward pass."""
    modules, sizes = model.modules, model.all_tensors
    # the first module only marks where the embedding's gradient is complete: forward enters the embedding in its stack
    forward = [WeightFetch(module, True, False) for module in modules[1:]]
    stops = [*forward, *_list_backward(modules, limits.checkpointing)]
    weights, bucket = WeightCoordinator(stops, sizes, limits), Bucket(sizes, limits)
    rows, done = [], [(0, 0)]
    for number, stop in enumerate(stops, 1):
        weights.fetch()
        gathered = weights.exact, *weights.padded
        fresh, reduced = bucket.add(stop.module.size) if stop.completes else (bucket.waiting, bucket.nothing)
        rows.append((stop.module.segment, *gathered, fresh, *reduced))
        weights.release(stop.releases)
        if number in (len(forward), len(stops)):
            done.append((weights.gathers, weights.gathered))
    # the last bucket, reduced after the last stop
    rows.append((stops[-1].module.segment, *gathered, bucket.waiting, *bucket.content))
    passes = []
    for part, before, after in zip((rows[: len(forward)], rows[len(forward) :]), done, done[1:], strict=False):
        columns = np.split(np.array(part, np.int64), [1, 2, 2 + len(sizes), 3 + len(sizes)], axis=1)
        segment, exact, padded, outside, full = columns
        gathers, elements = after[0] - before[0], after[1] - before[1]
        passes.append(PassReplay(segment[:, 0], exact[:, 0], padded, outside[:, 0], full, gathers, elements))
    return passes[0], passes[1]


def _list_backward(modules: Sequence[WeightModule], checkpointing: bool) -> Iterator[WeightFetch]:
    """Yield the executions of modules in a backward pass, in order. The backward of a checkpointed block begins with a
    gather of the weight of the block's last module. Then only the other modules of the block are executed again, to
    recompute their activations. The backward of each module follows."""
    for block, members in itertools.groupby(reversed(modules), key=lambda module: module.block):
        backward = list(members)
        again: list[WeightModule] = []
        if checkpointing and block is not None:
            begin = end = next(number for number, module in enumerate(backward) if module.weight is not None)
            while backward[end].joined:  # a bias comes before its matrix in this order
                end += 1
            yield from (WeightFetch(module, False, False) for module in backward[: end + 1])
            again = backward[:end:-1]
            backward = backward[begin:]
        yield from (WeightFetch(module, True, False) for module in again)
        # the input of an embedding gets no gradient, so no hook tells DeepSpeed that the embedding's backward is over
        for module in backward:
            yield WeightFetch(module, not module.indexed, module.completes and module.weight is not None)


class WeightCoordinator:
    """State of DeepSpeed's coordinator in the simulation: weights that are gathered, weights whose gather has started,
    and the order in which modules use weights."""

    def __init__(self, stops: Sequence[WeightFetch], sizes: Sequence[EqualTensors], limits: GatheringLimits) -> None:
        self.exact, self.padded = 0, [0] * len(sizes)
        self.gathers, self.gathered = 0, 0
        self._limits, self._step, self._available = limits, 0, 0
        self._size = {stop.module.weight: stop.module.size for stop in stops if stop.module.weight is not None}
        self._elements = {weight: sizes[size].elements for weight, size in self._size.items()}
        self._order = [stop.module.weight for stop in stops]
        self._queue = iter([(step, weight) for step, weight in enumerate(self._order) if weight is not None])
        self._persistent = {w for w, elements in self._elements.items() if elements <= limits.persistence}
        self._whole = set(self._persistent)
        self._packs: dict[int, _Pack] = {}  # by weight, until its first use: the flat tensor of its gather
        self._alone: set[int] = set()  # whole weights that stay in the padded tensor into which they were gathered
        self._last_fetched_for = dict.fromkeys(self._elements, -1)
        # elements of all stops before each stop, and the step that uses the weight of each stop next
        sums = itertools.accumulate((0 if w is None else self._elements[w] for w in self._order), initial=0)
        self._passed, following = list(sums), list[int | None]()
        seen: dict[int | None, int] = {}
        for step in reversed(range(len(self._order))):
            following.append(seen.get(self._order[step]))
            seen[self._order[step]] = step
        self._next_use = following[::-1]

    def fetch(self) -> None:
        """Gather the weight of the module that runs next. Then prefetch the weights of later modules as far as the
        limits allow."""
        weight = self._order[self._step]
        if weight is not None:
            if weight not in self._whole and weight not in self._packs:
                self._gather([weight])
            self._wait(weight)
            if self._last_fetched_for[weight] < self._step:
                self._take()
        # prefetching: the queue has all further uses; weights that are whole or being gathered are skipped
        ahead: list[int] = []
        elements, room = 0, min(self._limits.live - self._available, self._limits.prefetch)
        while elements < room and (taken := self._take()) is not None:
            if taken not in self._whole and taken not in self._packs and taken not in ahead:
                ahead.append(taken)
                elements += self._elements[taken]
        self._gather(ahead)

    def _take(self) -> int | None:
        step, weight = next(self._queue, (0, None))
        if weight is not None:
            self._last_fetched_for[weight] = max(self._last_fetched_for[weight], step)
        return weight

    def _gather(self, weights: list[int]) -> None:
        self.gathers += bool(weights)
        pack = _Pack(tuple(weights), set(weights))
        for weight in weights:
            self._packs[weight] = pack
            self.gathered += self._elements[weight]
            self._available += self._elements[weight]
            self.padded[self._size[weight]] += 1

    def _wait(self, weight: int) -> None:
        """Copy all weights out of the flat tensor into which `weight` was gathered, unless this has already been done.
        The flat tensor is freed after all its weights have been used. A weight that was gathered alone has no flat
        tensor, so it is not copied."""
        pack = self._packs.pop(weight, None)
        if pack is None:
            return
        if len(pack.members) == 1:
            self._whole.add(weight)
            self._alone.add(weight)
            return
        # the first use unpacks all members; the flat tensor stays until the last of them is used
        if len(pack.left) == len(pack.members):
            self._whole.update(pack.members)
            self.exact += sum(self._elements[member] for member in pack.members)
        pack.left.remove(weight)
        if not pack.left:
            for member in pack.members:
                self.padded[self._size[member]] -= 1

    def release(self, allowed: bool) -> None:
        """Advance to the next module. If `allowed` is true (`WeightFetch.releases`), release the weight of the module
        that has just run, unless this weight is used again soon."""
        weight, step = self._order[self._step], self._step + 1
        again = self._next_use[self._step]
        self._step = step
        # persistent weights are never released, nor weights that a later fetch has already relied on
        if not allowed or weight is None or weight in self._persistent or self._last_fetched_for[weight] > step:
            return
        if again is not None and self._passed[again] - self._passed[step] < self._limits.reuse:
            return
        self._whole.remove(weight)
        self._available -= self._elements[weight]
        if weight in self._alone:
            self._alone.remove(weight)
            self.padded[self._size[weight]] -= 1
        else:
            self.exact -= self._elements[weight]


class _Pack(NamedTuple):
    members: tuple[int, ...]
    left: set[int]  # weights that are not used yet


class Bucket:
    """Bucket of gradients that wait for their reduction."""

    def __init__(self, sizes: Sequence[EqualTensors], limits: GatheringLimits) -> None:
        self.nothing = (0,) * len(sizes)
        self.content, self.waiting = self.nothing, 0
        self._sizes, self._limits, self._elements = sizes, limits, 0

    def add(self, size_index: int) -> tuple[int, tuple[int, ...]]:
        """Add a gradient, given by the index of its tensor size. If the bucket has no room, reduce its content first.

        A gradient larger than the bucket waits outside the bucket until the next gradient is added. Without
        contiguous_gradients, every gradient waits outside. Return two values. The first is the number of elements of
        the added gradient and of the gradients that wait outside. The second is the number of gradients of each tensor
        size that this call reduces.
        """
        elements = self._sizes[size_index].elements
        fresh, reduced = elements + self.waiting, self.nothing
        if self._elements and self._elements + elements > self._limits.bucket:
            reduced, self.content, self.waiting, self._elements = self.content, self.nothing, 0, 0
        if not self._limits.contiguous or self._elements + elements > self._limits.bucket:
            self.waiting += elements
        self._elements += elements
        self.content = tuple(count + (size_index == number) for number, count in enumerate(self.content))
        return fresh, reduced
