"""A model family's network as sizes, for prediction, pipeline cuts and tensor slices of any family.

A family describes its network once, as `Stacks`. Parameters, modules and units (the blocks, the embedding and the head)
follow here; FLOPs, memory and time in bench.predict. Token kinds are those that objectives define.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Activation = Literal["relu", "gelu", "gelu_new", "silu"]
"""As transformers calls them: gelu_new is written out in Python, the others are torch's own."""


@dataclass(frozen=True)
class Attention:
    """A sub-layer that attends: projections to queries, keys and values, and one back."""

    heads: int
    head_width: int  # elements of a query, key or value; heads × head_width need not be the network's width
    over: str | None = None  # name of the stack whose output gives keys and values; None: its own tokens
    causal: bool = False  # a token attends to none behind it
    position_bias: int = 0  # rows of a learned table that is added to scores by distance, one per stack; 0: none
    zero_bias: bool = False  # a tensor of zeros is added in place of such a bias, as transformers' T5 does it
    bias_per_layer: bool = False  # every layer has such a table of its own, or makes such zeros anew
    fused: bool = False  # one matrix for queries, keys and values, of other tokens for keys and values
    biases: bool = False  # of the projections
    key_heads: int | None = None  # heads of keys and values, each for a group of queries' heads; None: as many as those
    rotary: bool = False  # queries and keys are rotated by their position

    @property
    def inner(self) -> int:
        """Width of queries over all heads."""
        return self.heads * self.head_width

    @property
    def key_inner(self) -> int:
        """Width of keys, and of values, over all their heads."""
        return (self.key_heads or self.heads) * self.head_width

    @property
    def grouped(self) -> bool:
        """Whether several heads of queries share one of keys and values."""
        return self.key_inner < self.inner

    def matrices(self, width: int) -> list[tuple[int, int]]:
        """Return the projections of rows of k numbers to rows of n as (k, n), in the order of forward."""
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
    gated: bool = False  # the activation is multiplied by a second product of the input
    inner_dropout: bool = False  # before the last matrix; behind it there is one always
    biases: bool = False

    def matrices(self, width: int) -> list[tuple[int, int]]:
        """Return the matrices as (k, n), in the order of forward."""
        return [(width, self.inner)] * (2 if self.gated else 1) + [(self.inner, width)]


@dataclass(frozen=True)
class Stack:
    """Equal blocks between the embedding of their tokens and a last norm; a block is what checkpointing runs again.

    Each sub-layer of a block has a norm before it, dropout and the residual sum behind it.
    """

    name: str
    tokens: str  # kind of the tokens that run through it
    layers: int
    block: tuple[Attention | Mlp, ...]
    positions: int = 0  # rows of a table of learned positions; 0: none

    @property
    def bias_table(self) -> tuple[int, int] | None:
        """Rows and columns of the learned position bias that all blocks share; None: none. The first block owns it."""
        found = (part for part in self.block if isinstance(part, Attention) and not part.bias_per_layer)
        return next(((part.position_bias, part.heads) for part in found if part.position_bias), None)

    @property
    def attended(self) -> list[str]:
        """Names of the other stacks whose output is attended to, each once."""
        over = [part.over for part in self.block if isinstance(part, Attention) and part.over is not None]
        return list(dict.fromkeys(over))


@dataclass(frozen=True)
class Stacks:
    """A network: stacks in the order of forward, which share one embedding of the vocabulary, and a head on the last.

    Weights lie in the run's precision, as torch's and transformers' modules have them.
    """

    vocab: int
    width: int  # elements of a token's state
    stacks: tuple[Stack, ...]
    tied: bool  # the head is the embedding
    # rms: written out in Python, a scale; rms_wide: the same, all of it but the scale in fp32; layer: torch's kernel, a
    # scale and a shift
    norm: Literal["rms", "rms_wide", "layer"]
    final_dropout: bool = False  # behind a stack's last norm
    clamps_fp16: bool = False  # activations are clamped behind each sub-layer, where they are fp16
    full_loss: bool = False  # logits are made fp32 before the loss
    discarded: int = 0  # elements that building allocates and throws away, embeddings that then are shared

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocab * self.width

    def named(self, name: str) -> Stack:
        """Return the stack of this name."""
        return next(stack for stack in self.stacks if stack.name == name)

    @property
    def norm_sizes(self) -> list[int]:
        """Elements of a norm's parameters."""
        return [self.width, self.width] if self.norm == "layer" else [self.width]


class EqualTensors(NamedTuple):
    """Parameters of one size."""

    elements: int
    number: int


class WeightModule(NamedTuple):
    """A module at which ZeRO's stage 3 stops to gather its weight, and others ahead."""

    segment: int  # in which its forward runs, counted in the order of forward
    weight: int | None = None  # one number for each parameter, shared ones have the same; None: it has none of its own
    size: int = 0  # of the weight: which of `tensors`
    block: int | None = None  # that checkpointing runs again
    indexed: bool = False  # its input are indices
    completes: bool = True  # its backward completes the weight's gradient
    joined: bool = False  # a further parameter of the module before it


def list_tensors(network: Stacks) -> list[EqualTensors]:
    """Return the parameters by size; those shared count once."""
    counts = Counter({network.table: 1 if network.tied else 2})
    for stack in network.stacks:
        counts.update(network.norm_sizes)
        counts.update([rows * columns for rows, columns in [stack.bias_table or (0, 0)] if rows])
        counts.update([stack.positions * network.width] * (stack.positions > 0))
        for part in stack.block:
            for size in list_part_sizes(network, part):
                counts[size] += stack.layers
    return [EqualTensors(elements, number) for elements, number in counts.items()]


def list_part_sizes(network: Stacks, part: Attention | Mlp) -> list[int]:
    """Return the elements of a sub-layer's parameters, those of its norm first, without a position bias that blocks
    share."""
    return [*network.norm_sizes, *itertools.chain(*_list_linears(network, part)), *own_bias(part)]


def own_bias(part: Attention | Mlp) -> list[int]:
    """Return the elements of a position bias that each layer has for itself; nothing where there is none."""
    has = isinstance(part, Attention) and part.bias_per_layer and part.position_bias
    return [part.position_bias * part.heads] if has and isinstance(part, Attention) else []


def count_parameters(network: Stacks) -> int:
    """Return the trainable parameters, those shared counted once."""
    return sum(size.elements * size.number for size in list_tensors(network))


def list_matrices(network: Stacks) -> set[tuple[int, int]]:
    """Return the distinct (k, n) of all matrices: each maps rows of k numbers to rows of n."""
    parts = {part for stack in network.stacks for part in stack.block}
    inside = {matrix for part in parts for matrix in part.matrices(network.width)}
    return inside | {(network.width, network.vocab)}


def _list_linears(network: Stacks, part: Attention | Mlp) -> list[list[int]]:
    """Return the elements of each matrix, and of its bias where it has one."""
    return [[k * n, n] if part.biases else [k * n] for k, n in part.matrices(network.width)]


class _Weight(NamedTuple):
    """A parameter in its module; `elements` 0: the module has none."""

    elements: int = 0
    indexed: bool = False
    joined: bool = False  # its module has another before it


_PLAIN = _Weight()
"""A layer, an activation or a dropout, which are stops too."""


def list_modules(network: Stacks) -> list[WeightModule]:
    """Return the modules in the order of forward; a module with several parameters is as many stops."""
    places = {size.elements: place for place, size in enumerate(list_tensors(network))}
    table = places[network.table]
    weights = itertools.count(1)  # 0: the embedding
    found = [WeightModule(0, 0, table, indexed=True)]  # where its gradient is complete
    segment = 0
    for segment, (block, stops) in enumerate(_list_segments(network), 1):
        if block is None and stops[0].indexed:  # a stack's embedding
            found.append(WeightModule(segment, 0, table, indexed=True, completes=False))
            stops = stops[1:]
        for elements, indexed, joined in stops:
            if elements:
                place = places[elements]
                found.append(WeightModule(segment, next(weights), place, block, indexed=indexed, joined=joined))
            else:
                found.append(WeightModule(segment, block=block))
    own = not network.tied
    found.append(WeightModule(segment + 1, next(weights) if own else 0, table, completes=own))
    return [*found, WeightModule(segment + 2)]


def _list_segments(network: Stacks) -> Iterator[tuple[int | None, list[_Weight]]]:
    """Yield the modules of each segment between the embedding and the head, and the number of its block."""
    blocks = itertools.count()
    norms = _join(network.norm_sizes)
    for stack in network.stacks:
        positions = [_Weight(stack.positions * network.width, indexed=True)] * (stack.positions > 0)
        yield None, [_Weight(network.table, indexed=True), *positions]
        for layer in range(stack.layers):
            block = next(blocks)
            for part in stack.block:
                inside = (
                    _list_attention_weights(network, part, layer)
                    if isinstance(part, Attention)
                    else _list_mlp_weights(network, part)
                )
                yield block, [_PLAIN, *norms, _PLAIN, *inside, _PLAIN]
        yield None, [*norms, _PLAIN]


def _list_attention_weights(network: Stacks, part: Attention, layer: int) -> list[_Weight]:
    *projections, last = map(_join, _list_linears(network, part))
    rows = part.position_bias if layer == 0 or part.bias_per_layer else 0
    bias = [_Weight(rows * part.heads, indexed=True)] * (rows > 0)
    return [*itertools.chain(*projections), *bias, *last]


def _join(sizes: Sequence[int]) -> list[_Weight]:
    """Return the parameters of one module."""
    return [_Weight(size, joined=place > 0) for place, size in enumerate(sizes)]


def _list_mlp_weights(network: Stacks, part: Mlp) -> list[_Weight]:
    first, *gate, last = map(_join, _list_linears(network, part))
    dropout = [_PLAIN] * part.inner_dropout
    return [*first, _PLAIN, *itertools.chain(*gate), *dropout, *last]


def pad_elements(elements: int, ranks: int) -> int:
    """Elements of a tensor that is divided among ranks, as many for each."""
    return -(-elements // ranks) * ranks


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


PAD = 0
"""Id that fills a row of input which is shorter than its length, in every family."""
IGNORED = -100
"""Label at which there is no loss: transformers' and torch's own."""


class TokenKind(NamedTuple):
    """Tokens of one kind in each sample of an objective."""

    name: str  # in `sequence`, in the tokens of a record and in the columns of its steps
    length: int  # tokens per sample by default, padding included
    arguments: Mapping[str, int]  # the model's keyword arguments that hold them, with what fills a shorter row of each
    mask: str | None = None  # keyword argument that is 1 at a token and 0 at padding, given where rows may be shorter
    # of a keyword argument, the share of each row, from its beginning, that it does not show: it holds what fills there
    hidden: Mapping[str, float] = {}
    # what of a piece of text it holds: all of it, what is left where spans are hidden, the spans; None: no such thing
    text: Literal["whole", "kept", "hidden"] | None = "whole"
    # keyword argument that counts a token's place in its document: given, no token sees another document's
    positions: str | None = None
