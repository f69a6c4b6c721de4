"""What stands beside activations while forward and backward run: gradients under way, their buckets, gathered layers.

Formulas follow DeepSpeed 0.19.8: setup_buckets, reduce_independent_p_g_buckets_and_remove_grads, average_tensor,
allreduce_bucket and copy_grads_in_partition of runtime/zero/stage_1_and_2.py; reduce_scatter_coalesced of runtime/comm.
What stage 3 gathers and reduces is replayed (bench.engines.deepspeed.costs.gathering).
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.engine_costs import Array, BackwardWork, ModelSizes, SegmentBytes
from bench.engines.deepspeed.costs.gathering import GatheringLimits, PassReplay, replay
from bench.engines.deepspeed.costs.states import count_bucket_bytes
from bench.engines.deepspeed.costs.zero_run import STAGE_0_BUCKET, ZeroRun
from bench.stacks import pad_elements


class SegmentPeak(NamedTuple):
    """What lives at that stop of each segment where most does, in elements of one rank."""

    fresh: Array  # gradients beside the bucket
    copies: Array  # what reducing the bucket takes
    whole: Array  # weights


def predict_forward(run: ZeroRun, segments: int) -> SegmentBytes:
    """Return what lives during the forward pass of the last micro-step."""
    if run.stage == 3:
        return _predict_stage_3(run, replay_peaks(run.model, run.limits, run.ranks, run.gloo)[0])
    none = np.zeros(segments, np.int64)
    return SegmentBytes(none + _count_kept_gradients(run), none, none)


def predict_backward(run: ZeroRun, work: BackwardWork) -> SegmentBytes:
    """Return what lives during each segment's backward, its own gradients included. Stage 3's own linear never leaves a
    gradient transposed."""
    if run.stage == 3:
        return _predict_stage_3(run, replay_peaks(run.model, run.limits, run.ranks, run.gloo)[1])
    fresh = run.width * np.minimum(work.largest, run.largest)
    done = np.cumsum(work.parameters[::-1])[::-1]  # from the end up to and with this segment
    live = _predict_stage_0(run, done, fresh) if run.stage == 0 else _predict_stages_1_and_2(run, work, done, fresh)
    return live._replace(gradients=live.gradients + run.width * work.transposed)


def count_left_gradients(run: ZeroRun) -> int:
    """Return the bytes of gradients that backward leaves for the update, beside those that always live."""
    if run.optimizer_tier or run.stage == 3:
        return 0
    return run.width * (run.elements if run.stage == 0 else count_averaged(run))


def count_after_backward(run: ZeroRun) -> int:
    """Return the bytes that stage 0's all-reduce after backward takes beside the gradients."""
    return run.width * min(run.elements, STAGE_0_BUCKET) if run.stage == 0 else 0


def count_averaged(run: ZeroRun) -> int:
    """Return the elements of gradients that stages 1 and 2 keep on the rank that keeps most: a tensor that reaches into
    its part counts whole. Embedding and head, first and last of all, are the tensors that matter."""
    return int(_find_kept_whole(run, np.array(run.largest)))


def _find_kept_whole(run: ZeroRun, largest: Array) -> Array:
    reached = largest + run.part - 1 - (largest - 1) % run.part
    kept: Array = np.maximum(run.part, reached * (run.ranks > 1))
    return kept


def _count_kept_gradients(run: ZeroRun) -> int:
    """Bytes of gradients that earlier micro-steps leave."""
    if run.accumulation == 1:
        return 0
    if run.stage < 2:
        return run.width * run.elements
    return 0 if run.optimizer_tier else run.width * count_averaged(run)


def _predict_stage_0(run: ZeroRun, done: Array, fresh: Array) -> SegmentBytes:
    """Stage 0: all gradients stay until they are reduced together, after backward."""
    none = np.zeros_like(done)
    gradients = none + run.width * run.elements if run.accumulation > 1 else run.width * done
    return SegmentBytes(np.maximum(gradients, fresh), none, none)


def _predict_stages_1_and_2(run: ZeroRun, work: BackwardWork, done: Array, fresh: Array) -> SegmentBytes:
    """Stages 1 and 2: buckets from the first gradient on, this rank's averaged ones from the first full bucket on. One
    is reduced between two operations, when their working memory is free; the first before room is made for this
    rank's."""
    oversize = _find_oversize(run, fresh)
    waiting = np.append(oversize[1:], 0)  # until it is reduced, in the segment after its own
    flushes = _find_flushes(run, done, work.parameters, oversize)
    begun = np.cumsum(flushes[::-1])[::-1] > 0
    own = _find_own_averaged(run, done, fresh)
    kept = _count_kept_gradients(run)  # stage 1's lie whole in their parameters until they are reduced
    buckets = (2 if run.options.overlap_comm else 1) * count_bucket_bytes(run) * (done > 0)
    free = work.working - work.standing + own * (begun & ~np.append(begun[1:], False))
    copied = np.maximum(run.width * _find_flattened(run, done, flushes) - free, 0)
    return SegmentBytes(own * begun + fresh + waiting + kept, buckets + copied, np.zeros_like(done))


def _find_oversize(run: ZeroRun, fresh: Array) -> Array:
    """Bytes of gradients that are larger than the bucket."""
    return np.where(fresh > run.width * (run.options.reduce_bucket_size or 0), fresh, 0)


def _find_flushes(run: ZeroRun, done: Array, parameters: Array, oversize: Array) -> NDArray[np.bool_]:
    """Whether a full bucket is reduced during a segment's backward. A gradient larger than the bucket stays by itself
    until the next one comes: it is reduced in the segment that backward reaches next."""
    size = run.options.reduce_bucket_size or 1
    full: NDArray[np.bool_] = (done // size > (done - parameters) // size) & (oversize == 0)
    full[:-1] |= oversize[1:] > 0
    return full


def _find_own_averaged(run: ZeroRun, done: Array, fresh: Array) -> Array:
    """Bytes of this rank's averaged gradients: room for all of them at once. The embedding, first of all tensors,
    shares a rank with the tensors next to it."""
    largest = np.maximum.accumulate(fresh[::-1])[::-1] // run.width  # so far
    largest = np.where(run.elements - done < -(-run.largest // run.part) * run.part, run.largest, largest)
    return run.width * _find_kept_whole(run, largest) * (run.optimizer_tier is None)


def _find_flattened(run: ZeroRun, done: Array, flushes: NDArray[np.bool_]) -> Array:
    """Elements of a full bucket that are copied before they are reduced: all, where they belong to several ranks."""
    content = np.minimum(done, run.options.reduce_bucket_size or 0)
    first = run.elements - done
    several = first // run.part != (first + content - 1) // run.part
    return np.where(flushes & several, content, 0)


def _predict_stage_3(run: ZeroRun, peak: SegmentPeak) -> SegmentBytes:
    """Stage 3: beside what its replay tells, one bucket always."""
    return SegmentBytes(
        run.width * peak.fresh, run.width * peak.copies + count_bucket_bytes(run), run.width * peak.whole
    )


@functools.lru_cache(maxsize=1024)  # points of a sweep share it
def replay_peaks(model: ModelSizes, limits: GatheringLimits, ranks: int, gloo: bool) -> tuple[SegmentPeak, SegmentPeak]:
    """Return what lives in each segment's forward and backward on one of `ranks`; `gloo` packs for itself what it
    reduces."""
    sizes = [size.elements for size in model.tensors]
    first, second = (
        _find_peak(
            walk, np.array(sizes), np.array([pad_elements(elements, ranks) for elements in sizes]), ranks > 1, gloo
        )
        for walk in replay(model, limits)
    )
    return first, second


def _find_peak(walk: PassReplay, sizes: Array, padded_sizes: Array, gathers: bool, gloo: bool) -> SegmentPeak:
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
    return SegmentPeak(*largest)
