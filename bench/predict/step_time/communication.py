"""The collectives of one optimizer step on one rank, as DeepSpeed 0.19.8 and torch's DDP begin them, and when.

Sources: reduce_gradients, average_tensor and step of runtime/zero/stage_1_and_2.py; buffered_allreduce_fallback of
runtime/engine.py; fetch_sub_module of runtime/zero/partitioned_param_coordinator.py and __avg_scatter_grads of
stage3.py. Payload as nccl-tests counts it. Calls and bytes are held against those counted in recorded runs.
"""

from typing import Literal, NamedTuple

from bench.machine import CollectiveKind
from bench.predict.memory import limits
from bench.predict.memory.buckets import STAGE_0_BUCKET
from bench.predict.memory.engines import EVERYWHERE, Engine
from bench.predict.memory.gathering import replay
from bench.predict.workload import network_of
from bench.spec import FULL, RunSpec
from bench.stacks import modules, tensors

Pass = Literal["forward", "backward", "update"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")

NORM_BYTES = {0: 4, 1: 4, 2: 4, 3: 8}
"""The gradient's squared norm, which all ranks sum up once a step: fp32, at stage 3 fp64."""
OVERFLOW_BYTES = 1
"""Whether a gradient below fp32 was infinite on any rank, at stages 1 and 2."""


class Transfer(NamedTuple):
    """Collectives of one kind in one pass; `passes` of them in a step."""

    kind: CollectiveKind
    when: Pass
    payload_bytes: int  # of one pass, all its calls together
    calls: int  # in one pass
    passes: int  # micro-steps in which it happens
    overlaps: bool  # runs while the pass computes; else the pass waits
    ranks: int  # that take part
    alone_bytes: int = 0  # of the first gather or the last reduction, beside which nothing computes; 0: as any other


def transfers(e: Engine, spec: RunSpec) -> list[Transfer]:
    """Return what one rank of `spec` moves in an optimizer step; nothing where it is alone."""
    if e.ranks == 1:
        return []
    if e.stage == EVERYWHERE:
        return [_reduced_by_ddp(e, spec)]
    norm = Transfer("all_reduce", "update", NORM_BYTES[e.stage], 1, 1, False, e.ranks)
    if e.stage == 0:
        calls = -(-e.elements // STAGE_0_BUCKET)
        gradients = Transfer("all_reduce", "update", e.width * e.elements, calls, 1, False, e.ranks)
        return [gradients, norm] if e.width == FULL else [gradients]  # else every rank has the norm of all
    if e.stage == 3:
        return [*_partitioned(e, spec), norm]
    overflow = [] if e.width == FULL else [norm._replace(payload_bytes=OVERFLOW_BYTES)]
    return [*_replicated(e, spec.accumulation), norm, *overflow]


def _reduced_by_ddp(e: Engine, spec: RunSpec) -> Transfer:
    size = float(spec.engine.options["bucket_cap_mb"]) * 2**20
    calls = max(1, round(e.width * e.elements / size))
    whole, last = e.width * e.elements, e.width * e.largest  # the embedding's gradient is complete last
    return Transfer("all_reduce", "backward", whole, calls, 1, True, e.ranks, last)


def _replicated(e: Engine, accumulation: int) -> list[Transfer]:
    """Stages 1 and 2: buckets are all-reduced, at stage 1 in the last micro-step only; updated weights are gathered.

    Without overlap_comm stage 1 reduces after backward, stage 2 where the bucket is full. On a CPU nothing overlaps.
    """
    assert e.options is not None
    passes = accumulation if e.stage == 2 else 1
    overlaps = bool(e.options.overlap_comm) and e.device == "cuda"
    size = e.width * e.elements
    return [
        Transfer("all_reduce", "backward", size, _buckets(e), passes, overlaps, e.ranks, e.width * e.largest),
        Transfer("all_gather", "update", e.width * e.part * e.ranks, 1, 1, False, e.ranks),
    ]


def _partitioned(e: Engine, spec: RunSpec) -> list[Transfer]:
    """Stage 3: weights are gathered ahead of forward and, those let go in between, of backward, as its coordinator does
    it; gradients scattered; the tensors that are never divided gathered after the update.

    A gather runs while others compute, on a CPU as well; a bucket's reduction on a GPU with overlap_comm.
    """
    assert e.options is not None
    walks = replay(modules, tensors, network_of(spec), limits(e.options, spec.activation_checkpointing))
    secondary = e.options.zero_hpz_partition_size
    overlaps = bool(e.options.overlap_comm) and e.device == "cuda"
    found = [
        Transfer(
            "all_gather", when, e.width * walk.gathered, walk.gathers, spec.accumulation, True,
            secondary if secondary > 1 and when == "backward" else e.ranks, e.width * e.largest * (when == "forward"),
        )
        for when, walk in zip(PASSES, walks, strict=True)
    ]  # fmt: skip
    scattered = Transfer(
        "reduce_scatter", "backward", e.width * e.elements, _buckets(e), spec.accumulation, overlaps, e.ranks,
        e.width * e.largest,
    )  # fmt: skip
    kept = Transfer("all_gather", "update", e.width * e.small, e.small_tensors, 1, False, e.ranks)  # each by itself
    return [transfer for transfer in (*found, scattered, kept) if transfer.payload_bytes]


def _buckets(e: Engine) -> int:
    """Calls that reduce all gradients; a tensor larger than the bucket goes by itself."""
    assert e.options is not None
    return e.large_tensors + -(-(e.elements - e.large) // (e.options.reduce_bucket_size or e.elements))
