"""What of an engine and a run decides its memory: how many ranks divide what, in which width, on which device.

Formulas follow DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py) and bench.engines.
"""

import functools
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.engines.ddp import options as ddp
from bench.engines.deepspeed.options import Options
from bench.spec import WIDTH, Device, OptimizerSpec, RunSpec
from bench.stacks import Tensors, padded

CUDA_BASE_BYTES = (600_000_000, 2_000_000_000)
"""CUDA context, loaded kernels, cuBLAS workspaces and NCCL's buffers: 0.5 to 2 GB by GPU, torch and number of peers
(ml-engineering, "Anatomy of Model's Memory Usage"), with 0.1 GB of workspaces and buffers at least."""
ALIGNMENT = 2
"""Elements of which stages 1 and 2 give each rank a multiple (nccl_start_alignment_factor)."""
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
    room: int | None  # bytes of the device's memory; None is unknown

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

    @property
    def flattens_on_host(self) -> bool | None:
        """Whether stages 1 and 2 copy the weights into one flat tensor in the host's memory. DeepSpeed does so where
        the device's free memory cannot hold the second copy. None: CUDA_BASE_BYTES decide it, low or high."""
        if self.device == "cpu" or self.room is None or self.stage not in (1, 2):
            return False
        copies = self.width * (self.elements + self.part * self.ranks)
        low, high = (copies + base > self.room for base in CUDA_BASE_BYTES)
        return None if low != high else high


def engine(
    spec: RunSpec, sizes: Sequence[Tensors], device: Device, room: int | None = None, *, rehearsed: bool = False
) -> Engine:
    """Return what decides the memory of `spec`'s engine for a model with parameters of these sizes, on a device of
    `room` bytes. Collectives that are only `rehearsed` need no memory of their own."""
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
        room=room,
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
