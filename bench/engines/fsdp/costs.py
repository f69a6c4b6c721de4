"""Costs that FSDP2 adds to those of the forward and backward passes: memory of partitioned and gathered weights,
gradients and optimizer state, and the collectives of a step.

This module does not import torch. Its formulas follow the allocations and collectives of torch 2.13; no value is fitted
to a measurement. Sources are in torch/distributed/fsdp/_fully_shard: unshard, wait_for_unshard, reshard and
post_backward of _fsdp_param_group.py, foreach_all_gather and foreach_reduce of _fsdp_collectives.py.

An FSDP unit is a block of layers, or all parameters outside blocks. A unit is gathered into one flat tensor and then
copied out of it. In forward, the flat tensor stays until the next unit has been copied out. In backward, the next unit
is gathered while the current unit computes. The input of a reduction stays allocated until the next reduction.

Every unit is gathered for forward. A block that was resharded is gathered again for backward. The gradients of a block
are reduce-scattered when its backward ends; the gradients of parameters outside blocks are reduced last. Tests compare
the predicted numbers of calls and bytes with the numbers counted over gloo.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.engine_costs import (
    Array,
    BackwardWork,
    ByteRange,
    EngineStep,
    ModelSizes,
    SegmentBytes,
    Terms,
    Transfer,
    sum_bytes,
)
from bench.core.errors import NoPrediction, UserError
from bench.core.network import EqualTensors
from bench.core.spec import FULL, WIDTH, Device, RunSpec
from bench.engines.fsdp.options import Options, shard_ranks
from bench.engines.precision import DRAWN_AT_ONCE, count_moment_bytes, count_update_bytes

OUTSIDE = -1
"""Block index of a segment of the model that is in no block."""
NORM_BYTES = 4
"""Bytes of the squared gradient norm in fp32."""


class Sizes(NamedTuple):
    """Numbers of elements of the FSDP units (each block of layers, and all parameters outside blocks). Parameters are
    padded so that every rank has the same number of rows of each parameter. A segment is an embedding, a sub-layer or
    another piece of the model, in forward order."""

    root: int  # elements of parameters outside blocks
    blocks: Array  # (blocks,): elements of each block in the order of forward
    trained_root: int  # elements of trained parameters outside blocks
    trained_blocks: Array  # (blocks,): elements of the trained parameters of each block
    shards: tuple[EqualTensors, ...]  # sizes of one rank's partition of each trained parameter
    of: Array  # (segments,): the block of each segment
    until: Array  # (segments,): the block of each segment, or the last block before it
    enters: NDArray[np.bool_]  # (segments,): forward enters a block here


@functools.lru_cache(maxsize=1024)  # configurations of a sweep share the result
def _find_sizes(model: ModelSizes, ranks: int) -> Sizes:
    root, *blocks = model.units
    block_of = {module.segment: OUTSIDE if module.block is None else module.block for module in model.modules}
    matrices = [member for unit in model.units for member in unit.matrices if member[0].trained]
    of = np.array([block_of[segment] for segment in range(len(block_of))], np.int64)
    return Sizes(
        root=root.padded(ranks),
        blocks=np.array([block.padded(ranks) for block in blocks], np.int64),
        trained_root=root.padded(ranks, frozen=False),
        trained_blocks=np.array([block.padded(ranks, frozen=False) for block in blocks], np.int64),
        shards=tuple(EqualTensors(matrix.padded(ranks) // ranks, number) for matrix, number in matrices),
        of=of,
        until=np.maximum.accumulate(of),
        enters=np.append(True, of[1:] != of[:-1]) & (of != OUTSIDE),
    )


class FsdpRun(NamedTuple):
    """Values of an FSDP2 run that decide its memory and transfers."""

    options: Options
    spec: RunSpec
    model: ModelSizes
    device: Device
    sizes: Sizes
    ranks: int  # number of ranks that share a copy of the model
    copies: int
    width: int  # bytes per element of gathered weights and of fresh gradients
    reduced: int  # bytes per element of gradients while they are reduced
    gloo: bool  # True if gloo (not NCCL, no rehearsal) runs collectives; it copies the larger of input and output

    @property
    def padded(self) -> int:
        """Elements of all FSDP units, padding included."""
        return self.sizes.root + int(self.sizes.blocks.sum())

    @property
    def partition(self) -> int:
        """Elements of one rank's partition, padding included."""
        return self.padded // self.ranks

    @property
    def trained(self) -> int:
        """Elements of the trained parameters in one rank's partition, padding included."""
        return (self.sizes.trained_root + int(self.sizes.trained_blocks.sum())) // self.ranks

    @property
    def held(self) -> int:
        """Bytes of one rank's partition of the weights: trained weights in fp32, frozen weights in the run's
        precision."""
        return FULL * self.trained + self.width * (self.partition - self.trained)

    @property
    def offloaded(self) -> bool:
        """True if weights, gradients and optimizer state are offloaded to host memory. False on a CPU, where device
        and host share their memory."""
        return self.options.offload and self.device == "cuda"

    @property
    def accumulates_whole(self) -> bool:
        """True if each rank keeps the whole gradients of earlier micro-steps, not only its partition of them."""
        return self.spec.accumulation > 1 and not self.options.reduce_every_micro_step


def build_fsdp_run(spec: RunSpec, model: ModelSizes, device: Device, *, rehearsed: bool = False) -> FsdpRun:
    """Return the values that decide memory and transfers of the run `spec`. If `rehearsed` is true, collectives run on
    a fake process group and need no memory."""
    options = Options.of(spec)
    if model.quantised:
        raise NoPrediction("quantised weights with FSDP2", "no prediction of their partitions", "choose engine=ddp")
    ranks, width = shard_ranks(options, spec), WIDTH[spec.precision]
    reduced, gloo = WIDTH[options.reduce_dtype or spec.precision], device == "cpu" and not rehearsed and ranks > 1
    sizes, copies = _find_sizes(model, ranks), spec.data_parallel // ranks
    return FsdpRun(options, spec, model, device, sizes, ranks, copies, width, reduced, gloo)


class FsdpMemory(NamedTuple):
    """Memory of a rank for FSDP2: weights, gradients and optimizer state, without activations. Implements the interface
    `bench.core.engine_costs.EngineMemory`."""

    run: FsdpRun

    def _count_states(self) -> Terms:
        """Return the bytes of weights and optimizer state between steps, by kind. With AdamW there are 12 bytes per
        trained parameter of the partition, for fp32 weights and two moments. Frozen weights have the run's
        precision."""
        moments = count_moment_bytes(self.run.spec.optimizer, self.run.sizes.shards)
        return {"weights": self.run.held, "optimizer moments": moments}

    def resident(self) -> Terms:
        return {} if self.run.offloaded else self._count_states()

    def kept_buckets(self) -> int:
        return 0

    def initialisation(self, discarded: int) -> Terms:
        """Return the larger of two memory peaks of initialisation in bytes, by kind. `discarded`, the number of
        elements that exist only while the model is built, does not change the peaks.

        The first peak is the initialisation of the largest tensor, which is whole while its random values are
        generated. This tensor is assumed to be the head, the last tensor to be initialised. All other tensors are then
        already partitioned. The second peak is the cast of trained weights to fp32, one partition after the other. With
        offload, only the first peak counts.
        """
        run, largest = self.run, self.run.model.largest_of_all
        drawn = run.width * largest + FULL * min(largest, DRAWN_AT_ONCE)
        built = {"weights": run.width * (run.partition - largest // run.ranks), "working memory": drawn}
        ready = {"weights": run.held, "working memory": run.width * largest // run.ranks}
        return built if run.offloaded else max(built, ready, key=sum_bytes)

    def forward(self, segments: int) -> SegmentBytes:
        run, sizes = self.run, self.run.sizes
        of, until, whole, root = sizes.of, sizes.until, run.width * sizes.blocks, run.width * sizes.root
        flat, root_flat = (whole, root) if run.ranks > 1 else (0 * whole, 0)
        before = np.concatenate([[root_flat], flat[:-1]])  # (blocks,): bytes of the flat tensor of the previous unit
        gathering = before + (1 + run.gloo) * flat + _cast(run, sizes.trained_blocks)
        inside = np.where(sizes.enters, np.maximum(whole + flat, gathering)[of], (whole + flat)[of])
        outside = np.where(until == OUTSIDE, root_flat, flat[until])
        gathered = root + np.where(of == OUTSIDE, outside, inside) + _keep(run)
        gathered[0] = max(gathered[0], (1 + run.gloo) * root_flat + int(_cast(run, np.array(sizes.trained_root))))
        # gradients of this micro-step do not exist yet
        none = np.zeros_like(of)
        return SegmentBytes(none + _count_earlier_gradients(run), none, gathered)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        run, sizes = self.run, self.run.sizes
        of, until, whole, root = sizes.of, sizes.until, run.width * sizes.blocks, run.width * sizes.root
        ahead = whole * (run.ranks > 1 and run.options.reshard_after_forward is not False)
        lower = np.concatenate([[0], ahead[:-1]])  # (blocks,): bytes gathered ahead for the next block of backward
        begins = np.append(of[1:] != of[:-1], True)  # (segments,): backward enters a block here
        entering = np.maximum(whole + ahead, whole + (1 + run.gloo) * lower)
        inside = np.where(begins, entering[of], (whole + lower)[of])
        outside = np.where(until == OUTSIDE, 0, ahead[until] * (1 + run.gloo * begins))
        gathered = root + np.where(of == OUTSIDE, outside, inside) + _keep(run)
        # The input of the last reduction stays allocated. When backward leaves a block, the block's own reduction is
        # added; by then its weights and the working memory are free.
        held = np.append(run.reduced * sizes.trained_blocks, 0)[until + 1]
        freed = run.width * sizes.blocks[of] + work.working - work.standing
        buckets = np.where(sizes.enters, np.maximum(held, _reduce(run, sizes.trained_blocks)[of] - freed), held)
        return SegmentBytes(_count_own_gradients(run, work) + _count_other_gradients(run), buckets, gathered)

    def after_backward(self) -> int:
        """Return the bytes of the last reduction: the gradients of parameters outside blocks."""
        return int(_reduce(self.run, np.array(self.run.sizes.trained_root)))

    def update(self) -> Terms:
        if self.run.offloaded:
            return {}
        working = count_update_bytes(self.run.spec.optimizer, self.run.device, self.run.sizes.shards)
        return self.resident() | {"gradients": FULL * self.run.trained, "working memory": working}

    def host(self) -> dict[str, ByteRange]:
        if not self.run.offloaded:
            return {}
        terms = self._count_states() | {"gradients": FULL * self.run.trained}
        return {name: (size, size) for name, size in terms.items()}


def _keep(run: FsdpRun) -> Array:
    """Return the bytes of gathered weights that blocks keep from forward to backward, shape (segments,). The value of a
    segment of the model is the sum over the blocks before the segment in forward order.

    With reshard_after_forward=false, a block keeps all of its weights. With reshard_after_forward=true, a block keeps
    nothing. With reshard_after_forward=n for a number n of ranks, a block keeps 1/n of its weights.
    """
    again = run.options.reshard_after_forward
    share = 0 if again is True else 1 if again is False else again
    kept = np.concatenate([[0], np.cumsum(run.width * run.sizes.blocks // max(share, 1) * (share > 0))])
    found: Array = kept[run.sizes.until - (run.sizes.of != OUTSIDE) + 1]
    return found


def _cast(run: FsdpRun, elements: Array) -> Array:
    """Return the bytes of a rank's partition of one unit after a cast to the run's precision. The unit is gathered from
    this cast partition. `elements` is the number of trained elements of the whole unit. Return 0 in fp32 or on a single
    rank, where there is no cast."""
    return run.width * elements // run.ranks * (run.width < FULL and run.ranks > 1)


def _count_earlier_gradients(run: FsdpRun) -> int:
    """Return the bytes of gradients that earlier micro-steps leave on a rank. These gradients are partitioned with the
    option reduce_every_micro_step, and whole otherwise. If there is only one copy of the model, partitioned gradients
    are in fp32. If there are several copies, partitioned gradients keep the dtype of their reduction, because only the
    last micro-step averages them over the copies and casts them to fp32."""
    if run.spec.accumulation == 1:
        return 0
    if run.accumulates_whole:
        return run.reduced * run.model.elements
    if run.copies > 1:
        return run.reduced * run.trained
    return 0 if run.offloaded else FULL * run.trained


def _count_own_gradients(run: FsdpRun, work: BackwardWork) -> Array:
    """Return the bytes of not yet reduced gradients during the backward of each segment of the model, (segments,). They
    are the gradients that this backward pass has computed so far for the segment's block and for parameters outside
    blocks."""
    outside = np.where(run.sizes.of == OUTSIDE, work.parameters, 0)
    fresh = np.cumsum(outside[::-1])[::-1]
    for block in range(len(run.sizes.blocks)):
        here = run.sizes.of == block
        fresh[here] += np.cumsum(work.parameters[here][::-1])[::-1]
    if run.accumulates_whole and run.reduced == run.width:  # added in place to earlier gradients
        fresh = np.minimum(work.largest, run.model.largest)
    own: Array = run.width * (fresh + work.transposed)
    return own


def _count_other_gradients(run: FsdpRun) -> Array:
    """Return the bytes of two kinds of gradients during the backward of each segment of the model, (segments,):
    gradients that this micro-step has already reduced, and gradients that earlier micro-steps left."""
    until, parts = run.sizes.until, run.sizes.trained_blocks // run.ranks
    done = np.append(np.cumsum(parts[::-1])[::-1], 0)[until + 1]  # elements in blocks whose backward is over
    left = done * (not run.offloaded)
    if run.accumulates_whole:
        standing = np.concatenate([[0], np.cumsum(run.sizes.trained_blocks)])[until + 1] + run.sizes.trained_root
        return np.asarray(FULL * left + run.reduced * standing)
    if run.spec.accumulation == 1:
        return np.asarray(FULL * left)
    if run.copies == 1:
        return np.asarray(_count_earlier_gradients(run) + 0 * until)
    return np.asarray(FULL * left + run.reduced * (run.trained - done))


def _reduce(run: FsdpRun, elements: Array) -> Array:
    """Return the peak bytes of a reduction in addition to the gradients that it reduces. The reduction first copies the
    gradients to its input tensor, and frees them. Then it allocates gloo's copy of the input, the output, and a copy of
    the output in fp32."""
    copied = run.reduced * elements
    output = run.reduced + (FULL if run.reduced < FULL else 0)
    gone = (run.reduced if run.accumulates_whole else run.width) * elements
    found: Array = np.maximum(copied, (1 + run.gloo) * copied + output * (elements // run.ranks) - gone)
    return found


def predict_step(spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return FSDP2's costs of an optimizer step: the number of elements that a rank updates, and its collectives. Raise
    UserError for offload, whose time is not predicted."""
    run = build_fsdp_run(spec, model, device)
    if run.offloaded:
        rule = "transfers between device and host, and AdamW on the host, are not predicted"
        raise UserError("time with offload", rule, "measure it")
    return EngineStep(run.trained, _list_transfers(run))


def _list_transfers(run: FsdpRun) -> list[Transfer]:
    """Return the collectives of one rank in an optimizer step; empty for a single rank. On a CPU, no collective
    overlaps with computation.

    Gradients are reduce-scattered among the ranks that share a copy of the model. Each rank then all-reduces its share
    over the copies. All ranks of a node make this all-reduce at the same time, so they share the node's link to the
    other nodes.
    """
    if run.ranks == 1:
        return []
    again, blocks, root = run.options.reshard_after_forward, run.sizes.blocks, run.sizes.root
    calls, overlaps, passes = len(blocks) + 1, run.device == "cuda", run.spec.accumulation
    first, last, whole = run.width * root, run.width * int(blocks[-1]), run.width * run.padded
    found = [Transfer("all_gather", "forward", whole, calls, passes, overlaps, run.ranks, first)]
    if again is not False:
        ranks = run.ranks if again is True else again
        found.append(Transfer("all_gather", "backward", whole - first, len(blocks), passes, overlaps, ranks, last))
    passes = passes if run.options.reduce_every_micro_step else 1
    sizes = run.sizes
    calls = int(np.count_nonzero(sizes.trained_blocks)) + (sizes.trained_root > 0)  # units with trained parameters
    last = run.reduced * (sizes.trained_root or int(sizes.trained_blocks[sizes.trained_blocks > 0][0]))
    whole = run.reduced * run.trained * run.ranks
    found.append(Transfer("reduce_scatter", "backward", whole, calls, passes, overlaps, run.ranks, last))
    if run.copies > 1:
        found.append(Transfer(
            "all_reduce", "backward", whole // run.ranks, calls, 1, overlaps, run.copies, last // run.ranks,
            nodes=min(run.spec.nodes, run.copies), at_once=min(run.ranks, run.spec.devices_per_node),
        ))  # fmt: skip
    found.append(Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, run.ranks))
    return found
