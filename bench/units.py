"""What of a network is gathered, or lies on a stage, as one: every block of layers, and all that is in no block."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.stacks import Attention, Mlp, Stack, Stacks, list_part_sizes


class Part(NamedTuple):
    """Consecutive units that a model is cut into for a pipeline: 0 is the embedding, then come the blocks in the order
    of forward, then the head. A stack's last norm follows its last block."""

    begin: int
    end: int  # behind the last one
    units: int  # of the whole model

    @property
    def first(self) -> bool:
        return self.begin == 0

    @property
    def last(self) -> bool:
        return self.end == self.units

    def blocks(self, layers: Sequence[int]) -> list[range]:
        """Return by stack of so many `layers` which of its blocks are here."""
        found, before = list[range](), 1  # the embedding
        for count in layers:
            begin, end = (min(max(edge - before, 0), count) for edge in (self.begin, self.end))
            found.append(range(begin, end))
            before += count
        return found


class Matrix(NamedTuple):
    """A parameter as rows and columns, as torch keeps it; a vector has columns of one element."""

    rows: int
    columns: int

    def padded(self, ranks: int) -> int:
        """Elements with as many rows on each of `ranks`."""
        return -(-self.rows // ranks) * ranks * self.columns


class Unit(NamedTuple):
    """Parameters that are gathered together, and how many there are of each size."""

    block: int | None  # its number in the order of forward, through all stacks; None: what is in no block
    matrices: tuple[tuple[Matrix, int], ...]

    @property
    def elements(self) -> int:
        return self.padded(1)

    def padded(self, ranks: int) -> int:
        """Elements with as many rows of every parameter on each of `ranks`."""
        return sum(matrix.padded(ranks) * number for matrix, number in self.matrices)


def units(network: Stacks) -> list[Unit]:
    """Return what is in no block, then the blocks in the order of forward."""
    blocks = [block for stack in network.stacks for block in _blocks(network, stack)]
    counted = [_count(None, _outside(network)), *(_count(number, found) for number, found in enumerate(blocks))]
    return list(counted)


def count_part_elements(network: Stacks, parts: Sequence[Part], tensor: int = 1) -> int:
    """Return the elements of a rank's parameters that has these parts, one of `tensor` slices of each matrix: what
    several of its parts use counts once. A table of position biases is wherever a block of its stack is, a tied
    embedding at both ends. Norms, learned positions and the bias of a sub-layer's last matrix are not sliced."""
    starts, ends = any(part.first for part in parts), any(part.last for part in parts)
    sliced, whole = network.table * ((starts or ends) if network.tied else starts + ends), 0
    layers = [stack.layers for stack in network.stacks]
    for place, stack in enumerate(network.stacks):
        here = {block for part in parts for block in part.blocks(layers)[place]}
        rows, columns = stack.bias_table or (0, 0)
        unsliced = sum(sum(network.norm_sizes) + network.width * sub_layer.biases for sub_layer in stack.block)
        everything = sum(sum(list_part_sizes(network, sub_layer)) for sub_layer in stack.block)
        sliced += len(here) * (everything - unsliced) + rows * columns * bool(here)
        whole += len(here) * unsliced + sum(network.norm_sizes) * (stack.layers - 1 in here)
        whole += stack.positions * network.width * starts
    return sliced // tensor + whole


def _count(block: int | None, matrices: Iterator[Matrix] | list[Matrix]) -> Unit:
    return Unit(block, tuple(Counter(matrices).items()))


def _outside(network: Stacks) -> Iterator[Matrix]:
    """Embedding, head, learned positions, and the last norm of each stack."""
    yield from [Matrix(network.vocab, network.width)] * (1 if network.tied else 2)
    for stack in network.stacks:
        yield from [Matrix(stack.positions, network.width)] * (stack.positions > 0)
        yield from _norm(network)


def _blocks(network: Stacks, stack: Stack) -> Iterator[list[Matrix]]:
    """A stack's blocks; the first one has the position bias of all."""
    block = [*itertools.chain(*(_part(network, part) for part in stack.block))]
    bias = [Matrix(*table) for table in [stack.bias_table] if table]
    for layer in range(stack.layers):
        yield [*block, *(bias if layer == 0 else [])]


def _part(network: Stacks, part: Attention | Mlp) -> Iterator[Matrix]:
    """A sub-layer with its norm. torch's linear keeps what maps rows of k numbers to rows of n as n rows."""
    yield from _norm(network)
    for inputs, outputs in part.matrices(network.width):
        yield Matrix(outputs, inputs)
        yield from [Matrix(outputs, 1)] * part.biases


def _norm(network: Stacks) -> Iterator[Matrix]:
    yield from (Matrix(size, 1) for size in network.norm_sizes)
