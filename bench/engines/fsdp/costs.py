"""What FSDP2 costs beside a pass: the memory of its states and of what it gathers, and the collectives of a step.

Imports no torch. Formulas follow what torch 2.13 allocates and begins; nothing here is fitted to a measurement. Sources
are in torch/distributed/fsdp/_fully_shard: unshard, wait_for_unshard, reshard and post_backward of
_fsdp_param_group.py, foreach_all_gather and foreach_reduce of _fsdp_collectives.py. A unit is gathered into one flat
tensor and copied out of it; in forward that tensor stays until the next unit has been copied out, in backward the next
one's is gathered ahead. What a gradient is reduced from stays until the next reduction.

Every unit is gathered for forward; a block that was divided again also for backward. Its gradients are scattered when
its backward ends, those of what is in no block last. Calls and bytes are held against those counted over gloo.
"""

import functools
from typing import NamedTuple

import numpy as np

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
from bench.core.errors import UserError
from bench.core.network import EqualTensors
from bench.core.spec import FULL, WIDTH, Device, OptimizerSpec, RunSpec
from bench.engines.fsdp.options import Options, shard_ranks
from bench.engines.precision import count_adamw_bytes

OUTSIDE = -1
"""The block of a segment that is in none."""
NORM_BYTES = 4
"""The gradient's squared norm in fp32."""
DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules.parts)."""


class Sizes(NamedTuple):
    """Elements of the units, padded so that every rank has as many rows of each parameter."""

    root: int  # what is in no block
    blocks: Array  # in the order of forward
    shards: tuple[EqualTensors, ...]  # parameters as one rank has them
    of: Array  # the block of each segment


class FsdpRun(NamedTuple):
    """What of an FSDP2 run decides its memory and what it moves."""

    options: Options
    model: ModelSizes
    sizes: Sizes
    ranks: int  # that share a copy
    copies: int
    width: int  # bytes per element of what is gathered, and of fresh gradients
    reduced: int  # bytes per element of gradients while they are reduced
    accumulation: int  # micro-steps
    optimizer: OptimizerSpec
    device: Device
    gloo: bool  # gloo gathers and reduces, and not NCCL or nobody: it works on a copy of the larger tensor
    devices_per_node: int
    nodes: int

    @property
    def padded(self) -> int:
        """Elements of all units."""
        return self.sizes.root + int(self.sizes.blocks.sum())

    @property
    def part(self) -> int:
        """Elements on one rank."""
        return self.padded // self.ranks

    @property
    def offloaded(self) -> bool:
        """Whether all states lie in the host's memory, and that is not the device's."""
        return self.options.offload and self.device == "cuda"

    @property
    def accumulates_whole(self) -> bool:
        """Whether earlier micro-steps leave gradients that are not divided."""
        return self.accumulation > 1 and not self.options.reduce_every_micro_step


def fsdp_run(options: Options, spec: RunSpec, model: ModelSizes, device: Device, *, rehearsed: bool = False) -> FsdpRun:
    """Return what decides the costs of `spec`. Collectives that are only `rehearsed` need no memory of their own."""
    ranks = shard_ranks(options, spec)
    return FsdpRun(
        options=options,
        model=model,
        sizes=_sizes(model, ranks),
        ranks=ranks,
        copies=spec.data_parallel // ranks,
        width=WIDTH[spec.precision],
        reduced=WIDTH[options.reduce_dtype or spec.precision],
        accumulation=spec.accumulation,
        optimizer=spec.optimizer,
        device=device,
        gloo=device == "cpu" and not rehearsed and ranks > 1,
        devices_per_node=spec.devices_per_node,
        nodes=spec.nodes,
    )


@functools.lru_cache(maxsize=1024)  # points of a sweep share it
def _sizes(model: ModelSizes, ranks: int) -> Sizes:
    root, *blocks = model.units
    block_of = {module.segment: OUTSIDE if module.block is None else module.block for module in model.modules}
    matrices = [member for unit in model.units for member in unit.matrices]
    return Sizes(
        root=root.padded(ranks),
        blocks=np.array([block.padded(ranks) for block in blocks], np.int64),
        shards=tuple(EqualTensors(matrix.padded(ranks) // ranks, number) for matrix, number in matrices),
        of=np.array([block_of[segment] for segment in range(len(block_of))], np.int64),
    )


def state_bytes(run: FsdpRun) -> dict[str, int]:
    """Return what one rank keeps between steps: fp32 weights and two moments, 12 bytes per parameter of its part."""
    return {"weights": FULL * run.part, "optimizer moments": 2 * FULL * run.part}


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
    return SegmentBytes(gradients, _count_reduction_bytes(run, work, until), gathered)


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


def _count_reduction_bytes(run: FsdpRun, work: BackwardWork, until: Array) -> Array:
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


def list_transfers(run: FsdpRun) -> list[Transfer]:
    """Return what one rank moves in an optimizer step; nothing where it is alone. On a CPU nothing overlaps."""
    if run.ranks == 1:
        return []
    norm = Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, run.ranks)
    return [*_list_gathers(run), *_list_reductions(run), norm]


def _list_gathers(run: FsdpRun) -> list[Transfer]:
    again, blocks = run.options.reshard_after_forward, run.sizes.blocks
    beside, passes = run.device == "cuda", run.accumulation
    first, last = run.width * run.sizes.root, run.width * int(blocks[-1])
    whole = run.width * run.padded
    found = [Transfer("all_gather", "forward", whole, len(blocks) + 1, passes, beside, run.ranks, first)]
    if again is not False:
        ranks = run.ranks if again is True else again
        found += [Transfer("all_gather", "backward", whole - first, len(blocks), passes, beside, ranks, last)]
    return found


def _list_reductions(run: FsdpRun) -> list[Transfer]:
    """Gradients are scattered among the ranks of a copy, and what a rank has of them is summed over the copies: those
    of a node's ranks at once, each over the links between all nodes."""
    calls, beside = len(run.sizes.blocks) + 1, run.device == "cuda"
    passes = run.accumulation if run.options.reduce_every_micro_step else 1
    whole, last = run.reduced * run.padded, run.reduced * run.sizes.root
    found = [Transfer("reduce_scatter", "backward", whole, calls, passes, beside, run.ranks, last)]
    if run.copies > 1:
        alike = Transfer(
            "all_reduce", "backward", whole // run.ranks, calls, 1, beside, run.copies, last // run.ranks,
            nodes=min(run.nodes, run.copies), at_once=min(run.ranks, run.devices_per_node),
        )  # fmt: skip
        found += [alike]
    return found


class FsdpMemory(NamedTuple):
    """FSDP2's part of a rank's memory: an `EngineMemory`."""

    run: FsdpRun

    def resident(self) -> Terms:
        return {} if self.run.offloaded else state_bytes(self.run)

    def kept_buckets(self) -> int:
        return 0

    def initialisation(self, thrown_away: int) -> Terms:
        """A tensor is made whole to be drawn, the largest, the head, beside the parts of the others; all parts are made
        fp32 one after the other."""
        run, largest = self.run, self.run.model.largest
        drawn = run.width * largest + FULL * min(largest, DRAWN_AT_ONCE)
        built = {"weights": run.width * (run.part - largest // run.ranks), "working memory": drawn}
        ready = {"weights": FULL * run.part, "working memory": run.width * largest // run.ranks}
        return built if run.offloaded else max(built, ready, key=sum_bytes)

    def forward(self, segments: int) -> SegmentBytes:
        return forward(self.run)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        return backward(self.run, work)

    def after_backward(self) -> int:
        return after_backward(self.run)

    def update(self) -> Terms:
        if self.run.offloaded:
            return {}
        working = count_adamw_bytes(self.run.optimizer, self.run.device, self.run.sizes.shards)
        return self.resident() | {"gradients": FULL * self.run.part, "working memory": working}

    def host(self) -> dict[str, ByteRange]:
        if not self.run.offloaded:
            return {}
        terms = state_bytes(self.run) | {"gradients": FULL * self.run.part}
        return {name: (size, size) for name, size in terms.items()}


def memory(options: Options, spec: RunSpec, model: ModelSizes, device: Device, rehearsed: bool) -> FsdpMemory:
    """Return FSDP2's part of a rank's memory."""
    return FsdpMemory(fsdp_run(options, spec, model, device, rehearsed=rehearsed))


def step(options: Options, spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return what FSDP2 adds to a step; UserError for what is not predicted."""
    run = fsdp_run(options, spec, model, device)
    if run.offloaded:
        rule = "what moves between device and host, and AdamW on the host, are not predicted"
        raise UserError("time with offload", rule, "measure it")
    return EngineStep(run.part, list_transfers(run))
