"""Memory of the ranks of a pipeline, place by place.

A rank has a network that is cut into stages and sliced: a network again, of less. A pass through a stage is the
segments of its units, and the states that come and go. At each moment of the very schedule that runs, a place holds
what the passes of its stages keep, what waits between stages, and what the engine has beside both.

What a stage takes up and hands on are tensors of their own, which live longer than the pass: they are counted once, by
`bench.core.engine_costs.StageMoment`, and not with what a pass keeps.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.engine_costs import PipelineCosts, PlaceCosts, StageMoment, Terms
from bench.core.network import Attention, Mlp, Part, Stack, Stacks
from bench.core.spec import FULL, RunSpec
from bench.predict.memory.activations import INDEX, RepeatedSegments, Segment, list_segments
from bench.predict.workload import Workload


@functools.lru_cache(maxsize=4096)  # points of a sweep share it
def cut_network(network: Stacks, part: Part, tensor: int = 1) -> Stacks:
    """Return the network with the blocks of a part alone, of one of `tensor` slices: heads, the width between an MLP's
    matrices and the vocabulary are divided (bench.engines.distributed.cut). A stack may have no block."""
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


class PlacePhases(NamedTuple):
    """What lives on the ranks of one place: bytes by term at the peak of each phase, and between two steps."""

    initialisation: Terms
    forward: Terms
    backward: Terms
    update: Terms
    resident: Terms


def list_place_phases(spec: RunSpec, network: Stacks, load: Workload, costs: PipelineCosts) -> list[PlacePhases]:
    """Return the memory of every place."""
    slices = TensorSlices(spec.parallel.tensor, spec.parallel.sequence)
    states = count_state_bytes(network, load, slices)
    # inputs and labels of all micro-batches, which every rank takes as it needs them
    tokens = sum(length for _, length in load.lengths) * (1 + (len(load.lengths) == 1))
    samples = INDEX * load.micro * spec.accumulation * tokens
    alike = list_alike(network, costs.parts)
    measured = {number: measure_stage(network, load, costs.parts[number], slices) for number in dict.fromkeys(alike)}
    stages = [measured[number] for number in alike]
    if len(costs.places) == 1:  # what a stage hands on as it came is the same tensor
        stages = [
            one._replace(takes=one.takes - count_passed_bytes(network, load, before, slices)) if number else one
            for number, (one, before) in enumerate(zip(stages, (costs.parts[0], *costs.parts), strict=False))
        ]
    return [_find_phases(place, [stages[number] for number in place.stages], states, samples) for place in costs.places]


def _find_phases(place: PlaceCosts, passes: list[StagePass], states: int, samples: int) -> PlacePhases:
    """Return the phases of a place, forward and backward each at the moment when most lives."""
    moments = place.list_moments()
    counts = _count_what_lives(moments, place.stages)
    totals = counts.of_each @ np.array(_list_sizes(place, passes, states), np.float64)
    forward_terms, backward_terms = (
        _build_terms(place, passes, moments[at[int(np.argmax(totals[at]))]], states) | {"micro-batches": samples}
        for at in (counts.forwards, counts.others)
    )
    return PlacePhases(place.initialisation, forward_terms, backward_terms, place.update, place.resident)


class MomentCounts(NamedTuple):
    """How many of what lives at each moment of a place."""

    of_each: NDArray[np.float64]  # a row for each moment, a column for each of `_list_sizes`
    forwards: NDArray[np.int64]  # rows of forwards
    others: NDArray[np.int64]


@functools.lru_cache(maxsize=4096)  # points of a sweep that differ in their model or micro-batch share it
def _count_what_lives(moments: tuple[StageMoment, ...], stages: tuple[int, ...]) -> MomentCounts:
    made = [(kind, stage) for kind in ("forward", "backward", "reduce") for stage in stages]
    rows = [
        (one.waiting + one.gradients + one.leaving, *one.kept, *one.whole, *one.unreduced, *one.reduced,
         *((one.kind, one.stage) == other for other in made))
        for one in moments
    ]  # fmt: skip
    forward = np.array([one.kind == "forward" for one in moments])
    return MomentCounts(np.array(rows, np.float64), np.flatnonzero(forward), np.flatnonzero(~forward))


def _list_sizes(place: PlaceCosts, passes: list[StagePass], states: int) -> list[int]:
    """Return the bytes of one of each that lives at a moment beside what does between steps: with their numbers the sum
    of `_build_terms`, for many moments."""
    return [
        states,
        *(one.kept + one.takes for one in passes),
        *(one.whole for one in place.by_stage),
        *(one.unreduced for one in place.by_stage),
        *(one.reduced for one in place.by_stage),
        *(one.takes + one.forward.total for one in passes),
        *(one.takes + one.backward.total for one in passes),
        *(one.reducing for one in place.by_stage),
    ]


def _build_terms(place: PlaceCosts, passes: list[StagePass], moment: StageMoment, states: int) -> Terms:
    at = place.stages.index(moment.stage)
    own, taken = _choose_peak(passes[at], moment), passes[at].takes * (moment.kind != "reduce")
    kept = sum(count * one.kept for count, one in zip(moment.kept, passes, strict=True))
    came = sum(count * one.takes for count, one in zip(moment.kept, passes, strict=True))
    wait = states * (moment.waiting + moment.gradients + moment.leaving)
    gathered, gradients = _sum_divided(place, moment)
    reducing = place.by_stage[at].reducing if moment.kind == "reduce" else 0
    standing = place.resident
    return standing | {
        "gradients": standing.get("gradients", 0) + gradients + own.gradients,
        "gathered layers": gathered,
        "activations": kept + own.activations,
        "states between stages": came + taken + wait,
        "logits and loss": own.logits,
        "working memory": own.working + reducing,
    }


def _choose_peak(one: StagePass, moment: StageMoment) -> PassPeak:
    """Return what a pass needs at a moment; a reduction has none."""
    if moment.kind == "reduce":
        return PassPeak(0, 0, 0)
    return one.forward if moment.kind == "forward" else one.backward


def _sum_divided(place: PlaceCosts, moment: StageMoment) -> tuple[int, int]:
    """Return the bytes of gathered weights, and of gradients whole or reduced."""
    if not any(one.whole for one in place.by_stage):
        return 0, 0
    each = list(zip(place.by_stage, moment.whole, moment.unreduced, moment.reduced, strict=True))
    gathered = sum(one.whole * whole for one, whole, _, _ in each)
    return gathered, sum(one.unreduced * there + one.reduced * done for one, _, there, done in each)
