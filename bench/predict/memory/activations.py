"""Bytes of the tensors that a network keeps for backward, and of its temporary tensors, tensor by tensor.

Every term is a tensor that autograd saves in transformers 5's modules (modeling_t5.py, modeling_gpt2.py) or in torch's
own. The tests compare their sum with torch's `saved_tensors_hooks`. Bytes are those of one rank and one micro-batch.
"""

import itertools
from typing import NamedTuple

from bench.core.network import Activation, Attention, Mlp, Stack, Stacks, list_part_sizes
from bench.core.spec import FULL
from bench.predict.workload import Workload, is_fused

INDEX = 8
"""Bytes of one index, an int64: a token id, a position, or a bucket of the position bias."""
RANDOM_STATE = {"cpu": 5056, "cuda": 5056 + 16}
"""Bytes of the state of the random generators that a checkpoint keeps to repeat dropout: torch's Mersenne twister, and
on a GPU also its seed and offset."""
FUSED_QUERIES = 32
"""torch's memory-efficient attention rounds the rows of its log-sum-exp up to a multiple of this."""
ACTIVATION: dict[Activation, tuple[int, int]] = {"gelu_new": (4, 0), "gelu": (1, 0), "silu": (1, 0), "relu": (1, 1)}
"""For each activation function, the number of tensors of an MLP's inner width that it saves. The second value is 1 if
one of them is its output, which the next matrix saves anyway. gelu_new consists of Python operations and keeps x, x/2,
tanh and 1 + tanh."""


class Segment(NamedTuple):
    """One segment of a forward pass, such as a sub-layer. Values are bytes per rank, except that `parameters`,
    `largest`, `carried` and `transposed` are numbers of elements."""

    saved: int  # bytes kept from its forward to its backward
    forward: int = 0  # temporary bytes while its forward runs, in addition to `saved`
    backward: int = 0  # temporary bytes of its backward, in addition to all bytes saved up to here
    parameters: int = 0  # elements of parameters whose gradients are complete after its backward
    largest: int = 0  # largest of these parameters; its gradient exists next to its bucket until copied
    carried: int = 0  # elements of an incomplete gradient kept from here to the end of backward
    transposed: int = 0  # elements of a gradient not accumulated in place, as by torch's linear
    standing: int = 0  # bytes of `backward` that live throughout: recomputed and waiting tensors
    logits: bool = False  # True if its tensors are as wide as the vocabulary, a term of their own


class RepeatedSegments(NamedTuple):
    """Segments in forward order, and how many times they are repeated."""

    block: list[Segment]
    times: int = 1


def list_segments(network: Stacks, load: Workload) -> list[RepeatedSegments]:
    """Return the segments of the forward pass in order, from the embedding of the first stack to the loss."""
    head = [_build_head(network, load), _build_loss(network, load)]
    if load.chunk:
        head = [_build_chunked_loss(network, load), Segment(0, logits=True)]
    stacks = [part for stack in network.stacks for part in _list_stack_segments(network, stack, load)]
    # at the end of the first stack's backward, the embedding's gradient is complete
    end = Segment(0, parameters=network.table, largest=network.table, carried=-network.table)
    return [RepeatedSegments([end]), *stacks, RepeatedSegments(head)]


def _list_stack_segments(network: Stacks, stack: Stack, load: Workload) -> list[RepeatedSegments]:
    """Return the segments of a stack from its embedding to its last norm.

    A checkpointed block keeps its input and is recomputed before its backward. The position bias of the stack lives
    while its blocks run, or as long as their checkpoints. The gradient of the bias lives from the backward of the last
    block on.
    """
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
    """Return the segments of one block. If the block attends to another stack, the gradient of that stack's output is
    kept until the backward of that stack, and every block adds to it."""
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
    """Return the number of tokens per sample that an attention attends to."""
    return load.tokens(stack.tokens if part.over is None else network.named(part.over).tokens)


def _add_waiting(part: Segment, waiting: int) -> Segment:
    """Return a copy of this segment whose backward holds `waiting` extra bytes from its start to its end."""
    return part._replace(backward=part.backward + waiting, standing=part.standing + waiting)


def _checkpoint_block(block: list[Segment], kept: int) -> list[Segment]:
    """Return a checkpointed block: it keeps `kept` bytes until it is recomputed, and its backward frees its segments
    one by one."""
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
    """Return the embedding of a stack with its positions and with the tensors that are made once for all blocks. These
    are buckets of the position bias, zeros in place of a bias, cosines and sines, and the mask of documents.

    One embedding matrix serves all stacks, and each stack adds to its gradient. The gradients from the other stacks are
    kept until the backward of the first stack ends. With a tied head, the gradients from all stacks are kept. torch
    adds them to the head's gradient, which nn.Linear leaves transposed, in a third tensor.
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
    if load.documents and load.checkpointing:  # only checkpoints keep the mask
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
    """Return the segment of an attention sub-layer with its norm; `queries` and `keys` are tokens per sample."""
    rows = load.micro * queries
    saved, forward, backward = _count_kernel_bytes(load, part, queries, keys)
    # with sdpa and a bias, transformers makes a causal mask of booleans in every layer
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
    """Return three byte counts of the attention kernel that torch chooses: saved for backward, temporary in forward,
    temporary in backward.

    A position bias is a mask that needs a gradient, which no flash kernel supports. With such a bias, sdpa writes
    scores in fp32 on a CPU and uses the memory-efficient kernel on a GPU.
    """
    # keys are kept repeated for each head that shares them, unless the kernel supports groups: none does so with a
    # mask, and a GPU's only below fp32
    fused = is_fused(load, part)
    takes_groups = fused and not load.documents and (load.device == "cpu" or load.width < FULL)
    query = load.micro * queries * part.inner
    key = load.micro * keys * (part.key_inner if takes_groups else part.inner)
    scores = load.micro * part.heads * queries * keys
    turned = 2 * query * load.width if part.rotary else 0  # temporary bytes of a rotation in addition to its result
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
    if wide > load.width:  # queries, keys and values exist in both widths
        forward += wide * query + 2 * load.width * key
    # two gradients of scores exist after the output is freed; if scores are few, the peak is earlier
    return saved, forward, max(0, 2 * wide * scores - load.width * query)


def _count_fused_kernel_bytes(
    load: Workload, part: Attention, queries: int, query: int, key: int, scores: int
) -> tuple[int, int]:
    """Return the bytes that a fused attention kernel saves for backward, and its temporary bytes in backward."""
    rounded = -(-queries // FUSED_QUERIES) * FUSED_QUERIES if load.device == "cuda" else queries
    saved = load.width * 2 * (query + key) + FULL * load.micro * part.heads * rounded
    backward = load.width * (query + 2 * key)
    if part.position_bias and load.attention == "sdpa":
        # a contiguous bias is kept for every layer, and its gradient for every sample
        saved += load.width * scores // load.micro
        backward += load.width * scores
    return saved, backward


def _build_mlp(network: Stacks, load: Workload, part: Mlp, rows: int) -> Segment:
    """Return the segment of an MLP with its norm; `rows` is the tokens of the micro-batch."""
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
    """Return the bytes saved by a norm and by the operation after it: input and output of the norm, and the statistics.

    torch's kernel also keeps a mean and a scale per token, on a GPU in fp32. A norm of Python operations also keeps the
    normalised input, a scale per token and, below fp32, the input in fp32. A norm of the kind `rms_wide` keeps the fp32
    input in place of the input.
    """
    states = rows * network.width
    if network.norm == "layer":
        return 2 * states * load.width + 2 * rows * (load.width if load.device == "cpu" else FULL)
    if network.norm == "rms_wide":
        return states * (2 * load.width + FULL) + FULL * rows
    return states * (3 * load.width + (FULL if load.width < FULL else 0)) + FULL * rows


def _count_mask_bytes(load: Workload, elements: int) -> int:
    """Return the bytes of a dropout mask, which is as wide as its tensor on a CPU and one byte per element on a GPU."""
    return elements * (load.width if load.device == "cpu" else 1) if load.dropout else 0


def _count_clamp_bytes(network: Stacks, load: Workload, states: int) -> int:
    """Return the bytes that transformers' clamp of fp16 activations saves, which is its input."""
    return states * load.width if load.fp16 and network.clamps_fp16 else 0


def _build_head(network: Stacks, load: Workload) -> Segment:
    """Return the segment of the matrix from states to logits. With tied weights its gradient is kept until the gradient
    of the embedding is complete."""
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab * load.width
    own = 0 if network.tied else network.table
    backward = logits + rows * network.width * load.width
    carried = network.table - own
    return Segment(0, forward=logits, backward=backward, parameters=own, largest=own, carried=carried, logits=True)


def _build_loss(network: Stacks, load: Workload) -> Segment:
    """Return the segment of cross-entropy, computed in the run's precision or in fp32. Log-probabilities are kept after
    the logits are freed. Backward has two gradients of their size at the same time."""
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab
    wide = FULL if network.full_loss else load.width
    both = wide + (load.width if wide > load.width else 0)  # logits exist in both widths
    return Segment(wide * logits + INDEX * rows, forward=both * logits, backward=2 * wide * logits, logits=True)


def _build_chunked_loss(network: Stacks, load: Workload) -> Segment:
    """Return the segment of head and chunked loss together (bench.models.modules.chunked_loss).

    Forward already computes the gradients of states and matrix. It holds one chunk's logits at a time, in the run's
    precision and in fp32. Backward returns the matrix's gradient unchanged.
    """
    rows, table = load.micro * load.tokens(network.stacks[-1].tokens), network.table
    chunk = min(load.chunk or rows, rows) * network.vocab
    own = 0 if network.tied else table
    return Segment(
        saved=load.width * (rows * network.width + table), forward=(load.width + FULL) * chunk,
        backward=-load.width * table, parameters=own, largest=own, carried=table - own, logits=True,
    )  # fmt: skip
