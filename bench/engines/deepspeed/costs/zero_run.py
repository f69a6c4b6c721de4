"""Values that decide the memory and transfers of a ZeRO run, and the collectives of one rank in one optimizer step.

The collectives, and the parts of the step in which they start, are those of DeepSpeed 0.19.8. Sources:
reduce_gradients, average_tensor and step of runtime/zero/stage_1_and_2.py; buffered_allreduce_fallback of
runtime/engine.py; fetch_sub_module of runtime/zero/partitioned_param_coordinator.py and __avg_scatter_grads of
stage3.py. Tests compare the numbers of calls and bytes with those of recorded runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench.core.engine_costs import CUDA_BASE_BYTES, ModelSizes, StepPass, Transfer, count_elements
from bench.core.errors import NoPrediction
from bench.core.network import EqualTensors, pad_elements
from bench.core.spec import FULL, WIDTH, Device, RunSpec
from bench.engines.deepspeed.costs.gathering import GatheringLimits, replay
from bench.engines.deepspeed.options import OffloadOptimizer, OffloadParam, Options

ALIGNMENT = 2
"""Stages 1 and 2 pad each rank's partition to a multiple of this number of elements (nccl_start_alignment_factor)."""
STAGE_0_BUCKET = 500_000_000
"""Largest number of elements in one all-reduce of stage 0. No option changes it."""
PASSES: tuple[StepPass, StepPass] = ("forward", "backward")

NORM_BYTES = {0: 4, 1: 4, 2: 4, 3: 8}
"""Bytes of the squared gradient norm by stage: fp64 at stage 3, fp32 at the other stages. All ranks sum it once per
step."""
OVERFLOW_BYTES = 1
"""Bytes of the flag that reports an infinite gradient on some rank. Stages 1 and 2 exchange it in bf16 and fp16."""


class ZeroRun(NamedTuple):
    """Values of a ZeRO run that decide its memory and transfers."""

    options: Options
    spec: RunSpec
    model: ModelSizes
    device: Device
    room: int | None  # bytes of the device's memory; None: unknown
    gloo: bool  # True if gloo reduces; False with NCCL, and in a rehearsal (one rank alone, without its peers)
    stage: int
    ranks: int
    width: int  # bytes per element of weights and gradients
    partition: int  # elements of the optimizer's state on one rank, padding included

    @property
    def partitioned(self) -> int:
        """Number of elements of trained and frozen weights on one rank at stage 3, padding included."""
        return _count_partition(self.model.all_tensors, self.ranks)

    def padded(self, elements: int) -> int:
        """Return the total number of elements of a tensor after padding by stage 3. The padding makes the partitions of
        all ranks equal."""
        return pad_elements(elements, self.ranks)

    @property
    def bucket(self) -> int:
        """Elements of a gradient bucket; 0 at stage 0, which has no option for it."""
        return self.options.reduce_bucket_size or 0

    @property
    def small(self) -> list[EqualTensors]:
        """Tensors that stage 3 never partitions, because they are at most as large as DeepSpeed's persistence
        threshold. Their elements include padding."""
        threshold = self.options.stage3_param_persistence_threshold or 0
        small = (size for size in self.model.all_tensors if size.elements <= threshold)
        return [EqualTensors(self.padded(size.elements), size.number) for size in small]

    @property
    def summed_width(self) -> int:
        """Bytes per element of the gradients that stage 3 accumulates over micro-steps."""
        return WIDTH[self.options.data_types.grad_accum_dtype or self.spec.precision]

    @property
    def optimizer_tier(self) -> OffloadOptimizer | None:
        """Options for offload of the optimizer's state to host memory. None if it is not offloaded, or if the device is
        the CPU."""
        return self.options.optimizer_tier if self.device == "cuda" else None

    @property
    def weights_tier(self) -> OffloadParam | None:
        """Options for offload of stage 3's partitioned weights to host memory. None if they are not offloaded, or if
        the device is the CPU."""
        return self.options.weights_tier if self.device == "cuda" else None

    @property
    def on_device(self) -> int:
        """Elements of this rank's optimizer state that are on the device: the whole partition, or the share that
        offload leaves on the device."""
        tier = self.optimizer_tier
        return self.partition if tier is None else round((1 - tier.ratio) * self.partition)

    @property
    def flattens_on_host(self) -> bool | None:
        """True if stages 1 and 2 flatten the weights in host memory. DeepSpeed does so if the device's free memory
        cannot hold a second copy of the weights. The free memory depends on the bytes that CUDA itself uses. Only a
        lower and an upper bound of these bytes are known (CUDA_BASE_BYTES). None if the two bounds lead to different
        results."""
        if self.device == "cpu" or self.room is None or self.stage not in (1, 2):
            return False
        copies = self.width * (self.model.elements + self.partition * self.ranks)
        copies += self.model.count_frozen_bytes(self.width)
        low, high = (copies + base > self.room for base in CUDA_BASE_BYTES)
        return None if low != high else high

    @property
    def limits(self) -> GatheringLimits:
        """Options of this run that limit gathered weights and gradient buckets, for the simulation of stage 3's gathers
        and reductions."""
        o = self.options
        return GatheringLimits(
            prefetch=o.stage3_prefetch_bucket_size or 0,
            live=o.stage3_max_live_parameters or 0,
            reuse=o.stage3_max_reuse_distance or 0,
            persistence=o.stage3_param_persistence_threshold or 0,
            bucket=self.bucket,
            contiguous=o.contiguous_gradients,
            checkpointing=self.spec.activation_checkpointing,
        )


def build_zero_run(
    options: Options, spec: RunSpec, model: ModelSizes, device: Device, room: int | None = None, *,
    rehearsed: bool = False,
) -> ZeroRun:  # fmt: skip
    """Return the values that decide memory and transfers of the run `spec` on a device with `room` bytes of memory. If
    `rehearsed` is true, collectives run on a fake process group and need no memory."""
    stage, ranks = options.stage, spec.data_parallel
    if stage == 0:
        partition = model.elements
    elif stage < 3:  # stages 1 and 2 partition one flat tensor, stage 3 each tensor separately; both pad
        partition = pad_elements(model.elements, ALIGNMENT * ranks) // ranks
    else:
        if model.quantised:
            rule, remedy = "no prediction of their partitions", "choose engine=zero2"
            raise NoPrediction("quantised weights at stage 3", rule, remedy)
        partition = _count_partition(model.tensors, ranks)
    gloo = device == "cpu" and not rehearsed
    return ZeroRun(options, spec, model, device, room, gloo, stage, ranks, WIDTH[spec.precision], partition)


def _count_partition(sizes: Sequence[EqualTensors], ranks: int) -> int:
    """Return the number of elements of one rank's partition of all tensors together, if each tensor is padded
    separately."""
    return sum(pad_elements(size.elements, ranks) // ranks * size.number for size in sizes)


def list_transfers(run: ZeroRun) -> list[Transfer]:
    """Return the collectives of one rank in an optimizer step; empty for a single rank."""
    if run.ranks == 1:
        return []
    norm = Transfer("all_reduce", "update", NORM_BYTES[run.stage], 1, 1, False, run.ranks)
    if run.stage == 0:
        calls = -(-run.model.elements // STAGE_0_BUCKET)
        gradients = Transfer("all_reduce", "update", run.width * run.model.elements, calls, 1, False, run.ranks)
        # below fp32 every rank computes the whole norm itself
        return [gradients, norm] if run.width == FULL else [gradients]
    if run.stage == 3:
        return [*_list_partitioned(run), norm]
    overflow = [] if run.width == FULL else [norm._replace(payload_bytes=OVERFLOW_BYTES)]
    return [*_list_replicated(run), norm, *overflow]


def _list_replicated(run: ZeroRun) -> list[Transfer]:
    """Return the collectives of stages 1 and 2: all-reduces of gradient buckets, and the gather of updated weights.

    Without overlap_comm, stage 1 reduces gradients after backward, and stage 2 reduces a bucket as soon as the bucket
    is full. On a CPU, no collective overlaps with computation.
    """
    passes = run.spec.accumulation if run.stage == 2 else 1  # stage 1 reduces in the last micro-step only
    whole, last = run.width * run.model.elements, run.width * run.model.largest  # the embedding's gradient comes last
    return [
        Transfer("all_reduce", "backward", whole, _count_buckets(run), passes, _overlaps(run), run.ranks, last),
        Transfer("all_gather", "update", run.width * run.partition * run.ranks, 1, 1, False, run.ranks),
    ]


def _list_partitioned(run: ZeroRun) -> list[Transfer]:
    """Return the collectives of stage 3. DeepSpeed's coordinator gathers weights before they are used in forward. For
    backward it gathers again only the weights that it had released. Gradients are reduce-scattered. Tensors that are
    never partitioned are gathered after the update.

    Gathers overlap with computation, also on a CPU. Reductions of buckets overlap with it only on a GPU with
    overlap_comm.
    """
    secondary, width, passes = run.options.zero_hpz_partition_size, run.width, run.spec.accumulation
    whole, largest = width * run.model.elements, width * run.model.largest_of_all
    found = []
    for when, walk in zip(PASSES, replay(run.model, run.limits), strict=True):
        # ZeRO++'s second copy is used in backward only: forward has to gather the updated weights from all ranks
        ranks = secondary if secondary > 1 and when == "backward" else run.ranks
        alone = largest * (when == "forward")
        found.append(Transfer("all_gather", when, width * walk.gathered, walk.gathers, passes, True, ranks, alone))
    buckets, small = _count_buckets(run), run.small
    last = width * run.model.largest
    found.append(Transfer("reduce_scatter", "backward", whole, buckets, passes, _overlaps(run), run.ranks, last))
    calls = sum(size.number for size in small)  # one call per tensor
    found.append(Transfer("all_gather", "update", width * count_elements(small), calls, 1, False, run.ranks))
    return [transfer for transfer in found if transfer.payload_bytes]


def _overlaps(run: ZeroRun) -> bool:
    """Return True if backward continues while gradient buckets are reduced."""
    return bool(run.options.overlap_comm) and run.device == "cuda"


def _count_buckets(run: ZeroRun) -> int:
    """Return the number of collective calls in one reduction of all gradients. A tensor larger than the bucket is
    reduced in its own call."""
    large = [size for size in run.model.tensors if size.elements > run.bucket]
    rest = run.model.elements - count_elements(large)
    return sum(size.number for size in large) + -(-rest // run.bucket)
