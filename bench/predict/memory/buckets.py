"""What stands beside activations while forward and backward run: gradients under way, their buckets, gathered layers.

Formulas follow DeepSpeed 0.19.8: setup_buckets, reduce_independent_p_g_buckets_and_remove_grads, average_tensor,
allreduce_bucket and copy_grads_in_partition of runtime/zero/stage_1_and_2.py; reduce_scatter_coalesced of runtime/comm.
What stage 3 gathers and reduces is replayed (bench.predict.memory.gathering). Arrays have one value per segment, in the
order of forward.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.engine_costs import ModelSizes
from bench.engines.deepspeed.costs.gathering import Limits, Walk, replay
from bench.predict.memory.engines import EVERYWHERE, Engine
from bench.predict.memory.states import bucket
from bench.stacks import padded

Array = NDArray[np.int64]

STAGE_0_BUCKET = 500_000_000
"""Elements that DeepSpeed's stage 0 reduces at a time, whatever its options say."""


class Beside(NamedTuple):
    """Bytes beside the activations, per segment, in one pass."""

    gradients: Array
    buckets: Array
    gathered: Array


class Backward(NamedTuple):
    """What of a segment its backward depends on; fields as of a `Segment`, one value per segment."""

    working: Array
    standing: Array
    parameters: Array
    largest: Array


class Most(NamedTuple):
    """What lives at that stop of each segment where most does, in elements of one rank."""

    fresh: Array  # gradients beside the bucket
    copies: Array  # what reducing the bucket takes
    whole: Array  # weights


def forward(e: Engine, parameters: Array, most: Most | None) -> Beside:
    """Return what lives during the forward pass of the last micro-step; `most` is stage 3's."""
    if most:
        return _partitioned(e, most)
    none = np.zeros_like(parameters)
    return Beside(none + _kept_gradients(e), none, none)


def backward(e: Engine, work: Backward, most: Most | None) -> Beside:
    """Return what lives during each segment's backward, its own gradients included."""
    if most:
        return _partitioned(e, most)
    none = np.zeros_like(work.parameters)
    fresh = e.width * np.minimum(work.largest, e.largest)
    done = np.cumsum(work.parameters[::-1])[::-1]  # from the end up to and with this segment
    if e.stage == EVERYWHERE:
        return Beside(fresh if e.view else fresh + e.width * done, none, none)
    if e.stage == 0:
        gradients = np.full_like(done, e.width * e.elements) if e.accumulating else e.width * done
        return Beside(np.maximum(gradients, fresh), none, none)
    return _replicated(e, work, done, fresh)


def after_backward(e: Engine) -> int:
    """Return the bytes of gradients that backward leaves for the update, beside those that always live."""
    if e.offloads or e.stage in (EVERYWHERE, 3):
        return 0
    return e.width * (e.elements if e.stage == 0 else averaged(e))


def reduction(e: Engine) -> int:
    """Return the bytes that stage 0's all-reduce after backward takes beside the gradients."""
    return e.width * min(e.elements, STAGE_0_BUCKET) if e.stage == 0 else 0


def averaged(e: Engine) -> int:
    """Return the elements of gradients that stages 1 and 2 keep on the rank that keeps most: a tensor that reaches into
    its part counts whole. Embedding and head, first and last of all, are the tensors that matter."""
    return int(_kept_whole(e, np.array(e.largest)))


def _kept_whole(e: Engine, largest: Array) -> Array:
    reached = largest + e.part - 1 - (largest - 1) % e.part
    kept: Array = np.maximum(e.part, reached * (e.ranks > 1))
    return kept


def _kept_gradients(e: Engine) -> int:
    """Bytes of gradients that earlier micro-steps leave."""
    if not e.accumulating or e.stage == EVERYWHERE:
        return 0
    return e.width * (e.elements if e.stage < 2 else averaged(e) * (not e.offloads))


def _flushes(e: Engine, done: Array, parameters: Array, oversize: Array) -> NDArray[np.bool_]:
    """Whether a full bucket is reduced during a segment's backward. A gradient larger than the bucket stays by itself
    until the next one comes: it is reduced in the segment that backward reaches next."""
    assert e.options is not None
    size = e.options.reduce_bucket_size or 1
    full: NDArray[np.bool_] = (done // size > (done - parameters) // size) & (oversize == 0)
    full[:-1] |= oversize[1:] > 0
    return full


def _oversize(e: Engine, fresh: Array) -> Array:
    """Bytes of gradients that are larger than the bucket."""
    assert e.options is not None
    return np.where(fresh > e.width * (e.options.reduce_bucket_size or 0), fresh, 0)


def _replicated(e: Engine, work: Backward, done: Array, fresh: Array) -> Beside:
    """Stages 1 and 2: buckets from the first gradient on, this rank's averaged ones from the first full bucket on. One
    is reduced between two operations, when their working memory is free; the first before room is made for this
    rank's."""
    assert e.options is not None
    oversize = _oversize(e, fresh)
    waiting = np.append(oversize[1:], 0)  # until it is reduced, in the segment after its own
    flushes = _flushes(e, done, work.parameters, oversize)
    begun = np.cumsum(flushes[::-1])[::-1] > 0
    own = _own(e, done, fresh)
    kept = _kept_gradients(e) if e.accumulating else 0  # stage 1's lie whole in their parameters until they are reduced
    buckets = (2 if e.options.overlap_comm else 1) * bucket(e) * (done > 0)
    free = work.working - work.standing + own * (begun & ~np.append(begun[1:], False))
    copied = np.maximum(e.width * _flattened(e, done, flushes) - free, 0)
    return Beside(own * begun + fresh + waiting + kept, buckets + copied, np.zeros_like(done))


def _own(e: Engine, done: Array, fresh: Array) -> Array:
    """Bytes of this rank's averaged gradients: room for all of them at once. The embedding, first of all tensors,
    shares a rank with the tensors next to it."""
    largest = np.maximum.accumulate(fresh[::-1])[::-1] // e.width  # so far
    largest = np.where(e.elements - done < -(-e.largest // e.part) * e.part, e.largest, largest)
    return e.width * _kept_whole(e, largest) * (not e.offloads)


def _flattened(e: Engine, done: Array, flushes: NDArray[np.bool_]) -> Array:
    """Elements of a full bucket that are copied before they are reduced: all, where they belong to several ranks."""
    assert e.options is not None
    content = np.minimum(done, e.options.reduce_bucket_size or 0)
    first = e.elements - done
    several = first // e.part != (first + content - 1) // e.part
    return np.where(flushes & several, content, 0)


def _partitioned(e: Engine, most: Most) -> Beside:
    """Stage 3: beside what its replay tells, one bucket always."""
    return Beside(e.width * most.fresh, e.width * most.copies + bucket(e), e.width * most.whole)


@functools.lru_cache(maxsize=1024)  # points of a sweep share it
def replayed(model: ModelSizes, limits: Limits, ranks: int, gloo: bool) -> tuple[Most, Most]:
    """Return what lives in each segment's forward and backward on one of `ranks`; `gloo` packs for itself what it
    reduces."""
    sizes = [size.elements for size in model.tensors]
    first, second = (
        _most(walk, np.array(sizes), np.array([padded(elements, ranks) for elements in sizes]), ranks > 1, gloo)
        for walk in replay(model, limits)
    )
    return first, second


def _most(walk: Walk, sizes: Array, padded_sizes: Array, gathers: bool, gloo: bool) -> Most:
    """A bucket's gradients are packed by rank before they are reduced, unless it is a single one that needs no padding.
    The padding lives by itself, too."""
    whole = (walk.exact + walk.padded @ padded_sizes) * gathers
    plain, packed = walk.reduced @ sizes, walk.reduced @ padded_sizes
    in_place = (walk.reduced.sum(axis=1) == 1) & (plain == packed)
    copies = np.where(in_place, 0, 2 * packed - plain) + packed * gloo
    stops = np.stack([walk.fresh, copies, whole])
    largest = np.zeros((3, walk.segment.max() + 1), np.int64)
    order = np.argsort(stops.sum(axis=0), kind="stable")
    largest[:, walk.segment[order]] = stops[:, order]  # of several stops in a segment the last, which is the largest
    return Most(*largest)
