"""What one rank has of a network that is cut into stages and sliced: a network again, of less."""

import dataclasses
import functools

from bench.stacks import Attention, Mlp, Stacks
from bench.units import Part


@functools.lru_cache(maxsize=4096)  # points of a sweep share it
def cut_network(network: Stacks, part: Part, tensor: int = 1) -> Stacks:
    """Return the network with the blocks of a part alone, of one of `tensor` slices: heads, the width between an MLP's
    matrices and the vocabulary are divided, which they allow (bench.distributed.cut). A stack may have no block."""
    blocks = part.blocks([stack.layers for stack in network.stacks])
    stacks = tuple(
        dataclasses.replace(stack, layers=len(here), block=tuple(_slice_part(one, tensor) for one in stack.block))
        for stack, here in zip(network.stacks, blocks, strict=True)
    )
    return dataclasses.replace(network, stacks=stacks, vocab=network.vocab // tensor)


def ends_stack(network: Stacks, part: Part, place: int) -> bool:
    """Whether a part has the last block of the stack in this place, and so its last norm."""
    layers = [stack.layers for stack in network.stacks]
    return layers[place] - 1 in part.blocks(layers)[place]


def _slice_part(part: Attention | Mlp, tensor: int) -> Attention | Mlp:
    if isinstance(part, Mlp):
        return dataclasses.replace(part, inner=part.inner // tensor)
    groups = None if part.key_heads is None else part.key_heads // tensor
    return dataclasses.replace(part, heads=part.heads // tensor, key_heads=groups)
