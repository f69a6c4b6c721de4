"""What stands beside activations while forward and backward run: gathered units, gradients, and what reduces them.

Follows torch 2.13, torch/distributed/fsdp/_fully_shard: unshard, wait_for_unshard, reshard and post_backward of
_fsdp_param_group.py, foreach_all_gather and foreach_reduce of _fsdp_collectives.py. A unit is gathered into one flat
tensor and copied out of it; in forward that tensor stays until the next unit has been copied out, in backward the next
one's is gathered ahead. What a gradient is reduced from stays until the next reduction.
"""

import numpy as np

from bench.engine_costs import Array, BackwardWork, SegmentBytes
from bench.engines.fsdp.costs.fsdp_run import OUTSIDE, FsdpRun
from bench.spec import FULL


def forward(run: FsdpRun) -> SegmentBytes:
    """Return what lives during the forward pass of the last micro-step."""
    of, until = run.sizes.of, _last_block(run)
    whole, root = run.width * run.sizes.blocks, run.width * run.sizes.root
    flat, root_flat = (whole, root) if run.ranks > 1 else (0 * whole, 0)
    before = np.concatenate([[root_flat], flat[:-1]])  # the flat tensor of the unit gathered before
    gathering = before + (1 + run.gloo) * flat + _cast(run, run.sizes.blocks)
    inside = np.where(_enters(run), np.maximum(whole + flat, gathering)[of], (whole + flat)[of])
    outside = np.where(until == OUTSIDE, root_flat, flat[until])
    gathered = root + np.where(of == OUTSIDE, outside, inside) + _kept(run, until - (of != OUTSIDE))
    gathered[0] = max(gathered[0], (1 + run.gloo) * root_flat + int(_cast(run, np.array(run.sizes.root))))
    none = np.zeros_like(of)
    return SegmentBytes(none + _earlier_gradients(run), none, gathered)


def backward(run: FsdpRun, work: BackwardWork) -> SegmentBytes:
    """Return what lives during each segment's backward, its own gradients included."""
    of, until = run.sizes.of, _last_block(run)
    blocks = run.sizes.blocks
    whole, root = run.width * blocks, run.width * run.sizes.root
    ahead = whole * (run.ranks > 1 and run.options.reshard_after_forward is not False)
    lower = np.concatenate([[0], ahead[:-1]])  # gathered ahead for the block below
    begins = np.append(of[1:] != of[:-1], True)  # where backward enters
    entering = np.maximum(whole + ahead, whole + (1 + run.gloo) * lower)
    inside = np.where(begins, entering[of], (whole + lower)[of])
    outside = np.where(until == OUTSIDE, 0, ahead[until] * (1 + run.gloo * begins))
    gathered = root + np.where(of == OUTSIDE, outside, inside) + _kept(run, until - (of != OUTSIDE))
    gradients = _own_gradients(run, work) + _other_gradients(run, until)
    return SegmentBytes(gradients, _reductions(run, work, until), gathered)


def after_backward(run: FsdpRun) -> int:
    """Return the bytes that the reduction of what is in no block takes, at the end."""
    return int(_reduction(run, np.array(run.sizes.root)))


def _last_block(run: FsdpRun) -> Array:
    """The block of each segment, or the last one before it."""
    found: Array = np.maximum.accumulate(run.sizes.of)
    return found


def _enters(run: FsdpRun) -> Array:
    """Whether forward enters a block at each segment."""
    of = run.sizes.of
    entered: Array = np.append(True, of[1:] != of[:-1]) & (of != OUTSIDE)
    return entered


def _kept(run: FsdpRun, last: Array) -> Array:
    """Bytes that earlier blocks, up to and with `last`, keep from forward to backward: all of each, or a share."""
    again = run.options.reshard_after_forward
    share = 0 if again is True else 1 if again is False else again
    kept = np.concatenate([[0], np.cumsum(run.width * run.sizes.blocks // max(share, 1) * (share > 0))])
    found: Array = kept[last + 1]
    return found


def _cast(run: FsdpRun, elements: Array) -> Array:
    """Bytes of a rank's part below fp32, from which a unit is gathered."""
    return run.width * elements // run.ranks * (run.width < FULL and run.ranks > 1)


def _earlier_gradients(run: FsdpRun) -> int:
    """Bytes of gradients that earlier micro-steps leave: whole, or divided; copies agree on them in the last one."""
    if run.accumulation == 1:
        return 0
    if run.accumulates_whole:
        return run.reduced * run.model.elements
    if run.copies > 1:
        return run.reduced * run.part
    return 0 if run.offloaded else FULL * run.part


def _own_gradients(run: FsdpRun, work: BackwardWork) -> Array:
    """Bytes of gradients that are not reduced yet: of this segment's block so far, and of what is in no block."""
    outside = np.where(run.sizes.of == OUTSIDE, work.parameters, 0)
    waiting = np.cumsum(outside[::-1])[::-1]
    in_block = np.zeros_like(outside)
    for block in range(len(run.sizes.blocks)):
        here = run.sizes.of == block
        in_block[here] = np.cumsum(work.parameters[here][::-1])[::-1]
    fresh = in_block + waiting
    if run.accumulates_whole and run.reduced == run.width:  # added to what is there
        fresh = np.minimum(work.largest, run.model.largest)
    own: Array = run.width * (fresh + work.transposed)
    return own


def _other_gradients(run: FsdpRun, until: Array) -> Array:
    """Bytes of gradients that this micro-step has reduced, or that earlier ones left."""
    parts = run.sizes.blocks // run.ranks
    left = np.concatenate([np.cumsum(parts[::-1])[::-1], [0]])[until + 1]  # of blocks that are done
    left = left * (not run.offloaded)
    if run.accumulates_whole:
        standing = np.concatenate([[0], np.cumsum(run.sizes.blocks)])[until + 1] + run.sizes.root
        return np.asarray(FULL * left + run.reduced * standing)
    if run.accumulation == 1:
        return np.asarray(FULL * left)
    if run.copies == 1:
        return np.asarray(_earlier_gradients(run) + 0 * until)
    agreed = np.append(np.cumsum(parts[::-1])[::-1], 0)[until + 1]
    return np.asarray(FULL * left + run.reduced * (run.part - agreed))


def _reductions(run: FsdpRun, work: BackwardWork, until: Array) -> Array:
    """Bytes from which gradients were reduced last; where backward leaves a block, those of its own reduction as well,
    when its weights and the working memory are free."""
    of = run.sizes.of
    inputs = np.append(run.reduced * run.sizes.blocks, 0)
    held = inputs[until + 1]
    freed = run.width * run.sizes.blocks[of] + work.working - work.standing
    own = _reduction(run, run.sizes.blocks)[of] - freed
    found: Array = np.where(_enters(run), np.maximum(held, own), held)
    return found


def _reduction(run: FsdpRun, elements: Array) -> Array:
    """Bytes of one reduction beside the gradients that it is of: its input, into which they are copied and then go;
    gloo's copy of that, the output, and that in fp32."""
    copied = run.reduced * elements
    output = run.reduced + (FULL if run.reduced < FULL else 0)
    gone = (run.reduced if run.accumulates_whole else run.width) * elements
    found: Array = np.maximum(copied, (1 + run.gloo) * copied + output * (elements // run.ranks) - gone)
    return found
