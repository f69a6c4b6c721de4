"""What stands beside activations while forward and backward run: gradients under way, their buckets, gathered layers.

Formulas follow DeepSpeed 0.19.8: setup_buckets, reduce_independent_p_g_buckets_and_remove_grads and
copy_grads_in_partition of runtime/zero/stage_1_and_2.py; __add_grad_to_ipg_bucket and __avg_scatter_grads of stage3.py;
fetch_sub_module of partitioned_param_coordinator.py. Arrays have one value per segment, in the order of forward.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.predict.states import EVERYWHERE, Engine, bucket

Array = NDArray[np.int64]

STAGE_0_BUCKET = 500_000_000
"""Elements that DeepSpeed's stage 0 reduces at a time, whatever its options say."""


class Beside(NamedTuple):
    """Bytes beside the activations, per segment, in one pass."""

    gradients: Array
    buckets: Array
    gathered: Array


def forward(e: Engine, parameters: Array, largest: Array) -> Beside:
    """Return what lives during the forward pass of the last micro-step."""
    none = np.zeros_like(parameters)
    kept, standing = none + _kept_gradients(e), none + _standing_bucket(e)
    if e.stage != 3 or e.ranks == 1:
        return Beside(kept, standing, none)
    # prefetching runs ahead until its limit
    gathered = _whole(e, none + e.elements) + _unpacked(e, np.cumsum(parameters), parameters, largest)
    return Beside(kept, standing, e.width * gathered)


def backward(e: Engine, parameters: Array, largest: Array) -> Beside:
    """Return what lives during each segment's backward, its own gradients included."""
    done = np.cumsum(parameters[::-1])[::-1]  # from the end up to and with this segment
    fresh = e.width * np.minimum(largest, e.largest)
    if e.stage == EVERYWHERE:
        copied = fresh if e.view else fresh + e.width * done
        return Beside(copied, np.zeros_like(done), np.zeros_like(done))
    if e.stage == 0:
        gradients = np.full_like(done, e.width * e.elements) if e.accumulating else e.width * done
        return Beside(np.maximum(gradients, fresh), np.zeros_like(done), np.zeros_like(done))
    return (_partitioned if e.stage == 3 else _replicated)(e, done, parameters, fresh)


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
    return e.part if e.ranks == 1 else max(e.part, e.largest + e.part - 1 - (e.largest - 1) % e.part)


def _kept_gradients(e: Engine) -> int:
    """Bytes of gradients that earlier micro-steps leave."""
    if not e.accumulating or e.stage in (EVERYWHERE, 3):
        return 0
    return e.width * (e.elements if e.stage < 2 else averaged(e) * (not e.offloads))


def _standing_bucket(e: Engine) -> int:
    return bucket(e) if e.stage == 3 else 0


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


def _replicated(e: Engine, done: Array, parameters: Array, fresh: Array) -> Beside:
    """Stages 1 and 2: buckets from the first gradient on, this rank's averaged ones from the first full bucket."""
    assert e.options is not None
    oversize = _oversize(e, fresh)
    waiting = np.append(oversize[1:], 0)  # until it is reduced, in the segment after its own
    begun = np.cumsum(_flushes(e, done, parameters, oversize)[::-1])[::-1] > 0
    own = 0 if e.offloads else e.width * averaged(e)
    kept = _kept_gradients(e) if e.accumulating else 0  # stage 1's lie whole in their parameters until they are reduced
    buckets = (2 if e.options.overlap_comm else 1) * bucket(e)
    return Beside(own * begun + fresh + waiting + kept, buckets * (done > 0), np.zeros_like(done))


def _partitioned(e: Engine, done: Array, parameters: Array, fresh: Array) -> Beside:
    """Stage 3: one bucket always, a copy of it where it is reduced (gloo makes another), layers whole until used."""
    assert e.options is not None
    copies = 2 if e.device == "cpu" else 1
    full = e.width * np.minimum(done, e.options.reduce_bucket_size or 0)
    oversize = _oversize(e, fresh)
    buckets = bucket(e) + np.where(_flushes(e, done, parameters, oversize), copies * full, 0)
    left = done[0] - done + parameters
    gathered = np.zeros_like(done)
    if e.ranks > 1:
        gathered = e.width * _whole(e, left)
        if gathered[-1] < e.width * e.elements:  # then layers are gathered again
            gathered = gathered + e.width * _unpacked(e, done, parameters, fresh // e.width)
    return Beside(fresh + np.append(oversize[1:], 0), buckets, gathered)


def _unpacked(e: Engine, until: Array, parameters: Array, largest: Array) -> Array:
    """Elements of the flat buffer in which tensors are prefetched together: they are copied out of it where the first
    of them is needed. `until` counts the parameters needed so far. A tensor that is larger is gathered by itself."""
    assert e.options is not None
    ahead = min(e.options.stage3_prefetch_bucket_size or 0, e.elements)
    crossed = until // max(ahead, 1) > (until - parameters) // max(ahead, 1)
    return ahead * (crossed & (largest <= ahead))


def _whole(e: Engine, needed: Array) -> Array:
    """Elements of layers that are whole at a time: prefetching stops at a limit, what is needed now goes over it."""
    assert e.options is not None
    limit = max(e.options.stage3_max_live_parameters or 0, e.largest)
    whole: Array = np.minimum(needed, limit)
    return whole
