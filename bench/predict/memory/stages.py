"""Memory of the ranks of a pipeline, by position in the pipeline.

A rank holds a smaller network: the model is cut into stages, and each stage is sliced for tensor parallelism. A pass
through a stage consists of segments, which are parts of the stage's layers, such as a sub-layer. The pass also receives
and sends hidden states, which are called states in this module. At each point in time of the schedule, a rank holds
three kinds of bytes: tensors kept by the passes of its stages, states in transit between stages, and weights, gradients
and optimizer states of its engine.

States that a stage receives and sends are separate tensors, which live longer than the pass. So the bytes kept by a
pass exclude them. They are counted as states in transit, whose numbers are in `bench.core.engine_costs.StageMoment`.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.engine_costs import PipelineCosts, PlaceCosts, StageMoment, Terms
from bench.core.network import Attention, Mlp, Part, Stack, Stacks
from bench.core.spec import FULL, RunSpec
from bench.predict.memory.activations import INDEX, Segment, list_segments
from bench.predict.workload import Workload


@functools.lru_cache(maxsize=4096)  # points of a sweep share it
def cut_network(network: Stacks, part: Part, tensor: int = 1) -> Stacks:
    """Return the network of one stage for one of `tensor` tensor-parallel ranks. It has only the blocks of `part`; a
    stack may have no block.

    Heads, the inner width of an MLP and the vocabulary are divided by `tensor`, as in bench.engines.distributed.cut.
    """
    blocks = part.blocks([stack.layers for stack in network.stacks])

    def slice_part(one: Attention | Mlp) -> Attention | Mlp:
        if isinstance(one, Mlp):
            return dataclasses.replace(one, inner=one.inner // tensor)
        groups = None if one.key_heads is None else one.key_heads // tensor
        return dataclasses.replace(one, heads=one.heads // tensor, key_heads=groups)

    stacks = tuple(
        dataclasses.replace(stack, layers=len(here), block=tuple(map(slice_part, stack.block)))
        for stack, here in zip(network.stacks, blocks, strict=True)
    )
    return dataclasses.replace(network, stacks=stacks, vocab=network.vocab // tensor)


@functools.lru_cache(maxsize=1024)
def list_alike(network: Stacks, parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Return a list with one entry per stage: the index of the first stage that is equal to this stage. With this list,
    equal stages are predicted only once.

    Stages are equal if they have the same number of blocks of each stack and the same special layers: the last block of
    a stack, the model's embedding, and its head.
    """
    first: dict[object, int] = {}
    layers = [stack.layers for stack in network.stacks]
    found = []
    for number, part in enumerate(parts):
        here = part.blocks(layers)
        ends = [blocks.stop == count and len(blocks) > 0 for blocks, count in zip(here, layers, strict=True)]
        like = (*map(len, here), *ends, part.first, part.last)
        found.append(first.setdefault(like, number))
    return tuple(found)


class TensorSlices(NamedTuple):
    """Division of a stage among `ranks` tensor-parallel ranks. If `sequence` is true (sequence parallelism), these
    ranks also divide the tokens of the hidden states that pass from one sub-layer to the next."""

    ranks: int = 1
    sequence: bool = False

    @property
    def shares(self) -> int:
        """Number of ranks among which the tokens of the states between sub-layers are divided."""
        return self.ranks if self.sequence else 1


WHOLE = TensorSlices()


class PassPeak(NamedTuple):
    """Bytes at the peak of one forward or backward pass, excluding received states and received gradients."""

    activations: int
    logits: int
    working: int
    gradients: int = 0  # in addition to the gradients that exist before the pass

    @property
    def total(self) -> int:
        return sum(self)


class StagePass(NamedTuple):
    """Bytes of one micro-batch on one stage: received, kept for backward, and at the peak of each pass."""

    takes: int  # bytes of received states; 0 for the first stage
    kept: int  # bytes kept from its forward to its backward, without received states
    forward: PassPeak
    backward: PassPeak


def count_state_bytes(network: Stacks, load: Workload, slices: TensorSlices) -> int:
    """Return the bytes of activations that a pipeline stage sends to the next for one micro-batch: one tensor of
    hidden states for each stack of blocks (encoder, decoder)."""
    return sum(_count_states(network, stack, load, slices) for stack in network.stacks)


def count_passed_bytes(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> int:
    """Return the bytes of hidden states that the stage with the layers `part` receives and sends on unchanged, because
    it has no block of the stack to which these states belong."""
    here = part.blocks([stack.layers for stack in network.stacks])
    passed = [stack for stack, blocks in zip(network.stacks, here, strict=True) if not (blocks or part.first)]
    return sum(_count_states(network, stack, load, slices) for stack in passed)


def _count_states(network: Stacks, stack: Stack, load: Workload, slices: TensorSlices) -> int:
    return load.width * load.micro * load.tokens(stack.tokens) * network.width // slices.shares


@functools.lru_cache(maxsize=4096)  # many stages are equal, and points of a sweep share them
def measure_stage(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> StagePass:
    """Return the memory of one tensor-parallel rank for one micro-batch on one stage: received states, activations, and
    temporary tensors and gradients of each pass. `part` says which layers the stage has."""
    segments = list_stage_segments(network, load, part, slices)
    saved, running, backing, largest, carried, transposed, logits = np.array(
        [(s.saved, s.forward, s.backward, s.largest, s.carried, s.transposed, s.logits) for s in segments], np.int64
    ).T
    states, counted = count_state_bytes(network, load, slices), _count_known_states(network, load, part, slices)
    # received states are counted with the states, so they are subtracted where norms and checkpoints keep them
    kept = np.cumsum(saved) - counted
    wide = np.cumsum(saved * logits)
    # an undivided gradient exists before it is reduced into the engine's gradients
    gradients = load.width * (largest + transposed + np.cumsum(carried[::-1])[::-1])

    def find(working: np.ndarray, extra: np.ndarray) -> PassPeak:
        at = int(np.argmax(kept + working + extra))
        last, needed, is_wide = int(wide[at]), int(working[at]), bool(logits[at])
        return PassPeak(int(kept[at]) - last, last + is_wide * needed, (not is_wide) * needed, int(extra[at]))

    return StagePass(
        takes=0 if part.first else states,
        kept=int(kept[-1]),
        forward=find(running, np.zeros_like(running)),
        backward=find(backing, gradients),
    )


def _count_known_states(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> int:
    """Return the bytes of received states that the first norms and the activation checkpoints of a stage keep for
    backward. These bytes are already counted as received states, so the caller subtracts them from the bytes that a
    pass keeps."""
    if part.first or (network.norm == "rms_wide" and load.width < FULL and not load.checkpointing):
        return 0
    here = part.blocks([stack.layers for stack in network.stacks])
    return sum(
        _count_states(network, stack, load, slices)
        for stack, blocks in zip(network.stacks, here, strict=True)
        if blocks
    )


def list_stage_segments(network: Stacks, load: Workload, part: Part, slices: TensorSlices) -> list[Segment]:
    """Return the segments of one stage in forward order, for one tensor-parallel rank. A segment is the memory of a
    part of a pass, such as a sub-layer. `part` says which layers the stage has."""
    sliced = cut_network(network, part, slices.ranks)
    first, *stacks, head = list_segments(sliced, load)
    embedded, blocks = list[Segment](), list[Segment]()
    layers = [stack.layers for stack in network.stacks]
    for place, stack in enumerate(sliced.stacks):
        # four entries per stack: embedding, all blocks but the last, the last block, final norm
        embedding, *repeated, final = stacks[4 * place : 4 * place + 4]
        norm = final.block[0]
        tokens, tables = _divide_embedding(sliced, stack, load, embedding.block[0], slices)
        embedded.append(tokens)
        if stack.layers:
            blocks.append(tables)
            for segments, times in repeated:
                blocks += _divide_by_tokens(sliced, stack, load, segments, norm, slices) * times
        if layers[place] - 1 in part.blocks(layers)[place]:  # the stack's last block, and so its last norm
            blocks.append(_build_last_norm(sliced, place, load, norm, part, slices))
    # the first stage makes the embeddings of all stacks, and later stages receive them as states
    begin = [*first.block, *embedded] if part.first else []
    end = _list_head(sliced, load, head.block, slices) if part.last else []
    leaving = [] if part.last else [Segment(0, forward=count_state_bytes(network, load, slices))]
    return [*begin, *blocks, *end, *leaving]


def _divide_embedding(
    network: Stacks, stack: Stack, load: Workload, whole: Segment, slices: TensorSlices
) -> tuple[Segment, Segment]:
    """Divide `whole`, the segment (memory) of the embedding of a stack (encoder or decoder). Return two segments: the
    embedding of tokens and positions, and the tables that blocks use, such as the table of position biases.

    The embedding of tokens and positions is on the first stage. The tables are made on every stage with blocks of this
    stack.
    """
    length = load.tokens(stack.tokens)
    indices = load.micro * length + length * (stack.positions > 0)
    if stack.positions and load.documents:
        indices += (load.micro - 1) * length
    rows, heads = stack.bias_table or (0, 0)
    table = rows * heads
    # one byte per token says whether it is in this rank's slice of the vocabulary
    own = load.micro * length * (slices.ranks > 1)
    tokens = whole._replace(saved=INDEX * indices + own, parameters=whole.parameters - table)
    return tokens, Segment(whole.saved - INDEX * indices, parameters=table, largest=table)


def _divide_by_tokens(
    network: Stacks, stack: Stack, load: Workload, block: list[Segment], norm: Segment, slices: TensorSlices
) -> list[Segment]:
    """Return the segments (memory of sub-layers) of a block with sequence parallelism. Each tensor-parallel rank then
    holds only some tokens of the states that pass from one sub-layer to the next. `block` has the segments without
    sequence parallelism. If `slices` has no sequence parallelism, `block` is returned unchanged. `norm` is the segment
    of the stack's last norm.

    A norm keeps only the tokens of its rank. In contrast, the input of a sub-layer is gathered and kept for all tokens.
    If a sub-layer attends to the output of another stack, that output is gathered and kept for all tokens, too.
    """
    if slices.shares == 1:
        return block
    less = _count_saved_by_sharing(network, stack, load, norm, slices)
    attended = (getattr(part, "over", None) for part in stack.block)
    changes = [(_count_states(network, network.named(over), load, WHOLE) if over else 0) - less for over in attended]
    if not load.checkpointing:
        return [part._replace(saved=part.saved + change) for part, change in zip(block, changes, strict=True)]
    kept = _count_states(network, stack, load, WHOLE)
    until = itertools.accumulate(changes)
    # recomputation keeps the gathered inputs of all sub-layers up to the current one
    again = [
        part._replace(forward=part.forward + change, backward=part.backward + changed, standing=part.standing + changed)
        for part, change, changed in zip(block, changes, until, strict=True)
    ]
    return [again[0]._replace(saved=again[0].saved - kept + kept // slices.shares), *again[1:]]


def _count_saved_by_sharing(network: Stacks, stack: Stack, load: Workload, norm: Segment, slices: TensorSlices) -> int:
    """Return how many bytes fewer a norm keeps with sequence parallelism than without. A rank then keeps the norm's
    input and statistics for its own tokens only. The norm's output is gathered and kept for all tokens."""
    own = norm.saved - _count_states(network, stack, load, WHOLE)
    return own - own // slices.shares


def _build_last_norm(
    network: Stacks, place: int, load: Workload, norm: Segment, part: Part, slices: TensorSlices
) -> Segment:
    """Return the segment (memory) of the norm after a stack of blocks (encoder or decoder), in a pipeline stage with
    the layers `part`. `place` is the index of the stack of blocks in the network. `norm` is the segment of this norm
    without pipeline and sequence parallelism.

    The norm's output is kept only if this pipeline stage uses it. With sequence parallelism, the sub-layer that uses
    the output gathers and keeps it.
    """
    stack = network.stacks[place]
    attended = any(stack.name in other.attended and other.layers for other in network.stacks)
    used = part.last or (attended and slices.shares == 1)
    made = 0 if used else _count_states(network, stack, load, WHOLE)
    return norm._replace(saved=norm.saved - made - _count_saved_by_sharing(network, stack, load, norm, slices))


def _list_head(network: Stacks, load: Workload, whole: list[Segment], slices: TensorSlices) -> list[Segment]:
    """Return the segments (memory) of head and loss; `whole` has them without tensor parallelism. With tensor
    parallelism the loss is computed in fp32, and each rank keeps the probabilities of its slice of the vocabulary."""
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


def list_place_phases(spec: RunSpec, network: Stacks, load: Workload, costs: PipelineCosts) -> list[dict[str, Terms]]:
    """Return, for every position of the pipeline, the bytes by phase (such as forward) and term (such as activations).
    Each phase is counted at its peak."""
    slices = TensorSlices(spec.parallel.tensor, spec.parallel.sequence)
    states = count_state_bytes(network, load, slices)
    # every rank holds inputs and labels of all micro-batches; with one kind of tokens they are two tensors
    tokens = sum(length for _, length in load.lengths) * (1 + (len(load.lengths) == 1))
    samples = INDEX * load.micro * spec.accumulation * tokens
    alike = list_alike(network, costs.parts)
    measured = {number: measure_stage(network, load, costs.parts[number], slices) for number in dict.fromkeys(alike)}
    stages = [measured[number] for number in alike]
    if len(costs.places) == 1:  # with all stages on one rank, states sent on unchanged are the same tensor
        stages = [
            one._replace(takes=one.takes - count_passed_bytes(network, load, before, slices)) if number else one
            for number, (one, before) in enumerate(zip(stages, (costs.parts[0], *costs.parts), strict=False))
        ]
    return [_find_phases(place, [stages[number] for number in place.stages], states, samples) for place in costs.places]


def _find_phases(place: PlaceCosts, passes: list[StagePass], states: int, samples: int) -> dict[str, Terms]:
    """Return the bytes of a rank at one position of the pipeline in each phase of a run, such as forward. Forward and
    backward are counted at their points of highest memory. `place` holds the engine's costs. `passes` holds the bytes
    of a pass through each stage of this position. `states` is the bytes of hidden states that a stage sends for one
    micro-batch. `samples` is the bytes of all inputs and labels."""
    moments = place.list_moments()
    counts, is_forward = _count_live_objects(moments, place.stages)
    # a schedule has thousands of points in time: one matrix product gives the totals of all, and terms are built only
    # for the peak of forward and the peak of backward
    totals = counts @ np.array(_list_sizes(place, passes, states), np.float64)
    forward_terms, backward_terms = (
        _build_terms(place, passes, moments[at[int(np.argmax(totals[at]))]], states) | {"micro-batches": samples}
        for at in (np.flatnonzero(is_forward), np.flatnonzero(~is_forward))
    )
    phases = {"initialisation": place.initialisation, "forward": forward_terms, "backward": backward_terms}
    return phases | {"update": place.update}


@functools.lru_cache(maxsize=4096)  # points of a sweep that differ in their model or micro-batch share it
def _count_live_objects(
    moments: tuple[StageMoment, ...], stages: tuple[int, ...]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return two arrays with one row for each point in time of the schedule, for one position of the pipeline. The
    first has the number of live objects of each kind, such as received states, with shape (points in time, kinds).
    The second has shape (points in time,) and is True for forward passes."""
    made = [(kind, stage) for kind in ("forward", "backward", "reduce") for stage in stages]
    rows = [
        (one.waiting + one.gradients + one.leaving, *one.kept, *one.whole, *one.unreduced, *one.reduced,
         *((one.kind, one.stage) == other for other in made))
        for one in moments
    ]  # fmt: skip
    return np.array(rows, np.float64), np.array([one.kind == "forward" for one in moments])


def _list_sizes(place: PlaceCosts, passes: list[StagePass], states: int) -> list[int]:
    """Return the size in bytes of one object of each kind, such as received states. Only kinds of objects that live
    during a step but not between steps are listed. The order is that of the columns of `_count_live_objects`.

    A single matrix product of the counts in `_count_live_objects` and these sizes gives the total bytes at all points
    in time of the schedule. `_build_terms` gives the same total at one point, plus the bytes that live between steps.
    """
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
    """Return the bytes by term (such as activations) at one point in time of the schedule, `moment`. At that time, the
    rank makes a forward or backward pass, or it reduces gradients and makes no pass. `place` holds the engine's costs.
    `passes` holds the bytes of a pass through each stage of this rank. `states` is the bytes of hidden states that a
    stage sends for one micro-batch."""
    at = place.stages.index(moment.stage)
    reduces = moment.kind == "reduce"
    own = PassPeak(0, 0, 0) if reduces else passes[at].forward if moment.kind == "forward" else passes[at].backward
    taken, reducing = (0, place.by_stage[at].reducing) if reduces else (passes[at].takes, 0)
    kept = sum(count * one.kept for count, one in zip(moment.kept, passes, strict=True))
    came = sum(count * one.takes for count, one in zip(moment.kept, passes, strict=True))
    wait = states * (moment.waiting + moment.gradients + moment.leaving)
    gathered = gradients = 0
    # weights are gathered only if the engine divides them within a stage (sharding=zero3)
    if any(one.whole for one in place.by_stage):
        each = list(zip(place.by_stage, moment.whole, moment.unreduced, moment.reduced, strict=True))
        gathered = sum(one.whole * whole for one, whole, _, _ in each)
        gradients = sum(one.unreduced * there + one.reduced * done for one, _, there, done in each)
    standing = place.resident
    return standing | {
        "gradients": standing.get("gradients", 0) + gradients + own.gradients,
        "gathered layers": gathered,
        "activations": kept + own.activations,
        "states between stages": came + taken + wait,
        "logits and loss": own.logits,
        "working memory": own.working + reducing,
    }
