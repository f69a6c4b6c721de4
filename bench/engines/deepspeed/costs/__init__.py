"""Costs that ZeRO adds to those of the forward and backward passes: device memory, collectives, and host memory for
offload. Device memory consists of states (weights, gradients and optimizer state), gradient buckets and gathered
layers.

This module does not import torch. Its formulas follow the allocations of DeepSpeed 0.19.8; no value is fitted to a
measurement. Sources:

- states: runtime/zero/stage_1_and_2.py, stage3.py and runtime/fp16/unfused_optimizer.py; their partition among ranks is
  ZeRO's (arXiv 1910.02054, section 5);
- buckets: setup_buckets, reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_bucket and
  copy_grads_in_partition of runtime/zero/stage_1_and_2.py; reduce_scatter_coalesced of runtime/comm;
- offload: `cpu_offload` in stage_1_and_2.py, `offload_optimizer` and `offload_param` in stage3.py and
  partition_parameters.py, CPUAdam's state in ops/adam/cpu_adam.py.

Models are built on the device at every ZeRO stage (see bench.engines). The host holds a copy of the weights in two
cases only. In the first, the weights are offloaded. In the second, stages 1 and 2 make their flat copy of the weights
in host memory, because the device cannot hold the weights twice. The memory of ZenFlow is not predicted.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.engine_costs import (
    Array,
    BackwardWork,
    ByteRange,
    EngineStep,
    ModelSizes,
    SegmentBytes,
    Terms,
    count_elements,
    sum_bytes,
)
from bench.core.errors import UserError
from bench.core.network import EqualTensors, pad_elements
from bench.core.spec import FULL, Device, RunSpec
from bench.engines.deepspeed.costs.gathering import GatheringLimits, PassReplay, replay
from bench.engines.deepspeed.costs.zero_run import STAGE_0_BUCKET, ZeroRun, build_zero_run, list_transfers
from bench.engines.deepspeed.options import OffloadOptimizer, OffloadParam, Options
from bench.engines.precision import (
    DRAWN_AT_ONCE,
    count_model_moment_bytes,
    count_moment_bytes,
    count_update_bytes,
)

__all__ = ["ZeroMemory", "build_zero_run", "predict_step"]

DOUBLE = 8
"""Bytes per element of fp64. DeepSpeed computes the norm of each gradient in fp64, one tensor at a time."""


def predict_step(options: Options, spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return ZeRO's costs of an optimizer step: the number of elements that a rank updates, and its collectives. Raise
    UserError for options whose step time cannot be predicted: quantised collectives and offload."""
    run = build_zero_run(options, spec, model, device)
    if options.zero_quantized_weights or options.zero_quantized_gradients:
        raise UserError("time with quantised collectives", "their bytes and kernels are not predicted", "measure it")
    if run.optimizer_tier or run.weights_tier:
        rule = "transfers between device and host, and AdamW on the host, are not predicted"
        raise UserError("time with offload", rule, "measure it")
    return EngineStep(run.partition, list_transfers(run))


class ZeroMemory(NamedTuple):
    """Memory of a rank for ZeRO: weights, gradients, optimizer state and buckets, without activations. Implements the
    interface `bench.core.engine_costs.EngineMemory`."""

    run: ZeroRun

    def resident(self) -> Terms:
        """Return the bytes of weights, gradients and optimizer state between steps, by kind. At stages 1 to 3, a rank
        keeps its partition of fp32 master weights in addition to the weights themselves. The master weights exist even
        if the run's precision is fp32."""
        run = self.run
        separate = run.width < FULL or run.stage > 0
        terms = {
            "weights": _count_weight_bytes(run),
            "master weights": FULL * run.on_device * separate,
            "optimizer moments": _count_moment_bytes(run),
        }
        if run.stage == 3 and run.on_device:  # otherwise all gradients are in host memory
            terms["gradients"] = (FULL if run.optimizer_tier else run.summed_width) * run.on_device
        if run.stage in (1, 2) and run.optimizer_tier:
            terms["offload buffer"] = run.width * run.model.largest
        return terms

    def kept_buckets(self) -> int:
        return _count_bucket_bytes(self.run) if self.run.stage == 3 else 0

    def initialisation(self, discarded: int) -> Terms:
        """Return the memory peak of initialisation in bytes, by kind. Building the model allocates and frees
        `discarded` elements that the finished model does not have.

        Stages 1 and 2 make a flat copy of the weights on the device if the device can hold the weights twice, otherwise
        in host memory. If it is unknown which of these memories is used, the copy is not counted. Leaving out the copy
        cannot change whether a model fits: the copy is on the device only if it fits there.
        """
        run = self.run
        if run.stage == 3:
            return self._initialise_partitioned(run.width * discarded // run.ranks)
        frozen = run.model.count_frozen_bytes(run.width)
        gradients = run.width * run.model.elements
        elements = count_elements(run.model.all_tensors)  # frozen matrices are quantised after they were built
        built = {"weights": run.width * elements, "thrown away": run.width * discarded}
        if run.stage > 0:
            flat = _count_weight_bytes(run)
            copied = flat - frozen if run.flattens_on_host is False else 0
            flattened = {"weights": gradients + frozen, "working memory": copied}
            states = FULL * run.on_device
            divided = {"weights": flat, "master weights": states, "working memory": states}
            return max(built, flattened, divided, key=sum_bytes)
        live = self.resident()
        if run.width < FULL:  # DeepSpeed makes a step with zero gradients to allocate the state
            live |= {"gradients": gradients, "working memory": FULL * run.model.elements + _count_update_bytes(run)}
        else:
            live["optimizer moments"] = 0
        return max(built, live, key=sum_bytes)

    def _initialise_partitioned(self, discarded_bytes: int) -> Terms:
        """Return the largest of stage 3's three memory peaks of initialisation. `discarded_bytes` is the number of
        bytes that a rank allocates for its partitions of tensors that the finished model does not have. The three
        peaks, in order of time:

        1. Each tensor is built whole, in fp32 first, and then partitioned. Later, each tensor is gathered again, and
           its random values are generated.
        2. Master weights are made from the partitions. In bf16 and fp16, this needs a temporary copy. Then a gradient
           of zeros is allocated.
        3. Gradients and the bucket are allocated. Then each tensor is gathered again while its gradient hook is
           registered. For this gather, gloo needs a copy of the tensor.

        AdamW's moments are allocated later, in the first optimizer step.
        """
        run = self.run
        weights, live = {"weights": _count_partition_bytes(run)}, self.resident()
        engine = live | weights | {"optimizer moments": 0, "gradients": 0}
        largest, padded = run.model.largest_of_all, run.width * run.padded(run.model.largest_of_all)
        built = (run.width + (FULL if run.width < FULL else 0)) * largest
        drawn = padded + FULL * min(largest, DRAWN_AT_ONCE)
        allocated = {"gradients": live.get("gradients", 0), "buckets": _count_bucket_bytes(run)}
        return max(
            weights | {"thrown away": discarded_bytes, "working memory": max(built, drawn)},
            engine | {"working memory": FULL * _count_updated_at_once(run)},
            engine | allocated | {"gathered layers": padded * (1 + run.gloo)},
            key=sum_bytes,
        )

    def forward(self, segments: int) -> SegmentBytes:
        if self.run.stage == 3:
            return _predict_stage_3(self.run, 0)
        none = np.zeros(segments, np.int64)
        return SegmentBytes(none + _count_kept_gradients(self.run), none, none)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        """Return the bytes of gradients, buckets and gathered weights during the backward pass of each segment of the
        model. At stages 0 to 2, torch's linear layers compute some gradients transposed. A transposed gradient cannot
        be added in place, and needs additional memory (`work.transposed` elements). Stage 3 uses DeepSpeed's own linear
        layer, which has no transposed gradients."""
        run = self.run
        if run.stage == 3:
            return _predict_stage_3(run, 1)
        fresh = run.width * np.minimum(work.largest, run.model.largest)
        done = np.cumsum(work.parameters[::-1])[::-1]  # (segments,): from the last segment to this one
        if run.stage > 0:
            live = _predict_stages_1_and_2(run, work, done, fresh)
        else:  # all gradients stay until they are reduced together, after backward
            none = np.zeros_like(done)
            gradients = none + run.width * run.model.elements if run.spec.accumulation > 1 else run.width * done
            live = SegmentBytes(np.maximum(gradients, fresh), none, none)
        return live._replace(gradients=live.gradients + run.width * work.transposed)

    def after_backward(self) -> int:
        """Return the bytes of the bucket into which stage 0 copies gradients for the all-reduce after backward; 0 at
        other stages."""
        run = self.run
        return run.width * min(run.model.elements, STAGE_0_BUCKET) if run.stage == 0 else 0

    def update(self) -> Terms:
        """Return the memory peak of the optimizer's step in bytes, by kind. First the gradient norm is computed in
        fp64. Then the gradients are copied to one flat fp32 tensor, and AdamW updates the weights from this tensor. The
        peak is in one of these phases."""
        run, live = self.run, self.resident()
        averaged = 0  # bytes of gradients that backward leaves, in addition to those that are always resident
        if not run.optimizer_tier and run.stage < 3:
            averaged = run.width * (run.model.elements if run.stage == 0 else _count_averaged(run))
        if not run.on_device:
            return live | {"gradients": averaged}
        fixed = {"gradients": live.get("gradients", 0) + averaged}
        if run.stage == 0:
            copy = FULL * run.model.elements if run.width < FULL else 0
            return live | fixed | {"working memory": copy + _count_update_bytes(run)}
        if run.stage == 3:
            infinite = 0 if run.optimizer_tier else (run.summed_width + 1) * run.partition  # fp16's overflow check
            norm = DOUBLE * run.padded(run.model.largest) // run.ranks
            updating = FULL * _count_updated_at_once(run) + _count_update_bytes(run)
            return live | fixed | {"working memory": max(norm, infinite, updating)}
        norm = DOUBLE * min(run.model.largest, run.partition)
        flat = run.width * run.partition + (FULL * run.partition if run.width < FULL else 0)
        # two peaks: gradients are flattened to fp32; then their tensors are freed, and AdamW steps
        flattening = live | fixed | {"working memory": max(flat, norm)}
        stepping = live | {"gradients": 0, "working memory": FULL * run.partition + _count_update_bytes(run)}
        return max(flattening, stepping, key=sum_bytes)

    def host(self) -> dict[str, ByteRange] | None:
        """Return the lower and upper bound of host memory by kind, in bytes. Return None with NVMe offload, whose
        buffers in host memory are not modelled."""
        run = self.run
        if run.options.disk_tiers:
            return None
        offloaded: dict[str, ByteRange] = {}
        if run.optimizer_tier:
            offloaded |= _offload_optimizer(run, run.optimizer_tier)
        if run.weights_tier:
            offloaded |= _offload_weights(run, run.weights_tier)
        # If the device cannot hold the weights twice, stages 1 and 2 build them twice in host memory: tensor by tensor,
        # and as one flat tensor. Both are freed before states are offloaded, so only the excess over these is counted.
        twice = run.width * (run.model.elements + run.partition * run.ranks)
        beyond = twice - _sum_ranges(*offloaded.values())[1]
        if run.flattens_on_host is not False and beyond > 0:
            offloaded["flattening"] = (beyond if run.flattens_on_host else 0, beyond)
        return offloaded


def _count_weight_bytes(run: ZeroRun) -> int:
    if run.stage == 3:
        return _count_partition_bytes(run) + (run.width * count_elements(run.small) if run.ranks > 1 else 0)
    trained = run.partition * run.ranks if run.stage > 0 else run.model.elements
    return run.width * trained + run.model.count_frozen_bytes(run.width)


def _count_partition_bytes(run: ZeroRun) -> int:
    """Return the bytes of the partitioned weights that stage 3 keeps on a rank's device, including ZeRO++'s secondary
    partition."""
    live = 0 if run.weights_tier else run.width * run.partitioned
    secondary = run.options.zero_hpz_partition_size
    return live + (run.width * count_elements(run.model.all_tensors) // secondary if secondary > 1 else 0)


def _count_bucket_bytes(run: ZeroRun) -> int:
    """Return the bytes of one gradient bucket. DeepSpeed allocates its full size, even for a smaller model."""
    return run.width * run.bucket * run.options.contiguous_gradients


def _count_moment_bytes(run: ZeroRun) -> int:
    """Return the bytes of the optimizer's state on the device. At stages 1 to 3, this state is counted as one flat
    tensor per rank, not as one tensor per parameter."""
    if run.stage == 0:
        return count_model_moment_bytes(run.spec.optimizer, run.model)
    return count_moment_bytes(run.spec.optimizer, [EqualTensors(run.on_device, 1)])


def _count_update_bytes(run: ZeroRun) -> int:
    """Return the bytes of the optimizer's temporaries. Stage 0 updates each tensor separately; the other stages update
    flat tensors."""
    flat = [EqualTensors(_count_updated_at_once(run), 1)]
    return count_update_bytes(run.spec.optimizer, run.device, run.model.tensors if run.stage == 0 else flat)


def _count_updated_at_once(run: ZeroRun) -> int:
    """Return the number of elements in the flat tensor that AdamW updates at once. Stage 3 has several such tensors and
    updates them one after the other."""
    return min(run.options.sub_group_size, run.on_device) if run.stage == 3 else run.partition


def _count_averaged(run: ZeroRun) -> int:
    """Return the number of elements of averaged gradients that stages 1 and 2 keep, on the rank that keeps the most.

    A tensor that lies partly in the rank's partition counts with its full size. This matters most for the embedding and
    the head, which are the first and the last tensor.
    """
    return int(_find_kept_whole(run, np.array(run.model.largest)))


def _find_kept_whole(run: ZeroRun, largest: Array) -> Array:
    reached = largest + run.partition - 1 - (largest - 1) % run.partition
    kept: Array = np.maximum(run.partition, reached * (run.ranks > 1))
    return kept


def _count_kept_gradients(run: ZeroRun) -> int:
    """Return the bytes of gradients that remain from earlier micro-steps."""
    if run.spec.accumulation == 1:
        return 0
    if run.stage < 2:
        return run.width * run.model.elements
    return 0 if run.optimizer_tier else run.width * _count_averaged(run)


def _predict_stages_1_and_2(run: ZeroRun, work: BackwardWork, done: Array, fresh: Array) -> SegmentBytes:
    """Return the bytes of gradients and buckets during the backward pass of each segment of the model, at stages 1 and
    2. For each segment, `done` is the number of elements whose gradients are complete after the segment's backward.
    `fresh` is the bytes of the segment's largest gradient.

    Buckets are counted from the first gradient on. This rank's averaged gradients are counted in the segment that fills
    the first bucket, and in all later segments of the backward pass.

    A full bucket is reduced between two operations of backward. If its gradients belong to partitions of several ranks,
    the bucket is first copied. The working memory of these operations is free at that time, and the copy uses this
    memory. Only the bytes by which the copy exceeds the free memory are counted. In the segment that fills the first
    bucket, the copy can also use the memory of the averaged gradients, which are allocated only after the reduction.
    """
    oversize = np.where(fresh > run.width * run.bucket, fresh, 0)  # gradients that are larger than a bucket
    waiting = np.append(oversize[1:], 0)  # kept until its reduction in the next segment of backward
    # A full bucket is reduced during a segment's backward. An oversize gradient waits for the next gradient, so it is
    # reduced in the next segment of backward.
    flushes: NDArray[np.bool_] = (done // run.bucket > (done - work.parameters) // run.bucket) & (oversize == 0)
    flushes[:-1] |= oversize[1:] > 0
    # (segments,): backward goes from the last segment to the first, so sums run from the end
    begun = np.cumsum(flushes[::-1])[::-1] > 0
    # A rank's averaged gradients are allocated all at once. The embedding, the first tensor, shares partitions with the
    # tensors next to it.
    elements, partition = run.model.elements, run.partition
    largest = np.maximum.accumulate(fresh[::-1])[::-1] // run.width  # largest tensor so far
    reached = elements - done < -(-run.model.largest // partition) * partition
    averaged = _find_kept_whole(run, np.where(reached, run.model.largest, largest))
    own = run.width * averaged * (run.optimizer_tier is None)
    kept = _count_kept_gradients(run)  # at stage 1 each parameter keeps its whole gradient until the reduction
    buckets = (2 if run.options.overlap_comm else 1) * _count_bucket_bytes(run) * (done > 0)
    free = work.working - work.standing + own * (begun & ~np.append(begun[1:], False))
    # if several ranks own the gradients of a full bucket, the bucket is copied before its reduction
    content, first = np.minimum(done, run.bucket), elements - done
    several = first // partition != (first + content - 1) // partition
    copied = np.maximum(run.width * np.where(flushes & several, content, 0) - free, 0)
    return SegmentBytes(own * begun + fresh + waiting + kept, buckets + copied, np.zeros_like(done))


def _predict_stage_3(run: ZeroRun, number: int) -> SegmentBytes:
    """Return the bytes of gradients, buckets and gathered weights at stage 3 during each segment of the model, in
    forward (`number` 0) or backward (`number` 1). The bytes are the peak in a simulation of DeepSpeed's gathers and
    reductions, plus the gradient bucket, which is always allocated."""
    fresh, copies, whole = run.width * _replay_peaks(run.model, run.limits, run.ranks, run.gloo)[number]
    return SegmentBytes(fresh, copies + _count_bucket_bytes(run), whole)


@functools.lru_cache(maxsize=1024)  # configurations of a sweep share the result
def _replay_peaks(model: ModelSizes, limits: GatheringLimits, ranks: int, gloo: bool) -> list[Array]:
    """Return the memory peaks of forward and backward on one of `ranks` ranks, from a simulation of DeepSpeed's gathers
    and reductions within `limits`. If `gloo` is true, each reduction makes one more copy of the gradients that it
    reduces."""
    sizes = np.array([size.elements for size in model.all_tensors])
    padded = np.array([pad_elements(size.elements, ranks) for size in model.all_tensors])
    return [_find_peak(walk, sizes, padded, ranks > 1, gloo) for walk in replay(model, limits)]


def _find_peak(walk: PassReplay, sizes: Array, padded: Array, gathers: bool, gloo: bool) -> Array:
    """Return the memory peak of each segment of the model in one simulated pass, `walk`. The result has the shape (3,
    segments) and contains numbers of elements. The three rows are gradients outside the bucket, copies of gradients
    during a reduction of the bucket, and gathered weights.

    Tensors are grouped by size. For each group, `sizes` has the number of elements of one tensor, and `padded` has this
    number with padding. `gathers` is True if there are several ranks, so that weights must be gathered.

    Before a bucket is reduced, its gradients are packed by rank into a new tensor. Their padding is allocated
    separately, as a second new tensor. A bucket with a single gradient that needs no padding is reduced in place,
    without these two tensors.
    """
    whole = (walk.exact + walk.padded @ padded) * gathers  # (stops,)
    plain, packed = walk.reduced @ sizes, walk.reduced @ padded
    in_place = (walk.reduced.sum(axis=1) == 1) & (plain == packed)
    copies = np.where(in_place, 0, 2 * packed - plain) + packed * gloo
    stops = np.stack([walk.fresh, copies, whole])  # (3, stops)
    largest = np.zeros((3, walk.segment.max() + 1), np.int64)
    # in order of increasing sum, so the largest stop of each segment is assigned last and stays
    order = np.argsort(stops.sum(axis=0), kind="stable")
    largest[:, walk.segment[order]] = stops[:, order]
    return largest


def _offload_optimizer(run: ZeroRun, tier: OffloadOptimizer) -> dict[str, ByteRange]:
    """Return the bytes of host memory for one rank's offloaded optimizer: fp32 master weights, AdamW's two moments, the
    fp32 gradient, and buffers.

    At stages 1 and 2, the buffers hold the updated weights before their transfer to the device, one tensor's gradient,
    and gradients of earlier micro-steps. At stage 3, the buffers hold the accumulated gradients.
    """
    pin, away = tier.pin_memory, run.partition - run.on_device
    piece = min(run.options.sub_group_size, away) if run.stage == 3 else away
    if run.stage == 3:
        master: ByteRange = (FULL * away,) * 2
        buffers = _pin(run.summed_width * run.partition, pin)
    else:
        master, single = _pin(FULL * away, pin), run.width * run.model.largest
        summed = run.width * _count_averaged(run) if run.spec.accumulation > 1 else 0
        buffers = _sum_ranges(_pin(run.width * run.partition, pin), _pin(single, pin), _pin(summed, pin, single))
    terms = {
        "master weights": master,
        "optimizer moments": (count_moment_bytes(run.spec.optimizer, [EqualTensors(away, 1)]),) * 2,
        "gradients": _pin(FULL * away, pin, FULL * piece),
        "offload buffers": buffers,
    }
    if working := count_update_bytes(run.spec.optimizer, "cpu", [EqualTensors(piece, 1)]):
        terms["working memory"] = (working,) * 2
    return terms


def _offload_weights(run: ZeroRun, tier: OffloadParam) -> dict[str, ByteRange]:
    """Return the bytes of host memory for stage 3's offloaded weights, which lie in one flat tensor. Before this flat
    tensor is made, each weight lies in a buffer of its own. The upper bound includes these buffers although they are
    freed, because torch's allocator of page-locked memory keeps the memory of freed buffers."""
    low, high = _pin(run.width * run.partitioned, pin=True)  # DeepSpeed pins this tensor even if pin_memory is false
    parts = [(run.width * run.padded(size.elements) // run.ranks, size.number) for size in run.model.all_tensors]
    before = sum(_round_up_to_power_of_two(part) * number for part, number in parts)
    return {"weights": (low, high + tier.pin_memory * before)}


def _pin(size: int, pin: bool, piece: int | None = None) -> ByteRange:
    """Return the lower and upper bound of host memory for `size` bytes, allocated in pieces of `piece` bytes (None: one
    piece). Without page-locked memory (`pin`), both bounds are `size`.

    torch rounds each page-locked piece up to a power of two unless a setting of torch prevents this (torch's docs on
    host_memory_stats; https://github.com/pytorch/pytorch/issues/95823 and 150517).
    """
    if not pin or not size:
        return size, size
    piece = piece or size
    whole, rest = divmod(size, piece)
    return size, whole * _round_up_to_power_of_two(piece) + _round_up_to_power_of_two(rest)


def _round_up_to_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _sum_ranges(*ranges: ByteRange) -> ByteRange:
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)
