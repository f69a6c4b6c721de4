"""What an engine holds between steps, while it is built and while it updates: all but activations and buckets.

Formulas follow DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/fp16/unfused_optimizer.py), torch
2.13's AdamW and bench.engines; the division among ranks is ZeRO's (arXiv 1910.02054, section 5).
"""

from bench.predict.memory.engines import EVERYWHERE, Engine
from bench.spec import FULL, WIDTH, Precision

Terms = dict[str, int]
"""Bytes by name; their sum is what lives at one moment."""

DOUBLE = 8
"""Bytes per element of fp64, in which DeepSpeed takes the norm of a gradient, one tensor after the other."""
DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules.weights)."""
SCARCE = 2
"""Tensors of one size that are not neighbours: embedding and head, the position biases of two stacks."""


def model_states(elements: int, ranks: int, stage: int, precision: Precision = "bf16") -> int:
    """Return weights, gradients and AdamW's state of one rank in bytes, as Table 1 of ZeRO (arXiv 1910.02054) counts
    them: 2 + 2 + 12 bytes per parameter below fp32, of which a stage divides the last 12, the last 14 or all."""
    width = WIDTH[precision]
    optimizer = 2 * FULL + (FULL if width < FULL else 0)
    whole = [width * (stage < 3), width * (stage < 2), optimizer * (stage < 1)]
    divided = [width * (stage >= 3), width * (stage >= 2), optimizer * (stage >= 1)]
    return sum(whole) * elements + sum(divided) * elements // ranks


def resident(e: Engine) -> Terms:
    """Return what lives between two steps, gradients of earlier micro-steps not included.

    The partitioned stages keep master weights also in fp32, beside the weights that they gather into.
    """
    separate = e.width < FULL or e.stage > 0
    terms = {
        "weights": _weights(e),
        "master weights": FULL * e.on_device * separate,
        "optimizer moments": 2 * FULL * e.on_device,
    }
    if e.stage == EVERYWHERE:
        terms["gradients"] = e.width * e.elements
    if e.stage == 3 and e.on_device:
        terms["gradients"] = (FULL if e.offloads else accumulation_width(e)) * e.on_device  # else all lie in the host
    if e.offloads and e.stage in (1, 2):
        terms["offload buffer"] = e.width * e.largest
    return terms


def _weights(e: Engine) -> int:
    if e.stage < 3:
        return e.width * (e.part * e.ranks if e.stage > 0 else e.elements)
    return _partitions(e) + (e.width * e.small if e.ranks > 1 else 0)


def _partitions(e: Engine) -> int:
    """Bytes of the weights that stage 3 leaves on a rank's device, and of ZeRO++'s second copy."""
    assert e.options is not None
    held = 0 if e.offloads_weights else e.width * e.part
    secondary = e.options.zero_hpz_partition_size
    return held + (e.width * e.elements // secondary if secondary > 1 else 0)


def accumulation_width(e: Engine) -> int:
    kind = e.options.data_types.grad_accum_dtype if e.options else None
    return WIDTH[kind] if kind else e.width


def initialisation(e: Engine, thrown_away: int) -> Terms:
    """Return what lives at the peak of building model and engine; `thrown_away` elements are built for nothing.

    Stages 1 and 2 make a flat copy of the weights on the device only where the second copy fits beside the first, so it
    is never a reason not to fit: in doubt it is not counted here."""
    if e.stage == 3:
        return _partitioned_initialisation(e, e.width * thrown_away // e.ranks)
    weights = e.width * e.elements
    built = {"weights": weights, "thrown away": e.width * thrown_away}
    if e.stage > 0:
        part = e.on_device
        flat = {"weights": weights, "working memory": _weights(e) if e.flattens_on_host is False else 0}
        divided = {"weights": _weights(e), "master weights": FULL * part, "working memory": FULL * part}
        return max(built, flat, divided, key=_total)
    held = resident(e)
    if e.stage == EVERYWHERE:
        held["optimizer moments"] = 0
    elif e.width < FULL:  # DeepSpeed makes a step with zero gradients to allocate the state
        held |= {"gradients": e.width * e.elements, "working memory": FULL * e.elements + _adam(e)}
    else:
        held["optimizer moments"] = 0
    return max(built, held, key=_total)


def _partitioned_initialisation(e: Engine, thrown_away: int) -> Terms:
    """Stage 3. Every tensor is built whole, in fp32 first, before it is divided, and made whole again to be drawn.
    Then master weights are made from the partitions, below fp32 by way of a copy, and zeros for a gradient. With
    gradients and bucket in place every tensor is made whole once more, for its hook, in which gloo needs a copy of it.
    Moments come with a step."""
    weights = {"weights": _partitions(e)}
    engine = resident(e) | weights | {"optimizer moments": 0, "gradients": 0}
    built = (e.width + (FULL if e.width < FULL else 0)) * e.largest
    drawn = e.width * e.padded(e.largest) + FULL * min(e.largest, DRAWN_AT_ONCE)
    zeros = FULL * min(sub_group(e), e.on_device)
    hooked = e.width * e.padded(e.largest) * (1 + e.gloo)
    gradients = resident(e).get("gradients", 0)
    return max(
        weights | {"thrown away": thrown_away, "working memory": max(built, drawn)},
        engine | {"working memory": zeros},
        engine | {"gradients": gradients, "buckets": bucket(e), "gathered layers": hooked},
        key=_total,
    )


def bucket(e: Engine) -> int:
    """Return the bytes of one of DeepSpeed's gradient buckets; they are allocated whole, however small the model."""
    assert e.options is not None
    return e.width * (e.options.reduce_bucket_size or 0) * e.options.contiguous_gradients


def sub_group(e: Engine) -> int:
    return e.options.sub_group_size if e.options else e.elements


def update(e: Engine, averaged: int) -> Terms:
    """Return what lives at the peak of the optimizer's step; `averaged` is what gradients backward left, in bytes.

    Gradients become one flat fp32 tensor; before that, their norm is taken in fp64.
    """
    held = resident(e)
    if not e.on_device:
        return held | {"gradients": averaged}
    fixed = {"gradients": held.get("gradients", 0) + averaged}
    if e.stage <= 0:
        copy = FULL * e.elements if e.width < FULL else 0
        return held | fixed | {"working memory": copy + _adam(e)}
    if e.stage == 3:
        piece = min(sub_group(e), e.on_device)
        infinite = (accumulation_width(e) + 1) * e.part * (not e.offloads)  # fp16's check
        norm = DOUBLE * e.padded(e.largest) // e.ranks
        return held | fixed | {"working memory": max(norm, infinite, FULL * piece + _adam(e))}
    norm = DOUBLE * min(e.largest, e.part)
    flat = e.width * e.part + (FULL * e.part if e.width < FULL else 0)
    flattening = held | fixed | {"working memory": max(flat, norm)}
    updating = held | {"gradients": 0, "working memory": FULL * e.part + _adam(e)}
    return max(flattening, updating, key=_total)


def _adam(e: Engine) -> int:
    """Bytes of AdamW's intermediates: on a GPU torch's takes all square roots at once, on a CPU one tensor's root and
    quotient, the last tensor's still beside them; fused kernels have none."""
    if e.optimizer.implementation != "torch":
        return 0
    if e.stage > 0:
        piece = min(sub_group(e), e.on_device) if e.stage == 3 else e.part
        return FULL * piece * (1 if e.device == "cuda" else 2)
    if e.device == "cuda":
        return FULL * e.elements
    # embedding and head have small neighbours, a layer's matrices each other
    return FULL * max((3 if size.number > SCARCE else 2) * size.elements for size in e.sizes)


def _total(terms: Terms) -> int:
    return sum(terms.values())
