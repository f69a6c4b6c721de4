"""The network of a model family as sizes: what prediction computes with, whatever the family.

A family describes its network once, as `Stacks`; parameters and modules follow here, FLOPs, memory and time in
bench.predict.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
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
