"""A model family's network as sizes, for prediction, pipeline partitions and tensor slices of any family.

A family describes its network once, as `Stacks`. This module derives parameters, modules and units (the blocks, the
embedding and the head); bench.predict derives FLOPs, memory and time. Objectives define the kinds of tokens.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Activation = Literal["relu", "gelu", "gelu_new", "silu"]
"""Names as in transformers: gelu_new is implemented in Python, the others are kernels of torch."""


@dataclass(frozen=True)
class Attention:
    """An attention sub-layer: projections to queries, keys and values, and an output projection."""

    heads: int
    head_width: int  # elements of a query, key or value; heads × head_width may differ from the network's width
    over: str | None = None  # name of the stack whose output gives keys and values; None: its own tokens
    causal: bool = False  # a token attends to itself and earlier tokens only
    position_bias: int = 0  # rows of a learned table, added to scores by distance; one per stack; 0: none
    zero_bias: bool = False  # adds a tensor of zeros in place of such a bias, as transformers' T5 does
    bias_per_layer: bool = False  # every layer has its own table, or makes its own zeros
    fused: bool = False  # one matrix for queries, keys and values; over another stack, one for keys and values
    biases: bool = False  # of the projections
    key_heads: int | None = None  # heads of keys and values, each shared by a group of query heads; None: `heads`
    rotary: bool = False  # rotates queries and keys by their position

    @property
    def inner(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def key_inner(self) -> int:
        """Width of the keys, and of the values, of all their heads."""
        return (self.key_heads or self.heads) * self.head_width

    def matrices(self, width: int) -> list[tuple[int, int]]:
        """Return the projections from k to n elements as (k, n), in the order of forward."""
        if not self.fused:
            projections = [(width, self.inner), *[(width, self.key_inner)] * 2]
        elif self.over is None:
            projections = [(width, self.inner + 2 * self.key_inner)]
        else:
            projections = [(width, self.inner), (width, 2 * self.key_inner)]
        return [*projections, (self.inner, width)]


@dataclass(frozen=True)
class Mlp:
    """A feed-forward sub-layer."""

    inner: int  # elements between its matrices
    activation: Activation
    gated: bool = False  # a second product of the input multiplies the activation
    inner_dropout: bool = False  # before the last matrix; after it there always is one
    biases: bool = False

    def matrices(self, width: int) -> list[tuple[int, int]]:
        """Return the matrices as (k, n), in the order of forward."""
        return [(width, self.inner)] * (2 if self.gated else 1) + [(self.inner, width)]


@dataclass(frozen=True)
class Stack:
    """Equal blocks between an embedding of tokens and a last norm. Activation checkpointing recomputes whole blocks.

    Each sub-layer of a block has a norm before it, and dropout and the residual sum after it.
    """

    name: str
    tokens: str  # kind of its tokens
    layers: int
    block: tuple[Attention | Mlp, ...]
    positions: int = 0  # rows of a table of learned positions; 0: none

    @property
    def bias_table(self) -> tuple[int, int] | None:
        """Rows and columns of the learned position bias of all blocks, which the first block owns; None without one."""
        found = (part for part in self.block if isinstance(part, Attention) and not part.bias_per_layer)
        return next(((part.position_bias, part.heads) for part in found if part.position_bias), None)

    @property
    def attended(self) -> list[str]:
        """Names of the other stacks to whose output it attends, each once."""
        over = [part.over for part in self.block if isinstance(part, Attention) and part.over is not None]
        return list(dict.fromkeys(over))


@dataclass(frozen=True)
class Stacks:
    """A network: stacks in the order of forward with a shared embedding of the vocabulary, and a head on the last.

    Weights have the run's precision, as in modules of torch and transformers.
    """

    vocab: int
    width: int  # elements of a token's state
    stacks: tuple[Stack, ...]
    tied: bool  # the head is the embedding
    # rms: implemented in Python, a scale; rms_wide: the same in fp32, except the scale; layer: torch's kernel, a scale
    # and a shift
    norm: Literal["rms", "rms_wide", "layer"]
    final_dropout: bool = False  # after a stack's last norm
    clamps_fp16: bool = False  # clamps fp16 activations after each sub-layer
    full_loss: bool = False  # converts logits to fp32 before the loss
    discarded: int = 0  # elements allocated and discarded by building: embeddings replaced by a shared one

    @property
    def table(self) -> int:
        """Elements of the embedding, and of a head."""
        return self.vocab * self.width

    def named(self, name: str) -> Stack:
        """Return the stack of this name."""
        return next(stack for stack in self.stacks if stack.name == name)

    @property
    def norm_sizes(self) -> list[int]:
        """Elements of each parameter of a norm."""
        return [self.width, self.width] if self.norm == "layer" else [self.width]


class EqualTensors(NamedTuple):
    """Parameters of equal size."""

    elements: int
    number: int


class WeightModule(NamedTuple):
    """A module at which ZeRO's stage 3 gathers its weight, and prefetches later ones."""

    segment: int  # of its forward, counted in the order of forward
    weight: int | None = None  # number of its parameter, the same for a shared one; None: no parameter of its own
    size: int = 0  # index of the weight's size in `tensors`
    block: int | None = None  # recomputed together by checkpointing
    indexed: bool = False  # its input are indices
    completes: bool = True  # its backward completes the weight's gradient
    joined: bool = False  # a further parameter of the previous module


def list_tensors(network: Stacks) -> list[EqualTensors]:
    """Return the parameters by size; a shared parameter counts once."""
    counts = Counter({network.table: 1 if network.tied else 2})
    for stack in network.stacks:
        counts.update(network.norm_sizes)
        # A stack has one table for all of its blocks, so that it counts once.
        counts.update([rows * columns for rows, columns in [stack.bias_table or (0, 0)] if rows])
        counts.update([stack.positions * network.width] * (stack.positions > 0))
        for part in stack.block:
            for size in list_part_sizes(network, part):
                counts[size] += stack.layers
    return [EqualTensors(elements, number) for elements, number in counts.items()]


def list_part_sizes(network: Stacks, part: Attention | Mlp) -> list[int]:
    """Return the elements of a sub-layer's parameters, its norm's first, without a position bias shared by blocks."""
    sizes = [*network.norm_sizes, *itertools.chain(*_list_linears(network, part))]
    if isinstance(part, Attention) and part.bias_per_layer and part.position_bias:
        sizes.append(part.position_bias * part.heads)
    return sizes


def count_parameters(network: Stacks) -> int:
    """Return the number of trainable parameters; a shared parameter counts once."""
    return sum(size.elements * size.number for size in list_tensors(network))


def list_matrices(network: Stacks) -> set[tuple[int, int]]:
    """Return the distinct (k, n) of all matrices: each maps rows of k elements to rows of n."""
    parts = {part for stack in network.stacks for part in stack.block}
    inside = {matrix for part in parts for matrix in part.matrices(network.width)}
    return inside | {(network.width, network.vocab)}


def _list_linears(network: Stacks, part: Attention | Mlp) -> list[list[int]]:
    """Return the elements of each matrix, and of its bias if it has one."""
    return [[k * n, n] if part.biases else [k * n] for k, n in part.matrices(network.width)]


class _Weight(NamedTuple):
    """A parameter of a module; 0 elements: the module has none."""

    elements: int = 0
    indexed: bool = False
    joined: bool = False  # its module has another parameter before it


_PLAIN = _Weight()
"""A block's sub-layer, an activation or a dropout: modules without parameters, at which stage 3 acts as well."""


def list_modules(network: Stacks) -> list[WeightModule]:
    """Return the modules in the order of forward; a module with several parameters appears once for each."""
    # Sizes identify tensors: stage 3 treats parameters of one size alike.
    places = {size.elements: place for place, size in enumerate(list_tensors(network))}
    table = places[network.table]
    weights = itertools.count(1)  # 0: the embedding
    found = [WeightModule(0, 0, table, indexed=True)]  # the embedding's gradient is complete here
    segment = 0
    for segment, (block, modules) in enumerate(_list_segments(network), 1):
        if block is None and modules[0].indexed:  # a stack's embedding
            found.append(WeightModule(segment, 0, table, indexed=True, completes=False))
            modules = modules[1:]
        for elements, indexed, joined in modules:
            if elements:
                place = places[elements]
                found.append(WeightModule(segment, next(weights), place, block, indexed=indexed, joined=joined))
            else:
                found.append(WeightModule(segment, block=block))
    own = not network.tied
    found.append(WeightModule(segment + 1, next(weights) if own else 0, table, completes=own))
    return [*found, WeightModule(segment + 2)]


def _list_segments(network: Stacks) -> Iterator[tuple[int | None, list[_Weight]]]:
    """Yield the number of the block and the modules of each segment between the embedding and the head."""
    blocks = itertools.count()
    norms = _join(network.norm_sizes)
    # The order is that of forward, in which ZeRO traces modules.
    for stack in network.stacks:
        positions = [_Weight(stack.positions * network.width, indexed=True)] * (stack.positions > 0)
        yield None, [_Weight(network.table, indexed=True), *positions]
        for layer in range(stack.layers):
            block = next(blocks)
            for part in stack.block:
                yield block, [_PLAIN, *norms, _PLAIN, *_list_part_weights(network, part, layer), _PLAIN]
        yield None, [*norms, _PLAIN]


def _list_part_weights(network: Stacks, part: Attention | Mlp, layer: int) -> list[_Weight]:
    first, *middle, last = map(_join, _list_linears(network, part))
    if isinstance(part, Mlp):
        return [*first, _PLAIN, *itertools.chain(*middle), *[_PLAIN] * part.inner_dropout, *last]
    rows = part.position_bias if layer == 0 or part.bias_per_layer else 0
    bias = [_Weight(rows * part.heads, indexed=True)] * (rows > 0)
    return [*first, *itertools.chain(*middle), *bias, *last]


def _join(sizes: Sequence[int]) -> list[_Weight]:
    """Return the parameters of one module."""
    return [_Weight(size, joined=place > 0) for place, size in enumerate(sizes)]


def pad_elements(elements: int, ranks: int) -> int:
    """Return the elements of a tensor padded to the same number on each of `ranks`."""
    return -(-elements // ranks) * ranks


class Part(NamedTuple):
    """Consecutive units of a model for a pipeline: unit 0 is the embedding, then come the blocks in the order of
    forward, then the head. A stack's last norm belongs to its last block."""

    begin: int
    end: int  # exclusive
    units: int  # of the whole model

    @property
    def first(self) -> bool:
        return self.begin == 0

    @property
    def last(self) -> bool:
        return self.end == self.units

    def blocks(self, layers: Sequence[int]) -> list[range]:
        """Return the numbers of its blocks for each stack; `layers` are the numbers of blocks of the stacks."""
        found, before = list[range](), 1  # the embedding
        for count in layers:
            # Edges are unit numbers over the whole model; clamp them to this stack.
            begin, end = (min(max(edge - before, 0), count) for edge in (self.begin, self.end))
            found.append(range(begin, end))
            before += count
        return found


class Matrix(NamedTuple):
    """A parameter as rows and columns, as torch stores it; a vector has one column."""

    rows: int
    columns: int

    def padded(self, ranks: int) -> int:
        """Return the elements after padding to the same number of rows on each of `ranks`."""
        return pad_elements(self.rows, ranks) * self.columns


class Unit(NamedTuple):
    """Parameters that are gathered together, as pairs of a size and the number of parameters of that size."""

    block: int | None  # its number in the order of forward, over all stacks; None: outside all blocks
    matrices: tuple[tuple[Matrix, int], ...]

    @property
    def elements(self) -> int:
        return self.padded(1)

    def padded(self, ranks: int) -> int:
        """Return the elements after padding every parameter to the same number of rows on each of `ranks`."""
        return sum(matrix.padded(ranks) * number for matrix, number in self.matrices)


def units(network: Stacks) -> list[Unit]:
    """Return the unit of all parameters outside blocks, then the blocks in the order of forward."""
    norm = [Matrix(size, 1) for size in network.norm_sizes]
    outside = [Matrix(network.vocab, network.width)] * (1 if network.tied else 2)
    blocks = []
    for stack in network.stacks:
        outside += [Matrix(stack.positions, network.width)] * (stack.positions > 0) + norm
        block = [matrix for part in stack.block for matrix in [*norm, *_list_part_matrices(network, part)]]
        bias = [Matrix(*stack.bias_table)] if stack.bias_table else []  # the first block owns the bias of all
        blocks += [block + bias * (layer == 0) for layer in range(stack.layers)]
    numbered = [(None, outside), *enumerate(blocks)]
    return [Unit(block, tuple(Counter(matrices).items())) for block, matrices in numbered]


def _list_part_matrices(network: Stacks, part: Attention | Mlp) -> Iterator[Matrix]:
    """Yield the parameters of a sub-layer without its norm. torch's linear from k to n elements has n rows."""
    for inputs, outputs in part.matrices(network.width):
        yield Matrix(outputs, inputs)
        yield from [Matrix(outputs, 1)] * part.biases


def count_part_elements(network: Stacks, parts: Sequence[Part], tensor: int = 1) -> int:
    """Return the elements of the parameters of a rank that has these parts and one of `tensor` slices of each matrix.

    Parameters that several of its parts use count once. A table of position biases is wherever a block of its stack is,
    a tied embedding at both ends. Norms, learned positions and the bias of a sub-layer's last matrix are not sliced.
    """
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
    # Tensor parallelism divides only `sliced`; every rank of a group has all of `whole`.
    return sliced // tensor + whole


PAD = 0
"""Token id that pads short rows of inputs, in every family."""
IGNORED = -100
"""Label without a loss, as in transformers and torch."""


class TokenKind(NamedTuple):
    """Tokens of one kind in each sample of an objective."""

    name: str  # in `sequence`, in the tokens of a record and in the columns of its steps
    length: int  # default tokens per sample, padding included
    arguments: Mapping[str, int]  # keyword arguments of the model that hold them, each with its padding value
    mask: str | None = None  # keyword argument that is 1 at a token and 0 at padding; given if rows may be shorter
    # by keyword argument: the share of each row, from its beginning, that is replaced by the padding value
    hidden: Mapping[str, float] = {}
    # the content from a piece of text: all of it, the text around hidden spans, the spans; None: not from one text
    text: Literal["whole", "kept", "hidden"] | None = "whole"
    # keyword argument with a token's place in its document; if given, no token sees another document's
    positions: str | None = None
