"""What an engine holds between steps, while it is built and while it updates: all but activations and buckets.

Formulas follow DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/fp16/unfused_optimizer.py), torch
2.13's AdamW and bench.engines; the division among ranks is ZeRO's (arXiv 1910.02054, section 5).
"""

import functools
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.engines import ddp
from bench.engines.zero.options import Options
from bench.predict.memory.segments import FULL, WIDTH, Device, Tensors, padded
from bench.spec import OptimizerSpec, Precision, RunSpec

Terms = dict[str, int]
"""Bytes by name; their sum is what lives at one moment."""

DOUBLE = 8
"""Bytes per element of fp64, in which DeepSpeed takes the norm of a gradient, one tensor after the other."""
ALIGNMENT = 2
"""Elements of which stages 1 and 2 give each rank a multiple (nccl_start_alignment_factor)."""
DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.t5)."""
SCARCE = 2
"""Tensors of one size that are not neighbours: embedding and head, the position biases of two stacks."""
EVERYWHERE = -1
"""In place of a ZeRO stage: torch's DDP."""


class Engine(NamedTuple):
    """What of an engine and a run decides its memory."""

    stage: int  # EVERYWHERE, or ZeRO's
    ranks: int
    width: int  # bytes per element of weights and gradients
    sizes: tuple[Tensors, ...]  # all parameters
    elements: int  # of all parameters
    largest: int  # elements of the largest tensor
    part: int  # elements of the optimizer's state on one rank, padding included
    small: int  # elements of the tensors that stage 3 never divides, padding included
    small_tensors: int  # how many they are
    large: int  # elements of the tensors that are larger than a bucket of gradients, and are reduced each by itself
    large_tensors: int
    accumulating: bool  # more than one micro-step
    device: Device
    gloo: bool  # gloo reduces, and not NCCL or nobody
    optimizer: OptimizerSpec
    options: Options | None  # DeepSpeed's
    view: bool  # DDP's gradients lie in its buckets

    def padded(self, elements: int) -> int:
        """Elements of a tensor that stage 3 divides: as many on every rank."""
        return padded(elements, self.ranks)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's state lies in the host's memory, and that is another one."""
        tier = self.options.offload_optimizer if self.options else None
        return self.device == "cuda" and tier is not None and tier.device != "none"

    @property
    def on_device(self) -> int:
        """Elements of the optimizer's state on the device: all of its part, or what partial offload leaves there."""
        tier = self.options.offload_optimizer if self.options and self.offloads else None
        return self.part if tier is None else round((1 - tier.ratio) * self.part)

    @property
    def offloads_weights(self) -> bool:
        """Whether stage 3's partitions lie in the host's memory, and that is another one."""
        tier = self.options.offload_param if self.options else None
        return self.device == "cuda" and tier is not None and tier.device != "none"


def engine(spec: RunSpec, sizes: Sequence[Tensors], device: Device, *, rehearsed: bool = False) -> Engine:
    """Return what decides the memory of `spec`'s engine for a model with parameters of these sizes. Collectives that
    are only `rehearsed` need no memory of their own."""
    plain = json.dumps(spec.engine.options)
    zero = _zero_options(plain) if spec.engine.backend == "deepspeed" else None
    stage, ranks = zero.stage if zero else EVERYWHERE, spec.world_size
    threshold = (zero.stage3_param_persistence_threshold or 0) if zero else 0
    small = [size for size in sizes if size.elements <= threshold]
    large = [size for size in sizes if zero and size.elements > (zero.reduce_bucket_size or math.inf)]
    elements = _elements(sizes)
    return Engine(
        stage=stage,
        ranks=ranks,
        width=WIDTH[spec.precision],
        sizes=tuple(sizes),
        elements=elements,
        largest=max(size.elements for size in sizes),
        part=_part(stage, ranks, elements, sizes),
        small=sum(padded(size.elements, ranks) * size.number for size in small),
        small_tensors=sum(size.number for size in small),
        large=_elements(large),
        large_tensors=sum(size.number for size in large),
        accumulating=spec.accumulation > 1,
        device=device,
        gloo=device == "cpu" and not rehearsed,
        optimizer=spec.optimizer,
        options=zero,
        view=bool(zero) or _ddp_options(plain).gradient_as_bucket_view,
    )


def _part(stage: int, ranks: int, elements: int, sizes: Sequence[Tensors]) -> int:
    """Elements on one rank. Stages 1 and 2 divide one flat tensor, stage 3 every tensor by itself; both pad."""
    if stage <= 0:
        return elements
    if stage < 3:
        return padded(elements, ALIGNMENT * ranks) // ranks
    return sum(padded(size.elements, ranks) // ranks * size.number for size in sizes)


def _elements(sizes: Sequence[Tensors]) -> int:
    return sum(size.elements * size.number for size in sizes)


@functools.lru_cache(maxsize=1024)  # points of a sweep share them, and decoding costs as much as predicting
def _zero_options(plain: str) -> Options:
    return Options.model_validate_json(plain)


@functools.lru_cache(maxsize=1024)
def _ddp_options(plain: str) -> ddp.Options:
    return ddp.Options.model_validate_json(plain)


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
    """Return what lives at the peak of building model and engine; `thrown_away` elements are built for nothing."""
    if e.stage == 3:
        return _partitioned_initialisation(e, e.width * thrown_away // e.ranks)
    weights = e.width * e.elements
    built = {"weights": weights, "thrown away": e.width * thrown_away}
    if e.stage > 0:
        part = e.on_device
        flat = {"weights": weights, "working memory": _weights(e)}
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
