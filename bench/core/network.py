"""Networks of model families, described by their sizes, for prediction, pipeline partitions and tensor slices.

A family describes its network once, as `Stacks`. From this description, the module derives parameters, modules and
units (the embedding, each block, and the head). The package bench.predict derives FLOPs, memory and time from the same
description. The module also defines `TokenKind`, with which a training objective describes the tokens of its samples.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.core.adapted import Adapter

Activation = Literal["relu", "gelu", "gelu_new", "silu"]
"""Activation functions, named as in transformers. gelu_new is implemented in Python; the others are kernels of torch.
"""


@dataclass(frozen=True)
class Attention:
    """An attention sub-layer: projections to queries, keys and values, and an output projection."""

    heads: int
    head_width: int  # elements of a query, key or value; heads × head_width may differ from the network's width
    over: str | None = None  # name of the stack whose output gives keys and values; None: its own tokens
    causal: bool = False  # a token attends to itself and earlier tokens only
    position_bias: int = 0  # rows of the stack's learned table of biases, added to scores by distance; 0: no table
    zero_bias: bool = False  # adds a tensor of zeros in place of the position bias, as transformers' T5 does
    bias_per_layer: bool = False  # True: every layer has its own table or zeros; False: all use the first layer's
    fused: bool = False  # one matrix gives queries, keys and values; in cross-attention, keys and values
    biases: bool = False  # True: the projections have bias parameters
    key_heads: int | None = None  # heads of keys and values, each shared by a group of query heads; None: `heads`
    rotary: bool = False  # rotates queries and keys by their position
    names: tuple[str, ...] = ()  # names of the projections in forward order, for the choice of adapted matrices

    @property
    def inner(self) -> int:
        """Total width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def key_inner(self) -> int:
        """Total width of the keys of all heads. The values have the same total width."""
        return (self.key_heads or self.heads) * self.head_width

    def matrices(self, width: int) -> list[tuple[int, int]]:
        """Return the shapes of the projections in forward order: (k, n) maps k elements of a token to n elements."""
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

    inner: int  # width between the first and the last matrix
    activation: Activation
    gated: bool = False  # True: the activation is multiplied by a second projection of the input
    inner_dropout: bool = False  # True: dropout before the last matrix, besides the dropout after it
    biases: bool = False
    names: tuple[str, ...] = ()  # names of the matrices in forward order, for the choice of adapted matrices

    def matrices(self, width: int) -> list[tuple[int, int]]:
        """Return the shapes of the matrices in forward order: (k, n) maps k elements of a token to n elements."""
        return [(width, self.inner)] * (2 if self.gated else 1) + [(self.inner, width)]


@dataclass(frozen=True)
class Stack:
    """A stack of equal blocks, such as an encoder or a decoder, between a token embedding and a final norm.

    A block consists of sub-layers. Before each sub-layer there is a norm; after each there are dropout and a residual
    sum. Activation checkpointing recomputes whole blocks.
    """

    name: str
    tokens: str  # kind of tokens that it reads
    layers: int
    block: tuple[Attention | Mlp, ...]
    positions: int = 0  # rows of the table of learned positions; 0: no table

    @property
    def bias_table(self) -> tuple[int, int] | None:
        """Rows and columns of the learned table of position biases that all blocks share. The first block owns this
        parameter. None if there is no such table."""
        found = (part for part in self.block if isinstance(part, Attention) and not part.bias_per_layer)
        return next(((part.position_bias, part.heads) for part in found if part.position_bias), None)

    @property
    def attended(self) -> list[str]:
        """Names of the other stacks that this stack attends to (cross-attention), without duplicates."""
        over = [part.over for part in self.block if isinstance(part, Attention) and part.over is not None]
        return list(dict.fromkeys(over))


@dataclass(frozen=True)
class Stacks:
    """A network: its stacks in forward order, an embedding of the vocabulary that all stacks share, and a head on the
    last stack.

    All weights have the run's precision.
    """

    vocab: int
    width: int  # elements of a token's hidden state
    stacks: tuple[Stack, ...]
    tied: bool  # True: the head shares the embedding's parameter
    # rms: scale only, implemented in Python. rms_wide: like rms, but computes in fp32 except for the scale.
    # layer: scale and shift, by torch's kernel.
    norm: Literal["rms", "rms_wide", "layer"]
    final_dropout: bool = False  # True: dropout after a stack's final norm
    clamps_fp16: bool = False  # True: fp16 activations are clamped after each sub-layer
    full_loss: bool = False  # True: logits are converted to fp32 before the loss
    discarded: int = 0  # elements that building allocates and frees: embeddings replaced by the shared one
    adapter: Adapter | None = None  # None: every parameter is trained; otherwise only the adapters' matrices

    @property
    def trains_all(self) -> bool:
        """True if every parameter is trained."""
        return self.adapter is None

    @property
    def table(self) -> int:
        """Number of elements of the embedding. The head has the same number of elements."""
        return self.vocab * self.width

    def named(self, name: str) -> Stack:
        """Return the stack with this name."""
        return next(stack for stack in self.stacks if stack.name == name)

    @property
    def norm_sizes(self) -> list[int]:
        """Number of elements of each parameter of a norm layer. All norm layers of the network are equal."""
        return [self.width, self.width] if self.norm == "layer" else [self.width]


class EqualTensors(NamedTuple):
    """Parameters that all have the same number of elements and, if they are quantised, the same number of bytes."""

    elements: int
    number: int
    packed: int = 0  # bytes of each if quantised; 0: it has the run's precision


class WeightModule(NamedTuple):
    """A module of the model, as ZeRO stage 3 sees it: before the module runs, its weight is gathered and later weights
    are prefetched."""

    segment: int  # index of its segment in forward order
    weight: int | None = None  # index of its parameter, equal for a shared parameter; None: no parameter
    size: int = 0  # index of the weight's size among the trained tensors, followed by the frozen ones
    block: int | None = None  # index of its block, which checkpointing recomputes as a whole; None: outside blocks
    indexed: bool = False  # True: its inputs are indices, as in an embedding
    completes: bool = True  # True: the weight's gradient is complete after its backward
    joined: bool = False  # True: a further parameter of the previous entry's module


def list_tensors(network: Stacks, *, trained: bool = True) -> list[EqualTensors]:
    """Return the trained parameters or, if `trained` is False, the frozen parameters. They are grouped by number of
    elements and, if quantised, by bytes. A shared parameter counts once."""
    counts = Counter[tuple[int, int]]()
    for matrix, number in _count_matrices(network).items():
        counts[matrix.elements, matrix.packed] += number * (matrix.trained is trained)
    return [EqualTensors(elements, number, packed) for (elements, packed), number in counts.items() if number]


def _count_matrices(network: Stacks) -> Counter["Matrix"]:
    """Return the number of parameters of each shape. A shared parameter counts once."""
    trained = network.trains_all
    counts = Counter({Matrix(network.vocab, network.width, trained): 1 if network.tied else 2})
    for stack in network.stacks:
        counts.update(Matrix(size, 1, trained) for size in network.norm_sizes)
        # All blocks of a stack share one table, so it counts once.
        counts.update([Matrix(*stack.bias_table, trained)] if stack.bias_table else [])
        counts.update([Matrix(stack.positions, network.width, trained)] * (stack.positions > 0))
        for part in stack.block:
            for matrix in list_part_matrices(network, part):
                counts[matrix] += stack.layers
    return counts


def list_part_matrices(network: Stacks, part: Attention | Mlp) -> list["Matrix"]:
    """Return the parameters of a sub-layer and of the norm before it, the norm first. A position bias that several
    blocks share is excluded. Shapes are those of torch, which stores a linear layer from k to n elements as (n, k)."""
    trained, found = network.trains_all, list[Matrix]()
    for name, (inputs, outputs) in list_named_matrices(network, part):
        packed = 0 if network.adapter is None else network.adapter.packed_bytes(name, outputs, inputs)
        found += [Matrix(outputs, inputs, trained, packed), *[Matrix(outputs, 1, trained)] * part.biases]
        if network.adapter is not None and network.adapter.adapts(name):
            found += [Matrix(network.adapter.rank, inputs), Matrix(outputs, network.adapter.rank)]
    if isinstance(part, Attention) and part.bias_per_layer and part.position_bias:
        found.append(Matrix(part.position_bias, part.heads, trained))
    return [*(Matrix(size, 1, trained) for size in network.norm_sizes), *found]


def list_named_matrices(network: Stacks, part: Attention | Mlp) -> list[tuple[str, tuple[int, int]]]:
    """Return name and shape (k, n) of each matrix of a sub-layer in forward order. A name is empty if the model family
    does not name its matrices."""
    shapes = part.matrices(network.width)
    return list(zip(part.names or [""] * len(shapes), shapes, strict=True))


def count_parameters(network: Stacks) -> int:
    """Return the number of elements of all parameters, trained or frozen. A shared parameter counts once."""
    return sum(matrix.elements * number for matrix, number in _count_matrices(network).items())


def count_trained_parameters(network: Stacks) -> int:
    """Return the number of elements of the trained parameters."""
    return sum(size.elements * size.number for size in list_tensors(network))


def list_matrices(network: Stacks) -> set[tuple[int, int]]:
    """Return the distinct shapes (k, n) of all matrices, head included. A matrix maps k elements of a token to n
    elements."""
    parts = {part for stack in network.stacks for part in stack.block}
    inside = {matrix for part in parts for matrix in part.matrices(network.width)}
    return inside | {(network.width, network.vocab)}


class _Weight(NamedTuple):
    """A parameter of a module. A module without parameters is an entry with 0 elements."""

    elements: int = 0
    trained: bool = True
    indexed: bool = False
    joined: bool = False  # True: its module has another parameter before it


_PLAIN = _Weight()
"""A module without parameters: a block's sub-layer, an activation or a dropout. ZeRO stage 3 runs its hooks at these
modules, too."""


def list_modules(network: Stacks) -> list[WeightModule]:
    """Return the modules in forward order. A module with several parameters has one entry per parameter."""
    # A parameter is identified by its size, because stage 3 treats parameters of one size alike.
    sizes = [(size.elements, True) for size in list_tensors(network)]
    sizes += [(size.elements, False) for size in list_tensors(network, trained=False)]
    places = {size: place for place, size in reversed(list(enumerate(sizes)))}
    trained = network.trains_all
    table = places[network.table, trained]
    weights = itertools.count(1)  # weight 0 is the embedding
    # All stacks share the embedding, so its gradient is complete only after the backward of this first module.
    found = [WeightModule(0, 0, table, indexed=True, completes=trained)]
    segment = 0
    for segment, (block, modules) in enumerate(_list_segments(network), 1):
        if block is None and modules[0].indexed:  # the embedding at the beginning of a stack
            found.append(WeightModule(segment, 0, table, indexed=True, completes=False))
            modules = modules[1:]
        for one in modules:
            if one.elements:
                place = places[one.elements, one.trained]
                flags = one.indexed, one.trained, one.joined
                found.append(WeightModule(segment, next(weights), place, block, *flags))
            else:
                found.append(WeightModule(segment, block=block))
    own = not network.tied
    found.append(WeightModule(segment + 1, next(weights) if own else 0, table, completes=own and trained))
    return [*found, WeightModule(segment + 2)]


def _list_segments(network: Stacks) -> Iterator[tuple[int | None, list[_Weight]]]:
    """Yield the segments between the first embedding and the head. A segment is a pair: the index of its block (None
    outside blocks) and its modules."""
    blocks, trained = itertools.count(), network.trains_all
    norms = _join([Matrix(size, 1, trained) for size in network.norm_sizes])
    # The order is that of forward, in which ZeRO traces modules.
    for stack in network.stacks:
        positions = [_Weight(stack.positions * network.width, trained, indexed=True)] * (stack.positions > 0)
        yield None, [_Weight(network.table, trained, indexed=True), *positions]
        for layer in range(stack.layers):
            block = next(blocks)
            for part in stack.block:
                yield block, [_PLAIN, *norms, _PLAIN, *_list_part_weights(network, part, layer), _PLAIN]
        yield None, [*norms, _PLAIN]


def _list_part_weights(network: Stacks, part: Attention | Mlp, layer: int) -> list[_Weight]:
    first, *middle, last = (_list_matrix_weights(network, part, *named) for named in list_named_matrices(network, part))
    if isinstance(part, Mlp):
        return [*first, _PLAIN, *itertools.chain(*middle), *[_PLAIN] * part.inner_dropout, *last]
    rows = part.position_bias if layer == 0 or part.bias_per_layer else 0
    bias = [_Weight(rows * part.heads, network.trains_all, indexed=True)] * (rows > 0)
    return [*first, *itertools.chain(*middle), *bias, *last]


def _list_matrix_weights(network: Stacks, part: Attention | Mlp, name: str, shape: tuple[int, int]) -> list[_Weight]:
    """Return entries for the matrix `name` in a sub-layer (`part`), in forward order. Each parameter has an entry. A
    module without parameters also has an entry, with 0 elements.

    With an adapter, the matrix belongs to a module lora.Linear of peft. The entries are then lora.Linear (0 elements),
    the matrix with its bias, the dropout (0 elements), and the adapter's two matrices.
    """
    (inputs, outputs), adapter = shape, network.adapter
    own = _join([Matrix(size, 1, adapter is None) for size in (inputs * outputs, *[outputs] * part.biases)])
    if adapter is None or not adapter.adapts(name):
        return own
    return [_PLAIN, *own, _PLAIN, _Weight(adapter.rank * inputs), _Weight(outputs * adapter.rank)]


def _join(parameters: Sequence["Matrix"]) -> list[_Weight]:
    """Return the parameters of one module, such as a matrix and its bias, as entries. All but the first are marked as
    `joined`, which means that their module has another parameter before them."""
    return [_Weight(one.elements, one.trained, joined=place > 0) for place, one in enumerate(parameters)]


def pad_elements(elements: int, ranks: int) -> int:
    """Return the number of elements of a tensor after padding it to a multiple of `ranks`."""
    return -(-elements // ranks) * ranks


class Part(NamedTuple):
    """A part of a model for pipeline parallelism: a range of consecutive units. Unit 0 is the embedding, the next units
    are the blocks in forward order, and the last unit is the head. A stack's final norm belongs to its last block."""

    begin: int
    end: int  # exclusive
    units: int  # number of units of the whole model

    @property
    def first(self) -> bool:
        return self.begin == 0

    @property
    def last(self) -> bool:
        return self.end == self.units

    def blocks(self, layers: Sequence[int]) -> list[range]:
        """Return, for each stack, the indices of its blocks in this part. `layers` is the number of blocks of each
        stack."""
        found, before = list[range](), 1  # unit 0 is the embedding
        for count in layers:
            # Both edges are unit indices in the whole model. Clamp them to the blocks of this stack.
            begin, end = (min(max(edge - before, 0), count) for edge in (self.begin, self.end))
            found.append(range(begin, end))
            before += count
        return found


class Matrix(NamedTuple):
    """A parameter with its shape as torch stores it. A vector has one column."""

    rows: int
    columns: int
    trained: bool = True
    packed: int = 0  # bytes if quantised; 0: it has the run's precision

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def padded(self, ranks: int) -> int:
        """Return the number of elements after the number of rows is rounded up to a multiple of `ranks`."""
        return pad_elements(self.rows, ranks) * self.columns


class Unit(NamedTuple):
    """An FSDP unit: parameters that FSDP gathers together. `matrices` are pairs of a shape and the number of parameters
    of that shape."""

    block: int | None  # index of the block over all stacks; None: the unit outside all blocks
    matrices: tuple[tuple[Matrix, int], ...]

    @property
    def elements(self) -> int:
        return self.padded(1)

    def padded(self, ranks: int, *, frozen: bool = True) -> int:
        """Return the number of elements after the number of rows of every parameter is rounded up to a multiple of
        `ranks`. If `frozen` is False, only trained parameters count."""
        return sum(one.padded(ranks) * number for one, number in self.matrices if frozen or one.trained)


def units(network: Stacks) -> list[Unit]:
    """Return the FSDP units of a network: the unit of all parameters outside blocks, then each block in order."""
    trained = network.trains_all
    norm = [Matrix(size, 1, trained) for size in network.norm_sizes]
    outside = [Matrix(network.vocab, network.width, trained)] * (1 if network.tied else 2)
    blocks = []
    for stack in network.stacks:
        outside += [Matrix(stack.positions, network.width, trained)] * (stack.positions > 0) + norm
        block = [matrix for part in stack.block for matrix in list_part_matrices(network, part)]
        # The first block owns the bias that all blocks share.
        bias = [Matrix(*stack.bias_table, trained)] if stack.bias_table else []
        blocks += [block + bias * (layer == 0) for layer in range(stack.layers)]
    numbered = [(None, outside), *enumerate(blocks)]
    return [Unit(block, tuple(Counter(matrices).items())) for block, matrices in numbered]


def count_part_elements(network: Stacks, parts: Sequence[Part], tensor: int = 1) -> int:
    """Return the number of parameter elements on a rank with the pipeline parts `parts`. Each matrix is divided into
    `tensor` slices, and the rank has one slice of each matrix.

    A parameter that several parts of the rank use counts once. A table of position biases is in every part with a block
    of its stack. A tied embedding is in the first and the last part. Norms, learned positions and the bias of a
    sub-layer's last matrix are not sliced.
    """
    starts, ends = any(part.first for part in parts), any(part.last for part in parts)
    sliced, whole = network.table * ((starts or ends) if network.tied else starts + ends), 0
    layers = [stack.layers for stack in network.stacks]
    for place, stack in enumerate(network.stacks):
        here = {block for part in parts for block in part.blocks(layers)[place]}
        rows, columns = stack.bias_table or (0, 0)
        unsliced = sum(sum(network.norm_sizes) + network.width * sub_layer.biases for sub_layer in stack.block)
        everything = sum(m.elements for sub_layer in stack.block for m in list_part_matrices(network, sub_layer))
        sliced += len(here) * (everything - unsliced) + rows * columns * bool(here)
        whole += len(here) * unsliced + sum(network.norm_sizes) * (stack.layers - 1 in here)
        whole += stack.positions * network.width * starts
    # Tensor parallelism divides only `sliced`; every rank of a tensor-parallel group has all of `whole`.
    return sliced // tensor + whole


PAD = 0
"""Token id of padding in inputs, for every model family."""
IGNORED = -100
"""Label of a token that does not contribute to the loss, as in transformers and torch."""


class TokenKind(NamedTuple):
    """One kind of tokens in the samples of an objective, such as encoder or decoder tokens."""

    name: str  # used in `sequence`, in the token counts of a record and in the columns of its steps
    length: int  # default tokens per sample, padding included
    arguments: Mapping[str, int]  # the model's keyword arguments with these tokens, and their padding values
    mask: str | None = None  # keyword argument with 1 for tokens and 0 for padding; given if rows may be short
    # By keyword argument: the share of each row, from its beginning, that the padding value replaces.
    hidden: Mapping[str, float] = {}
    # Part of a piece of text that these tokens come from: all of it, the text around hidden spans, or the hidden spans.
    # None: these tokens are not made from the same piece of text.
    text: Literal["whole", "kept", "hidden"] | None = "whole"
    # Keyword argument with a token's position in its document. If given, no token attends to another document.
    positions: str | None = None
