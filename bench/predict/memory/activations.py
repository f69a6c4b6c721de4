"""Tensors that a network keeps for backward, and tensors that it needs temporarily, one by one.

Every term is a tensor that autograd saves in transformers 5's modules (modeling_t5.py, modeling_gpt2.py) or torch's
own. The tests compare their sum with torch's own `saved_tensors_hooks`. Bytes are those of one rank and one
micro-batch.
"""

import itertools
from typing import NamedTuple

from bench.core.network import Activation, Attention, Mlp, Stack, Stacks, list_part_sizes
from bench.core.spec import FULL
from bench.predict.workload import Workload, is_fused

INDEX = 8
"""Bytes of a token, a position or a bucket of the position bias: int64."""
RANDOM_STATE = {"cpu": 5056, "cuda": 5056 + 16}
"""Bytes that a checkpoint keeps to draw the same numbers again: torch's Mersenne twister; a GPU's seed and offset."""
FUSED_QUERIES = 32
"""Multiple to which torch's memory-efficient attention rounds up the rows of its log-sum-exp."""
ACTIVATION: dict[Activation, tuple[int, int]] = {"gelu_new": (4, 0), "gelu": (1, 0), "silu": (1, 0), "relu": (1, 1)}
"""Tensors as wide as an MLP that an activation saves, and 1 if the last of them is its output, which is saved anyway.
gelu_new consists of Python operations and keeps x, x/2, tanh and 1 + tanh."""


class Segment(NamedTuple):
    """A part of a forward pass; bytes per rank except for `parameters`, `largest`, `carried` and `transposed`, which
    are elements."""

    saved: int  # from its forward to its backward
    forward: int = 0  # needed while its forward runs, beyond `saved`
    backward: int = 0  # needed while its backward runs, beyond all bytes saved up to here
    parameters: int = 0  # whose gradients are complete after its backward
    largest: int = 0  # largest of them: a gradient exists next to its bucket until it is copied
    carried: int = 0  # of an incomplete gradient that waits from here to the end of backward
    transposed: int = 0  # of a gradient that is not accumulated in place, as torch's own linear makes it
    standing: int = 0  # part of `backward` that also lives between two operations: recomputed and waiting tensors
    logits: bool = False  # as wide as the vocabulary: listed as an own term


class RepeatedSegments(NamedTuple):
    """Segments in the order of forward, and the number of repetitions."""

    block: list[Segment]
    times: int = 1


def list_segments(network: Stacks, load: Workload) -> list[RepeatedSegments]:
    """Return the forward pass in order, from the first stack's embedding to the loss."""
    head = [_build_head(network, load), _build_loss(network, load)]
    if load.chunk:
        head = [_build_chunked_loss(network, load), Segment(0, logits=True)]
    stacks = [part for stack in network.stacks for part in _list_stack_segments(network, stack, load)]
    # end of the first stack's backward: nothing of the embedding's gradient waits any more
    end = Segment(0, parameters=network.table, largest=network.table, carried=-network.table)
    return [RepeatedSegments([end]), *stacks, RepeatedSegments(head)]


def _list_stack_segments(network: Stacks, stack: Stack, load: Workload) -> list[RepeatedSegments]:
    """Return a stack from its embedding to its last norm. A checkpointed block keeps its input and is run again before
    its backward. The position bias of the stack lives while its blocks run, or as long as their checkpoints; the
    bias's gradient lives from the last block's backward on."""
    length = load.tokens(stack.tokens)
    rows = load.micro * length
    embedding, block = _build_embedding(network, stack, load), _list_block_segments(network, stack, load)
    _, heads = stack.bias_table or (0, 0)
    bias = heads * length * length * load.width
    if load.checkpointing:
        embedding = embedding._replace(saved=embedding.saved + bias)
        block = _checkpoint_block(block, rows * network.width * load.width + RANDOM_STATE[load.device])
    else:
        block = [part._replace(forward=part.forward + bias) for part in block]
    # the final norm's output is saved by cross-attention or the head, after dropout or scaling if there is one
    mask = _count_mask_bytes(load, rows * network.width) if network.final_dropout else 0
    norm_bytes, sizes = _count_norm_bytes(network, load, rows), network.norm_sizes
    return [
        RepeatedSegments([embedding]),
        RepeatedSegments([_add_waiting(part, bias) for part in block], stack.layers - 1),
        RepeatedSegments(block),
        RepeatedSegments([Segment(norm_bytes + mask, parameters=sum(sizes), largest=max(sizes))]),
    ]


def _list_block_segments(network: Stacks, stack: Stack, load: Workload) -> list[Segment]:
    """Return one block. The gradient of a stack's output that the block attends to waits for that stack, while blocks
    add to it."""
    lengths = [load.tokens(network.named(name).tokens) for name in stack.attended]
    waiting = load.micro * sum(lengths) * network.width * load.width
    length = load.tokens(stack.tokens)
    parts = [
        _build_attention(network, load, part, length, _count_keys(network, stack, part, load))
        if isinstance(part, Attention)
        else _build_mlp(network, load, part, load.micro * length)
        for part in stack.block
    ]
    return [_add_waiting(part, waiting) for part in parts]


def _count_keys(network: Stacks, stack: Stack, part: Attention, load: Workload) -> int:
    """Return the number of tokens that are attended to."""
    return load.tokens(stack.tokens if part.over is None else network.named(part.over).tokens)


def _add_waiting(part: Segment, waiting: int) -> Segment:
    """Return a copy of this segment whose backward holds `waiting` extra bytes throughout."""
    return part._replace(backward=part.backward + waiting, standing=part.standing + waiting)


def _checkpoint_block(block: list[Segment], kept: int) -> list[Segment]:
    """Return a block that keeps `kept` bytes until it is run again; then backward frees its parts one by one."""
    until = itertools.accumulate(part.saved for part in block)
    return [
        part._replace(
            saved=0 if number else kept,
            forward=part.saved + part.forward,
            backward=saved + max(part.forward, part.backward),
            standing=saved,
        )
        for number, (part, saved) in enumerate(zip(block, until, strict=True))
    ]


def _build_embedding(network: Stacks, stack: Stack, load: Workload) -> Segment:
    """Return the embedding of a stack, with its positions and everything that is made once for all its blocks: buckets
    of the position bias, zeros in place of a bias, cosines and sines, the mask of documents.

    One matrix serves all stacks. Until the backward of the first stack ends, the gradients of the other stacks wait;
    with a tied head, that of all stacks. torch adds them to the head's gradient, which nn.Linear leaves transposed, in
    a third tensor.
    """
    length, table, last = load.tokens(stack.tokens), network.table, stack == network.stacks[-1]
    buckets, heads = stack.bias_table or (0, 0)
    positions = stack.positions * network.width
    indices = load.micro * length + (length * length if buckets else 0) + (length if positions else 0)
    if positions and load.documents:
        indices += (load.micro - 1) * length
    attentions = [part for part in stack.block if isinstance(part, Attention)]
    rotary = max((part.head_width for part in attentions if part.rotary), default=0)
    rotation = 2 * length * (load.micro if load.documents else 1) * rotary * load.width
    mask = 0
    if load.documents and load.checkpointing:  # as long as checkpoints keep it
        mask = load.micro * length * length * (load.width if load.attention == "eager" else 1)
    zeros = sum(
        part.heads * length * _count_keys(network, stack, part, load)
        for part in attentions
        if part.zero_bias and not part.bias_per_layer and (is_fused(load, part) or load.checkpointing)
    )
    dropped = _count_mask_bytes(load, load.micro * length * network.width)
    own = Segment(
        saved=INDEX * indices + dropped + zeros * load.width + rotation + mask,
        parameters=buckets * heads + positions,
        largest=positions,
    )
    if last and not network.tied:
        return own._replace(carried=table)
    return own._replace(backward=table * load.width, transposed=table if last else 0)


def _build_attention(network: Stacks, load: Workload, part: Attention, queries: int, keys: int) -> Segment:
    """Return an attention sub-layer with its norm."""
    rows = load.micro * queries
    saved, forward, backward = _count_kernel_bytes(load, part, queries, keys)
    # with sdpa, transformers adds the causal mask to a bias in every layer: a mask of booleans
    mask = queries * keys if part.causal and load.attention == "sdpa" and (part.position_bias or part.zero_bias) else 0
    states, sizes = rows * network.width, list_part_sizes(network, part)
    bias = indices = 0
    if part.bias_per_layer:  # the bias lives while scores are made; its indices, or its zeros for a kernel, are kept
        bias = load.width * part.heads * queries * keys
        zeros = bias if is_fused(load, part) else 0
        indices = INDEX * queries * keys if part.position_bias else zeros
    kept = saved + mask + indices + _count_mask_bytes(load, states) + _count_clamp_bytes(network, load, states)
    return Segment(
        saved=_count_norm_bytes(network, load, rows) + kept,
        forward=forward + bias,
        backward=backward + states * load.width + bias,
        parameters=sum(sizes),
        largest=max(sizes),
    )


def _count_kernel_bytes(load: Workload, part: Attention, queries: int, keys: int) -> tuple[int, int, int]:
    """Return bytes saved, and needed in forward and in backward, by the attention kernel that torch chooses.

    A position bias is a mask that needs a gradient, which no flash kernel supports. sdpa then writes scores in fp32 on
    a CPU (without a gradient it does not) and uses the memory-efficient kernel on a GPU.
    """
    # keys are kept repeated for each head that shares them, unless the kernel supports groups: none does so with a
    # mask, and a GPU's only below fp32
    fused = is_fused(load, part)
    takes_groups = fused and not load.documents and (load.device == "cpu" or load.width < FULL)
    query = load.micro * queries * part.inner
    key = load.micro * keys * (part.key_inner if takes_groups else part.inner)
    scores = load.micro * part.heads * queries * keys
    turned = 2 * query * load.width if part.rotary else 0  # needed by a rotation in addition to its result
    if fused:
        saved, backward = _count_fused_kernel_bytes(load, part, queries, query, key, scores)
        if load.documents:  # the kernel's own form of the mask, in every layer
            saved += load.width * load.micro * queries * keys
        return saved, turned, backward + turned
    wide = load.width if load.attention == "eager" else FULL
    dropped = (wide + (wide if load.device == "cpu" else 1)) * scores if load.dropout else 0
    saved = wide * (query + 2 * key + scores) + dropped + load.width * query
    # a second tensor of scores; sdpa scales queries and keys, and compares every score with minus infinity
    forward = wide * (scores + key) + (0 if load.attention == "eager" else scores + wide * query)
    if wide > load.width:  # queries, keys and values in both widths
        forward += wide * query + 2 * load.width * key
    # two gradients of scores after the output is freed; if scores are few, the peak is earlier
    return saved, forward, max(0, 2 * wide * scores - load.width * query)


def _count_fused_kernel_bytes(
    load: Workload, part: Attention, queries: int, query: int, key: int, scores: int
) -> tuple[int, int]:
    """Return bytes saved by a fused kernel, and needed in its backward."""
    rounded = -(-queries // FUSED_QUERIES) * FUSED_QUERIES if load.device == "cuda" else queries
    saved = load.width * 2 * (query + key) + FULL * load.micro * part.heads * rounded
    backward = load.width * (query + 2 * key)
    if part.position_bias and load.attention == "sdpa":
        # a contiguous bias for every layer, and its gradient for every sample
        saved += load.width * scores // load.micro
        backward += load.width * scores
    return saved, backward


def _build_mlp(network: Stacks, load: Workload, part: Mlp, rows: int) -> Segment:
    """Return an MLP with its norm."""
    wide, states = rows * part.inner, rows * network.width
    kept, is_output = ACTIVATION[part.activation]
    # saved: tensors of the gate's product and the input of the last matrix, which is the output of a plain activation
    same = is_output * (not (load.dropout and part.inner_dropout))
    count = kept + 1 + (2 - is_output if part.gated else -same)
    masks = _count_mask_bytes(load, (wide if part.inner_dropout else 0) + states)
    # an activation in one kernel has gradients of input and output only after the input of the last matrix is freed
    gradients = 2 if part.gated or kept > 1 or same else 1
    sizes = list_part_sizes(network, part)
    return Segment(
        saved=_count_norm_bytes(network, load, rows)
        + count * wide * load.width
        + masks
        + _count_clamp_bytes(network, load, states),
        forward=wide * load.width,
        backward=(gradients * wide + states) * load.width,
        parameters=sum(sizes),
        largest=max(sizes),
    )


def _count_norm_bytes(network: Stacks, load: Workload, rows: int) -> int:
    """Return the bytes kept by a norm and by the next operation: input and output of the norm.

    torch's kernel also keeps a mean and a scale per token, on a GPU in fp32. A norm of Python operations also keeps the
    normalised input, a scale per token and, below fp32, the input in fp32; `rms_wide` keeps the latter in place of the
    input.
    """
    states = rows * network.width
    if network.norm == "layer":
        return 2 * states * load.width + 2 * rows * (load.width if load.device == "cpu" else FULL)
    if network.norm == "rms_wide":
        return states * (2 * load.width + FULL) + FULL * rows
    return states * (3 * load.width + (FULL if load.width < FULL else 0)) + FULL * rows


def _count_mask_bytes(load: Workload, elements: int) -> int:
    """Return the bytes of dropout's mask: as wide as its tensor on a CPU, a byte per element on a GPU."""
    return elements * (load.width if load.device == "cpu" else 1) if load.dropout else 0


def _count_clamp_bytes(network: Stacks, load: Workload, states: int) -> int:
    """Return the bytes that transformers' clamp of fp16 activations keeps: its input."""
    return states * load.width if load.fp16 and network.clamps_fp16 else 0


def _build_head(network: Stacks, load: Workload) -> Segment:
    """Return the matrix from states to logits. With tied weights its gradient waits for the embedding's."""
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab * load.width
    own = 0 if network.tied else network.table
    backward = logits + rows * network.width * load.width
    carried = network.table - own
    return Segment(0, forward=logits, backward=backward, parameters=own, largest=own, carried=carried, logits=True)


def _build_loss(network: Stacks, load: Workload) -> Segment:
    """Return cross-entropy in the run's precision or in fp32: log-probabilities are kept while the logits are freed;
    backward has two gradients of their size at once."""
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab
    wide = FULL if network.full_loss else load.width
    both = wide + (load.width if wide > load.width else 0)  # logits in both widths
    return Segment(wide * logits + INDEX * rows, forward=both * logits, backward=2 * wide * logits, logits=True)


def _build_chunked_loss(network: Stacks, load: Workload) -> Segment:
    """Return head and loss together (bench.models.modules.chunked_loss): forward makes the gradients of states and
    matrix, next to one chunk's logits in the run's precision and in fp32. Backward returns the matrix's gradient
    unchanged."""
    rows, table = load.micro * load.tokens(network.stacks[-1].tokens), network.table
    chunk = min(load.chunk or rows, rows) * network.vocab
    own = 0 if network.tied else table
    return Segment(
        saved=load.width * (rows * network.width + table), forward=(load.width + FULL) * chunk,
        backward=-load.width * table, parameters=own, largest=own, carried=table - own, logits=True,
    )  # fmt: skip
