"""What of an FSDP2 run decides its memory and what it moves: units, who has which part of them, in which width."""

import functools
from typing import NamedTuple

import numpy as np

from bench.engine_costs import Array, ModelSizes
from bench.engines.fsdp.options import Options, shard_ranks
from bench.spec import FULL, WIDTH, Device, OptimizerSpec, RunSpec
from bench.stacks import EqualTensors

OUTSIDE = -1
"""The block of a segment that is in none."""


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
