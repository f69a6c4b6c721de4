"""What of a ZeRO run decides its memory and what it moves: who has which part, in which width, on which device; and the
collectives of one optimizer step on one rank, as DeepSpeed 0.19.8 begins them, and when.

Sources: reduce_gradients, average_tensor and step of runtime/zero/stage_1_and_2.py; buffered_allreduce_fallback of
runtime/engine.py; fetch_sub_module of runtime/zero/partitioned_param_coordinator.py and __avg_scatter_grads of
stage3.py. Calls and bytes are held against those counted in recorded runs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.core.engine_costs import CUDA_BASE_BYTES, ModelSizes, StepPass, Transfer, count_elements
from bench.core.network import EqualTensors, pad_elements
from bench.core.spec import FULL, WIDTH, Device, OptimizerSpec, RunSpec
from bench.engines.deepspeed.costs.gathering import GatheringLimits, replay
from bench.engines.deepspeed.options import OffloadOptimizer, OffloadParam, Options

ALIGNMENT = 2
"""Elements of which stages 1 and 2 give each rank a multiple (nccl_start_alignment_factor)."""
STAGE_0_BUCKET = 500_000_000
"""Elements that stage 0 reduces at a time, whatever its options say."""
PASSES: tuple[StepPass, StepPass] = ("forward", "backward")

NORM_BYTES = {0: 4, 1: 4, 2: 4, 3: 8}
"""The gradient's squared norm, which all ranks sum up once a step: fp32, at stage 3 fp64."""
OVERFLOW_BYTES = 1
"""Whether a gradient below fp32 was infinite on any rank, at stages 1 and 2."""


class ZeroRun(NamedTuple):
    """What of a ZeRO run decides its memory and what it moves."""

    options: Options
    stage: int
    model: ModelSizes
    elements: int  # of all parameters
    largest: int  # elements of the largest tensor
    small: int  # elements of the tensors that stage 3 never divides, padding included
    small_tensors: int  # how many they are
    large: int  # elements of the tensors that are larger than a bucket of gradients, and are reduced each by itself
    large_tensors: int
    part: int  # elements of the optimizer's state on one rank, padding included
    ranks: int
    width: int  # bytes per element of weights and gradients
    accumulation: int  # micro-steps
    checkpointing: bool
    optimizer: OptimizerSpec
    device: Device
    room: int | None  # bytes of the device's memory; None is unknown
    gloo: bool  # gloo reduces, and not NCCL or nobody

    def padded(self, elements: int) -> int:
        """Elements of a tensor that stage 3 divides: as many on every rank."""
        return pad_elements(elements, self.ranks)

    @property
    def optimizer_tier(self) -> OffloadOptimizer | None:
        """How the optimizer's state lies in the host's memory; None: it does not, or that is the device's."""
        tier = self.options.offload_optimizer
        return tier if self.device == "cuda" and tier is not None and tier.device != "none" else None

    @property
    def on_device(self) -> int:
        """Elements of the optimizer's state on the device: all of its part, or what partial offload leaves there."""
        tier = self.optimizer_tier
        return self.part if tier is None else round((1 - tier.ratio) * self.part)

    @property
    def weights_tier(self) -> OffloadParam | None:
        """How stage 3's partitions lie in the host's memory; None: they do not, or that is the device's."""
        tier = self.options.offload_param
        return tier if self.device == "cuda" and tier is not None and tier.device != "none" else None

    @property
    def flattens_on_host(self) -> bool | None:
        """Whether stages 1 and 2 copy the weights into one flat tensor in the host's memory. DeepSpeed does so where
        the device's free memory cannot hold the second copy. None: CUDA_BASE_BYTES decide it, low or high."""
        if self.device == "cpu" or self.room is None or self.stage not in (1, 2):
            return False
        copies = self.width * (self.elements + self.part * self.ranks)
        low, high = (copies + base > self.room for base in CUDA_BASE_BYTES)
        return None if low != high else high

    @property
    def limits(self) -> GatheringLimits:
        """What decides what stage 3 gathers when."""
        o = self.options
        return GatheringLimits(
            prefetch=o.stage3_prefetch_bucket_size or 0,
            live=o.stage3_max_live_parameters or 0,
            reuse=o.stage3_max_reuse_distance or 0,
            persistence=o.stage3_param_persistence_threshold or 0,
            bucket=o.reduce_bucket_size or 0,
            contiguous=o.contiguous_gradients,
            checkpointing=self.checkpointing,
        )


def build_zero_run(
    options: Options, spec: RunSpec, model: ModelSizes, device: Device, room: int | None = None, *,
    rehearsed: bool = False,
) -> ZeroRun:  # fmt: skip
    """Return what decides the costs of `spec` on a device of `room` bytes. Collectives that are only `rehearsed` need
    no memory of their own."""
    ranks = spec.data_parallel
    threshold = options.stage3_param_persistence_threshold or 0
    small = [size for size in model.tensors if size.elements <= threshold]
    large = [size for size in model.tensors if size.elements > (options.reduce_bucket_size or math.inf)]
    return ZeroRun(
        options=options,
        stage=options.stage,
        model=model,
        elements=model.elements,
        largest=model.largest,
        small=sum(pad_elements(size.elements, ranks) * size.number for size in small),
        small_tensors=sum(size.number for size in small),
        large=count_elements(large),
        large_tensors=sum(size.number for size in large),
        part=_count_part(options.stage, ranks, model.elements, model.tensors),
        ranks=ranks,
        width=WIDTH[spec.precision],
        accumulation=spec.accumulation,
        checkpointing=spec.activation_checkpointing,
        optimizer=spec.optimizer,
        device=device,
        room=room,
        gloo=device == "cpu" and not rehearsed,
    )


def _count_part(stage: int, ranks: int, elements: int, sizes: Sequence[EqualTensors]) -> int:
    """Elements on one rank. Stages 1 and 2 divide one flat tensor, stage 3 every tensor by itself; both pad."""
    if stage == 0:
        return elements
    if stage < 3:
        return pad_elements(elements, ALIGNMENT * ranks) // ranks
    return sum(pad_elements(size.elements, ranks) // ranks * size.number for size in sizes)


def list_transfers(run: ZeroRun) -> list[Transfer]:
    """Return what one rank moves in an optimizer step; nothing where it is alone."""
    if run.ranks == 1:
        return []
    norm = Transfer("all_reduce", "update", NORM_BYTES[run.stage], 1, 1, False, run.ranks)
    if run.stage == 0:
        calls = -(-run.elements // STAGE_0_BUCKET)
        gradients = Transfer("all_reduce", "update", run.width * run.elements, calls, 1, False, run.ranks)
        return [gradients, norm] if run.width == FULL else [gradients]  # else every rank has the norm of all
    if run.stage == 3:
        return [*_list_partitioned(run), norm]
    overflow = [] if run.width == FULL else [norm._replace(payload_bytes=OVERFLOW_BYTES)]
    return [*_list_replicated(run), norm, *overflow]


def _list_replicated(run: ZeroRun) -> list[Transfer]:
    """Stages 1 and 2: buckets are all-reduced, at stage 1 in the last micro-step only; updated weights are gathered.

    Without overlap_comm stage 1 reduces after backward, stage 2 where the bucket is full. On a CPU nothing overlaps.
    """
    passes = run.accumulation if run.stage == 2 else 1
    whole, last = run.width * run.elements, run.width * run.largest  # the embedding's gradient is complete last
    return [
        Transfer("all_reduce", "backward", whole, _count_buckets(run), passes, _has_overlap(run), run.ranks, last),
        Transfer("all_gather", "update", run.width * run.part * run.ranks, 1, 1, False, run.ranks),
    ]


def _list_partitioned(run: ZeroRun) -> list[Transfer]:
    """Stage 3: weights are gathered ahead of forward and, those let go in between, of backward, as its coordinator does
    it; gradients scattered; the tensors that are never divided gathered after the update.

    A gather runs while others compute, on a CPU as well; a bucket's reduction on a GPU with overlap_comm.
    """
    walks = replay(run.model, run.limits)
    secondary = run.options.zero_hpz_partition_size
    whole, largest, passes = run.width * run.elements, run.width * run.largest, run.accumulation
    found = [
        Transfer(
            "all_gather", when, run.width * walk.gathered, walk.gathers, passes, True,
            secondary if secondary > 1 and when == "backward" else run.ranks, largest * (when == "forward"),
        )
        for when, walk in zip(PASSES, walks, strict=True)
    ]  # fmt: skip
    scattered = Transfer(
        "reduce_scatter", "backward", whole, _count_buckets(run), passes, _has_overlap(run), run.ranks, largest
    )
    small = run.width * run.small
    kept = Transfer("all_gather", "update", small, run.small_tensors, 1, False, run.ranks)  # each by itself
    return [transfer for transfer in (*found, scattered, kept) if transfer.payload_bytes]


def _has_overlap(run: ZeroRun) -> bool:
    """Whether a bucket is reduced while backward goes on."""
    return bool(run.options.overlap_comm) and run.device == "cuda"


def _count_buckets(run: ZeroRun) -> int:
    """Calls that reduce all gradients; a tensor larger than the bucket goes by itself."""
    return run.large_tensors + -(-(run.elements - run.large) // (run.options.reduce_bucket_size or run.elements))
