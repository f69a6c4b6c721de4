"""What ZeRO holds besides activations: states between steps, while it is built and while it updates; gradients under
way, their buckets and gathered layers while forward and backward run.

Formulas follow DeepSpeed 0.19.8 and bench.engines. States: runtime/zero/stage_1_and_2.py, stage3.py and
runtime/fp16/unfused_optimizer.py; the division among ranks is ZeRO's (arXiv 1910.02054, section 5). Buckets:
setup_buckets, reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_bucket and
copy_grads_in_partition of runtime/zero/stage_1_and_2.py; reduce_scatter_coalesced of runtime/comm. What stage 3 gathers
and reduces is replayed (bench.engines.deepspeed.costs.gathering).
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.engine_costs import Array, BackwardWork, ModelSizes, SegmentBytes, Terms, sum_bytes
from bench.core.network import EqualTensors, pad_elements
from bench.core.spec import FULL, WIDTH
from bench.engines.deepspeed.costs.gathering import GatheringLimits, PassReplay, replay
from bench.engines.deepspeed.costs.zero_run import STAGE_0_BUCKET, ZeroRun
from bench.engines.precision.optimizer import count_adamw_bytes

DOUBLE = 8
"""Bytes per element of fp64, in which DeepSpeed takes the norm of a gradient, one tensor after the other."""
DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules.parts)."""


def predict_resident(run: ZeroRun) -> Terms:
    """Return what lives between two steps, gradients of earlier micro-steps not included.

    The partitioned stages keep master weights also in fp32, beside the weights that they gather into.
    """
    separate = run.width < FULL or run.stage > 0
    terms = {
        "weights": _count_weight_bytes(run),
        "master weights": FULL * run.on_device * separate,
        "optimizer moments": 2 * FULL * run.on_device,
    }
    if run.stage == 3 and run.on_device:  # else all gradients lie in the host
        terms["gradients"] = (FULL if run.optimizer_tier else find_accumulation_width(run)) * run.on_device
    if run.stage in (1, 2) and run.optimizer_tier:
        terms["offload buffer"] = run.width * run.largest
    return terms


def _count_weight_bytes(run: ZeroRun) -> int:
    if run.stage == 3:
        return _count_partition_bytes(run) + (run.width * run.small if run.ranks > 1 else 0)
    return run.width * (run.part * run.ranks if run.stage > 0 else run.elements)


def _count_partition_bytes(run: ZeroRun) -> int:
    """Bytes of the weights that stage 3 leaves on a rank's device, and of ZeRO++'s second copy."""
    live = 0 if run.weights_tier else run.width * run.part
    secondary = run.options.zero_hpz_partition_size
    return live + (run.width * run.elements // secondary if secondary > 1 else 0)


def find_accumulation_width(run: ZeroRun) -> int:
    """Return the bytes per element of the gradients that stage 3 adds up over micro-steps."""
    kind = run.options.data_types.grad_accum_dtype
    return WIDTH[kind] if kind else run.width


def predict_initialisation(run: ZeroRun, thrown_away: int) -> Terms:
    """Return what lives at the peak of building model and engine; `thrown_away` elements are built for nothing.

    Stages 1 and 2 make a flat copy of the weights on the device only where the second copy fits beside the first, so it
    is never a reason not to fit: in doubt it is not counted here."""
    if run.stage == 3:
        return _predict_partitioned_initialisation(run, run.width * thrown_away // run.ranks)
    weights = run.width * run.elements
    built = {"weights": weights, "thrown away": run.width * thrown_away}
    if run.stage > 0:
        part = run.on_device
        flat = {"weights": weights, "working memory": _count_weight_bytes(run) if run.flattens_on_host is False else 0}
        divided = {"weights": _count_weight_bytes(run), "master weights": FULL * part, "working memory": FULL * part}
        return max(built, flat, divided, key=sum_bytes)
    live = predict_resident(run)
    if run.width < FULL:  # DeepSpeed makes a step with zero gradients to allocate the state
        live |= {"gradients": weights, "working memory": FULL * run.elements + _count_adamw_bytes(run)}
    else:
        live["optimizer moments"] = 0
    return max(built, live, key=sum_bytes)


def _predict_partitioned_initialisation(run: ZeroRun, thrown_away: int) -> Terms:
    """Stage 3. Every tensor is built whole, in fp32 first, before it is divided, and made whole again to be drawn.
    Then master weights are made from the partitions, below fp32 by way of a copy, and zeros for a gradient. With
    gradients and bucket in place every tensor is made whole once more, for its hook, in which gloo needs a copy of it.
    Moments come with a step."""
    weights, live = {"weights": _count_partition_bytes(run)}, predict_resident(run)
    engine = live | weights | {"optimizer moments": 0, "gradients": 0}
    built = (run.width + (FULL if run.width < FULL else 0)) * run.largest
    drawn = run.width * run.padded(run.largest) + FULL * min(run.largest, DRAWN_AT_ONCE)
    hooked = run.width * run.padded(run.largest) * (1 + run.gloo)
    gradients = live.get("gradients", 0)
    return max(
        weights | {"thrown away": thrown_away, "working memory": max(built, drawn)},
        engine | {"working memory": FULL * _count_updated_at_once(run)},
        engine | {"gradients": gradients, "buckets": count_bucket_bytes(run), "gathered layers": hooked},
        key=sum_bytes,
    )


def count_bucket_bytes(run: ZeroRun) -> int:
    """Return the bytes of one of DeepSpeed's gradient buckets; they are allocated whole, however small the model."""
    return run.width * (run.options.reduce_bucket_size or 0) * run.options.contiguous_gradients


def predict_update(run: ZeroRun, averaged: int) -> Terms:
    """Return what lives at the peak of the optimizer's step; `averaged` is what gradients backward left, in bytes.

    Gradients become one flat fp32 tensor; before that, their norm is taken in fp64.
    """
    live = predict_resident(run)
    if not run.on_device:
        return live | {"gradients": averaged}
    fixed = {"gradients": live.get("gradients", 0) + averaged}
    if run.stage == 0:
        copy = FULL * run.elements if run.width < FULL else 0
        return live | fixed | {"working memory": copy + _count_adamw_bytes(run)}
    if run.stage == 3:
        infinite = 0 if run.optimizer_tier else (find_accumulation_width(run) + 1) * run.part  # fp16's check
        norm = DOUBLE * run.padded(run.largest) // run.ranks
        updating = FULL * _count_updated_at_once(run) + _count_adamw_bytes(run)
        return live | fixed | {"working memory": max(norm, infinite, updating)}
    norm = DOUBLE * min(run.largest, run.part)
    flat = run.width * run.part + (FULL * run.part if run.width < FULL else 0)
    flattening = live | fixed | {"working memory": max(flat, norm)}
    stepping = live | {"gradients": 0, "working memory": FULL * run.part + _count_adamw_bytes(run)}
    return max(flattening, stepping, key=sum_bytes)


def _count_adamw_bytes(run: ZeroRun) -> int:
    """Bytes of AdamW's intermediates: stage 0 updates tensors, the others a flat one."""
    if run.stage == 0:
        return count_adamw_bytes(run.optimizer, run.device, run.model.tensors)
    return count_adamw_bytes(run.optimizer, run.device, [EqualTensors(_count_updated_at_once(run), 1)])


def _count_updated_at_once(run: ZeroRun) -> int:
    """Elements of the flat tensor that AdamW updates; stage 3 has several, one after the other."""
    return min(run.options.sub_group_size, run.on_device) if run.stage == 3 else run.part


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
    bucket_bytes = run.width * (run.options.reduce_bucket_size or 0)
    oversize = np.where(fresh > bucket_bytes, fresh, 0)  # gradients that are larger than a bucket
    waiting = np.append(oversize[1:], 0)  # until it is reduced, in the segment after its own
    flushes = _find_flushes(run, done, work.parameters, oversize)
    begun = np.cumsum(flushes[::-1])[::-1] > 0
    own = _find_own_averaged(run, done, fresh)
    kept = _count_kept_gradients(run)  # stage 1's lie whole in their parameters until they are reduced
    buckets = (2 if run.options.overlap_comm else 1) * count_bucket_bytes(run) * (done > 0)
    free = work.working - work.standing + own * (begun & ~np.append(begun[1:], False))
    copied = np.maximum(run.width * _find_flattened(run, done, flushes) - free, 0)
    return SegmentBytes(own * begun + fresh + waiting + kept, buckets + copied, np.zeros_like(done))


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
