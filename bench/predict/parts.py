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


@functools.lru_cache(maxsize=1024)
def list_alike(network: Stacks, parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Return for each stage the first one that is like it: with as many blocks of each stack, and the same ends of
    stacks and of the model."""
    first: dict[object, int] = {}
    layers = [stack.layers for stack in network.stacks]
    found = []
    for number, part in enumerate(parts):
        here = part.blocks(layers)
        ends = [blocks.stop == count and len(blocks) > 0 for blocks, count in zip(here, layers, strict=True)]
        like = (*map(len, here), *ends, part.first, part.last)
        found.append(first.setdefault(like, number))
    return tuple(found)


def ends_stack(network: Stacks, part: Part, place: int) -> bool:
    """Whether a part has the last block of the stack in this place, and so its last norm."""
    layers = [stack.layers for stack in network.stacks]
    return layers[place] - 1 in part.blocks(layers)[place]


def _slice_part(part: Attention | Mlp, tensor: int) -> Attention | Mlp:
    if isinstance(part, Mlp):
        return dataclasses.replace(part, inner=part.inner // tensor)
    groups = None if part.key_heads is None else part.key_heads // tensor
    return dataclasses.replace(part, heads=part.heads // tensor, key_heads=groups)
