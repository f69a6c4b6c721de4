"""The collectives of one optimizer step on one rank, as DeepSpeed 0.19.8 begins them, and when.

Sources: reduce_gradients, average_tensor and step of runtime/zero/stage_1_and_2.py; buffered_allreduce_fallback of
runtime/engine.py; fetch_sub_module of runtime/zero/partitioned_param_coordinator.py and __avg_scatter_grads of
stage3.py. Calls and bytes are held against those counted in recorded runs.
"""

from bench.engine_costs import StepPass, Transfer
from bench.engines.deepspeed.costs.gathering import replay
from bench.engines.deepspeed.costs.zero_run import STAGE_0_BUCKET, ZeroRun
from bench.spec import FULL

PASSES: tuple[StepPass, StepPass] = ("forward", "backward")

NORM_BYTES = {0: 4, 1: 4, 2: 4, 3: 8}
"""The gradient's squared norm, which all ranks sum up once a step: fp32, at stage 3 fp64."""
OVERFLOW_BYTES = 1
"""Whether a gradient below fp32 was infinite on any rank, at stages 1 and 2."""


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
