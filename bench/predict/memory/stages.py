"""Memory of a pass through one stage of a pipeline: the segments of its units, and the states that come and go.

What a stage takes up and hands on are tensors of their own, which live longer than the pass: they are counted once, by
`bench.engine_costs.StageMoment`, and not with what a pass keeps.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.predict.memory.activations import INDEX, list_segments
from bench.predict.memory.segments import RepeatedSegments, Segment
from bench.predict.parts import cut_network, ends_stack
from bench.predict.workload import Workload
from bench.spec import FULL
from bench.stacks import Stack, Stacks
from bench.units import Part


class TensorSlices(NamedTuple):
    """Among how many ranks matrices are sliced, and whether states outside of these regions are divided by tokens."""

    ranks: int = 1
    sequence: bool = False

    @property
    def shares(self) -> int:
        """Ranks that the states between regions are divided among."""
        return self.ranks if self.sequence else 1


class PassPeak(NamedTuple):
    """The moment of a pass when most lives, in bytes; states that came in and gradients that came back are not here."""

    activations: int
    logits: int
    working: int
    gradients: int = 0  # beside those that are there from the beginning

    @property
    def total(self) -> int:
        return sum(self)


class StagePass(NamedTuple):
    """One micro-batch on one stage, in bytes."""

    takes: int  # of the states that come in; 0 for the first stage
    kept: int  # from its forward to its backward, beside these
    forward: PassPeak
    backward: PassPeak


def count_state_bytes(network: Stacks, load: Workload, slices: TensorSlices) -> int:
    """Return the bytes of what goes between two stages for one micro-batch: a tensor for each stack."""
    return sum(_count_states(network, stack, load, slices) for stack in network.stacks)


def count_passed_bytes(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> int:
    """Return the bytes of the states that a stage hands on as they came: those of stacks of which it has no block."""
    here = part.blocks([stack.layers for stack in network.stacks])
    passed = [stack for stack, blocks in zip(network.stacks, here, strict=True) if not (blocks or part.first)]
    return sum(_count_states(network, stack, load, slices) for stack in passed)


def _count_states(network: Stacks, stack: Stack, load: Workload, slices: TensorSlices) -> int:
    return load.width * load.micro * load.tokens(stack.tokens) * network.width // slices.shares


@functools.lru_cache(maxsize=4096)  # stages of a pipeline are alike, and points of a sweep share them
def measure_stage(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> StagePass:
    """Return what a pass of a part needs."""
    segments = list_stage_segments(network, load, part, slices)
    saved, running, backing, largest, carried, transposed, logits = np.array(
        [(s.saved, s.forward, s.backward, s.largest, s.carried, s.transposed, s.logits) for s in segments], np.int64
    ).T
    states, counted = count_state_bytes(network, load, slices), _count_known_states(network, load, part, slices)
    kept = np.cumsum(saved) - counted
    wide = np.cumsum(saved * logits)
    gradients = load.width * (largest + transposed + np.cumsum(carried[::-1])[::-1])

    def find(working: np.ndarray, beside: np.ndarray) -> PassPeak:
        at = int(np.argmax(kept + working + beside))
        last, needed = int(wide[at]), int(working[at])
        is_wide = bool(logits[at])
        return PassPeak(
            int(kept[at]) - last, last + is_wide * needed, (not is_wide) * needed, int(beside[at])
        )  # fmt: skip

    return StagePass(
        takes=0 if part.first else states,
        kept=int(kept[-1]),
        forward=find(running, np.zeros_like(running)),
        backward=find(backing, gradients),
    )


def _count_known_states(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> int:
    """Return the bytes of what a stage's first norms and checkpoints keep, where that is what came in."""
    if part.first or (network.norm == "rms_wide" and load.width < FULL and not load.checkpointing):
        return 0
    here = part.blocks([stack.layers for stack in network.stacks])
    return sum(
        _count_states(network, stack, load, slices)
        for stack, blocks in zip(network.stacks, here, strict=True)
        if blocks
    )


def list_stage_segments(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> list[Segment]:
    """Return a part of the forward pass in order, of one tensor-parallel rank."""
    sliced = cut_network(network, part, slices.ranks)
    first, *stacks, head = list_segments(sliced, load)
    embedded, blocks = list[Segment](), list[Segment]()
    for place, stack in enumerate(sliced.stacks):
        pieces = stacks[4 * place : 4 * place + 4]
        tokens, tables = _divide_embedding(sliced, stack, load, pieces[0].block[0], slices)
        embedded.append(tokens)
        if stack.layers:
            blocks += [tables, *_list_blocks(sliced, stack, load, pieces[1:3], pieces[3].block[0], slices)]
        if ends_stack(network, part, place):
            blocks += _list_last_norm(sliced, place, load, pieces[3].block[0], part, slices)
    begin = [*first.block, *embedded] if part.first else []
    end = _list_head(sliced, load, head.block, slices) if part.last else []
    leaving = [] if part.last else [Segment(0, forward=count_state_bytes(network, load, slices))]
    return [*begin, *blocks, *end, *leaving]


def _divide_embedding(
    network: Stacks, stack: Stack, load: Workload, whole: Segment, slices: TensorSlices
) -> tuple[Segment, Segment]:
    """Return the embedding of tokens and positions, which the first stage has, and what all blocks of a stack use,
    which every stage makes that has some of them."""
    length = load.tokens(stack.tokens)
    indices = load.micro * length + length * (stack.positions > 0)
    if stack.positions and load.documents:
        indices += (load.micro - 1) * length
    rows, heads = stack.bias_table or (0, 0)
    table = rows * heads
    own = load.micro * length * (slices.ranks > 1)  # a byte for each token: whether this rank knows it
    tokens = whole._replace(saved=INDEX * indices + own, parameters=whole.parameters - table)
    return tokens, Segment(whole.saved - INDEX * indices, parameters=table, largest=table)


def _list_blocks(
    network: Stacks,
    stack: Stack,
    load: Workload,
    pieces: Sequence[RepeatedSegments],
    norm: Segment,
    slices: TensorSlices,
) -> list[Segment]:
    found = list[Segment]()
    for segments, times in pieces:
        found += _divide_by_tokens(network, stack, load, segments, norm, slices) * times
    return found


def _divide_by_tokens(
    network: Stacks, stack: Stack, load: Workload, block: list[Segment], norm: Segment, slices: TensorSlices
) -> list[Segment]:
    """Return a block where each rank has some tokens of the states between regions: a norm keeps those alone, and what
    a region begins with is gathered for it, also from another stack, and kept whole."""
    if slices.shares == 1:
        return block
    less = _count_saved_by_sharing(network, stack, load, norm, slices)
    changes = [
        sum(
            load.width * load.micro * load.tokens(network.named(over).tokens) * network.width for over in [part] if over
        )
        - less
        for part in (getattr(part, "over", None) for part in stack.block)
    ]
    if not load.checkpointing:
        return [part._replace(saved=part.saved + change) for part, change in zip(block, changes, strict=True)]
    kept = _count_whole_states(network, stack, load)
    until = itertools.accumulate(changes)
    again = [
        part._replace(forward=part.forward + change, backward=part.backward + changed, standing=part.standing + changed)
        for part, change, changed in zip(block, changes, until, strict=True)
    ]
    return [again[0]._replace(saved=again[0].saved - kept + kept // slices.shares), *again[1:]]


def _count_whole_states(network: Stacks, stack: Stack, load: Workload) -> int:
    return _count_states(network, stack, load, TensorSlices())


def _count_saved_by_sharing(network: Stacks, stack: Stack, load: Workload, norm: Segment, slices: TensorSlices) -> int:
    """Return the bytes that a norm keeps less where tokens are divided; what it makes is gathered, and so is whole."""
    own = norm.saved - _count_whole_states(network, stack, load)
    return own - own // slices.shares


def _list_last_norm(
    network: Stacks, place: int, load: Workload, norm: Segment, part: Part, slices: TensorSlices
) -> list[Segment]:
    """The norm behind a stack. Where nothing on this stage takes up what it makes, that leaves; where tokens are
    divided, who takes it up gathers it."""
    stack = network.stacks[place]
    attended = any(stack.name in other.attended and other.layers for other in network.stacks)
    used = part.last or (attended and slices.shares == 1)
    made = 0 if used else _count_whole_states(network, stack, load)
    return [norm._replace(saved=norm.saved - made - _count_saved_by_sharing(network, stack, load, norm, slices))]


def _list_head(network: Stacks, load: Workload, whole: list[Segment], slices: TensorSlices) -> list[Segment]:
    """Head and loss; sliced, the loss is in fp32 and keeps probabilities of this rank's tokens alone."""
    if slices.ranks == 1:
        return whole
    head, _ = whole
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab
    both = FULL * (2 if load.width < FULL else 1)
    loss = Segment(
        FULL * logits + (INDEX + 1 + FULL) * rows, forward=(load.width + both) * logits - FULL * logits,
        backward=FULL * logits + (load.width if load.width < FULL else 0) * logits, logits=True,
    )  # fmt: skip
    return [head, loss]
