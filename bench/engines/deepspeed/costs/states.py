"""What ZeRO holds between steps, while it is built and while it updates: all but activations and buckets.

Formulas follow DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/fp16/unfused_optimizer.py) and
bench.engines; the division among ranks is ZeRO's (arXiv 1910.02054, section 5).
"""

from bench.engine_costs import Terms, sum_bytes
from bench.engines.deepspeed.costs.zero_run import ZeroRun
from bench.engines.precision.costs import count_adamw_bytes
from bench.spec import FULL, WIDTH
from bench.stacks import EqualTensors

DOUBLE = 8
"""Bytes per element of fp64, in which DeepSpeed takes the norm of a gradient, one tensor after the other."""
DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules.weights)."""


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
