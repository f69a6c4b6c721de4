"""What of a network is gathered, or lies on a stage, as one: every block of layers, and all that is in no block."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from bench.stacks import Attention, Mlp, Stack, Stacks


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
