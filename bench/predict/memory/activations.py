"""What a network keeps for backward, tensor by tensor, and what it needs for a moment.

Every term is a tensor that autograd saves in transformers 5's modules (modeling_t5.py, modeling_gpt2.py) or torch's
own; the tests hold their sum against torch's own `saved_tensors_hooks`. Bytes are those of one rank and one
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
"""Rows to which torch's memory-efficient attention rounds up its log-sum-exp."""
ACTIVATION: dict[Activation, tuple[int, int]] = {"gelu_new": (4, 0), "gelu": (1, 0), "silu": (1, 0), "relu": (1, 1)}
"""Tensors as wide as an MLP that an activation saves, and whether the last of them is its output, which is saved
anyway: gelu_new is written out in Python and keeps x, x/2, tanh and 1 + tanh."""


class Segment(NamedTuple):
    """A part of a forward pass; bytes per rank but for `parameters` and `largest`, which are elements."""

    saved: int  # kept from its forward to its backward
    forward: int = 0  # needed while its forward runs, beyond `saved`
    backward: int = 0  # needed while its backward runs, beyond what is saved up to here
    parameters: int = 0  # whose gradients are complete after its backward
    largest: int = 0  # the largest of them: a gradient lies beside its bucket until it is copied
    carried: int = 0  # elements of an incomplete gradient that wait from here to the end of backward
    transposed: int = 0  # elements of a gradient that is not added to in its place, as torch's own linear makes it
    standing: int = 0  # of `backward`, what lives between two operations as well: what was run again, what waits
    logits: bool = False  # as wide as the vocabulary: shown apart


class RepeatedSegments(NamedTuple):
    """Segments in the order of forward, and how often they follow each other."""

    block: list[Segment]
    times: int = 1


def list_segments(network: Stacks, load: Workload) -> list[RepeatedSegments]:
    """Return the forward pass in order, from the first stack's embedding to the loss."""
    head = [_build_head(network, load), _build_loss(network, load)]
    if load.chunk:
        head = [_build_chunked_loss(network, load), Segment(0, logits=True)]
    stacks = [part for stack in network.stacks for part in _list_stack_segments(network, stack, load)]
    # of the first stack's backward, where nothing of the embedding's gradient waits any more
    end = Segment(0, parameters=network.table, largest=network.table, carried=-network.table)
    return [RepeatedSegments([end]), *stacks, RepeatedSegments(head)]


def _list_stack_segments(network: Stacks, stack: Stack, load: Workload) -> list[RepeatedSegments]:
    """Return a stack from its embedding to its last norm; checkpointed, a block keeps its input and is run again before
    its backward. Its position bias lives while its blocks run, or as long as their checkpoints; the bias's gradient
    from the last block's backward on."""
    length = load.tokens(stack.tokens)
    embedding, block = _build_embedding(network, stack, load), _list_block_segments(network, stack, load)
    _, heads = stack.bias_table or (0, 0)
    bias = heads * length * length * load.width
    if load.checkpointing:
        embedding = embedding._replace(saved=embedding.saved + bias)
        block = _checkpoint_block(block, load.micro * length * network.width * load.width + RANDOM_STATE[load.device])
    else:
        block = [part._replace(forward=part.forward + bias) for part in block]
    earlier = [_add_waiting(part, bias) for part in block]
    last = _build_final_norm(network, load, load.micro * length)
    return [
        RepeatedSegments([embedding]),
        RepeatedSegments(earlier, stack.layers - 1),
        RepeatedSegments(block),
        RepeatedSegments([last]),
    ]


def _list_block_segments(network: Stacks, stack: Stack, load: Workload) -> list[Segment]:
    """Return one block. The gradient of an output that it attends to waits for that stack while blocks add to it."""
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
    """Return how many tokens are attended to."""
    return load.tokens(stack.tokens if part.over is None else network.named(part.over).tokens)


def _add_waiting(part: Segment, waiting: int) -> Segment:
    """A part in whose backward `waiting` bytes more live, from its beginning to its end."""
    return part._replace(backward=part.backward + waiting, standing=part.standing + waiting)


def _checkpoint_block(block: list[Segment], kept: int) -> list[Segment]:
    """A block of which `kept` bytes stay until it is run again; then backward frees part by part what that saved."""
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
    """Embedding of a stack, with its positions and the buckets of its position bias. One matrix serves all stacks:
    until the first one's backward ends, the gradient of the others waits and, where the head is no other matrix, that
    of all. To the head's, which nn.Linear leaves transposed, torch adds in a third tensor."""
    length, table, last = load.tokens(stack.tokens), network.table, stack == network.stacks[-1]
    rows, heads = stack.bias_table or (0, 0)
    positions = stack.positions * network.width
    indices = load.micro * length + (length * length if rows else 0) + (length if positions else 0)
    if positions and load.documents:
        indices += (load.micro - 1) * length
    tables = _rotation(stack, load) + _documents(load, length)
    dropped = _count_mask_bytes(load, load.micro * length * network.width)
    own = Segment(
        saved=INDEX * indices + dropped + _count_zero_bias_bytes(network, stack, load) + tables,
        parameters=rows * heads + positions,
        largest=positions,
    )
    if last and not network.tied:
        return own._replace(carried=table)
    return own._replace(backward=table * load.width, transposed=table if last else 0)


def _rotation(stack: Stack, load: Workload) -> int:
    """Bytes of the cosines and sines by which queries and keys are rotated: made once, for all blocks."""
    widths = [part.head_width for part in stack.block if isinstance(part, Attention) and part.rotary]
    rows = load.tokens(stack.tokens) * (load.micro if load.documents else 1)
    return 2 * rows * max(widths, default=0) * load.width


def _documents(load: Workload, length: int) -> int:
    """Bytes of the mask that says which tokens are of one document, as long as checkpoints keep it."""
    kept = load.documents and load.checkpointing
    return load.micro * length * length * (load.width if load.attention == "eager" else 1) if kept else 0


def _count_zero_bias_bytes(network: Stacks, stack: Stack, load: Workload) -> int:
    """Bytes of the zeros in place of a position bias: made once, for all blocks."""
    elements = [
        part.heads * load.tokens(stack.tokens) * _count_keys(network, stack, part, load)
        for part in stack.block
        if isinstance(part, Attention) and part.zero_bias and not part.bias_per_layer
        if is_fused(load, part) or load.checkpointing
    ]
    return sum(elements) * load.width


def _build_attention(network: Stacks, load: Workload, part: Attention, queries: int, keys: int) -> Segment:
    """One attention sub-layer with its norm."""
    rows = load.micro * queries
    saved, forward, backward = _count_kernel_bytes(load, part, queries, keys)
    # transformers' sdpa adds the causal mask to a bias in every layer: a mask of booleans
    mask = queries * keys if part.causal and load.attention == "sdpa" and (part.position_bias or part.zero_bias) else 0
    states = rows * network.width
    sizes = list_part_sizes(network, part)
    bias, indices = _own_bias(load, part, queries, keys)
    return Segment(
        saved=_count_norm_bytes(network, load, rows)
        + saved
        + mask
        + _count_mask_bytes(load, states)
        + _count_clamp_bytes(network, load, states)
        + indices,
        forward=forward + bias,
        backward=backward + states * load.width + bias,
        parameters=sum(sizes),
        largest=max(sizes),
    )


def _own_bias(load: Workload, part: Attention, queries: int, keys: int) -> tuple[int, int]:
    """Return bytes of a layer's own position bias, which is there while scores are made, and of what stays of it: the
    indices into its table, or the zeros in its place where a kernel takes them."""
    if not part.bias_per_layer:
        return 0, 0
    bias = load.width * part.heads * queries * keys
    if part.position_bias:
        return bias, INDEX * queries * keys
    return bias, bias if is_fused(load, part) else 0


def _count_kernel_bytes(load: Workload, part: Attention, queries: int, keys: int) -> tuple[int, int, int]:
    """Return bytes saved, and needed in forward and in backward, by the attention that torch chooses.

    A position bias is a mask that needs a gradient. No flash kernel takes one: sdpa writes attention out in fp32 on a
    CPU (where it needs none, it does not) and takes the memory-efficient kernel on a GPU.
    """
    query, key = load.micro * queries * part.inner, load.micro * keys * _kept_width(load, part)
    scores = load.micro * part.heads * queries * keys
    turned = 2 * query * load.width if part.rotary else 0  # what a rotation needs beside its result
    if is_fused(load, part):
        saved, forward, backward = _count_fused_kernel_bytes(load, part, queries, query, key, scores)
        if load.documents:  # the kernel's own form of the mask, in every layer
            saved += load.width * load.micro * queries * keys
        return saved, forward + turned, backward + turned
    wide = load.width if load.attention == "eager" else FULL
    dropped = (wide + (wide if load.device == "cpu" else 1)) * scores if load.dropout else 0
    saved = wide * (query + 2 * key + scores) + dropped + load.width * query
    # a second one of scores; sdpa scales queries and keys, and asks of every score whether it is minus infinity
    forward = wide * (scores + key) + (0 if load.attention == "eager" else scores + wide * query)
    if wide > load.width:  # queries, keys and values in both widths
        forward += wide * query + 2 * load.width * key
    # two gradients of scores, when the output has gone; where scores are few, before that
    return saved, forward, max(0, 2 * wide * scores - load.width * query)


def _kept_width(load: Workload, part: Attention) -> int:
    """Width of the keys that are kept: repeated for each head that shares them, unless a kernel takes groups. None does
    that with a mask, and a GPU's below fp32 alone."""
    takes_groups = is_fused(load, part) and not load.documents and (load.device == "cpu" or load.width < FULL)
    return part.key_inner if takes_groups else part.inner


def _count_fused_kernel_bytes(
    load: Workload, part: Attention, queries: int, query: int, key: int, scores: int
) -> tuple[int, int, int]:
    rounded = -(-queries // FUSED_QUERIES) * FUSED_QUERIES if load.device == "cuda" else queries
    saved = load.width * 2 * (query + key) + FULL * load.micro * part.heads * rounded
    backward = load.width * (query + 2 * key)
    if part.position_bias and load.attention == "sdpa":
        # a contiguous bias for every layer, and its gradient for every sample
        saved += load.width * scores // load.micro
        backward += load.width * scores
    return saved, 0, backward


def _build_mlp(network: Stacks, load: Workload, part: Mlp, rows: int) -> Segment:
    wide, states = rows * part.inner, rows * network.width
    kept, is_output = ACTIVATION[part.activation]
    # what the gate's product saves, and the input of the last matrix; a plain activation's output is that input
    same = is_output * (not (load.dropout and part.inner_dropout))
    count = kept + 1 + (2 - is_output if part.gated else -same)
    masks = _count_mask_bytes(load, (wide if part.inner_dropout else 0) + states)
    # of its input and output an activation that is one kernel has gradients when what the last matrix saved has gone
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


def _build_final_norm(network: Stacks, load: Workload, rows: int) -> Segment:
    """Its output is what cross-attention or the head saves, after dropout or scaling where there is one."""
    mask = _count_mask_bytes(load, rows * network.width) if network.final_dropout else 0
    sizes = network.norm_sizes
    return Segment(_count_norm_bytes(network, load, rows) + mask, parameters=sum(sizes), largest=max(sizes))


def _count_norm_bytes(network: Stacks, load: Workload, rows: int) -> int:
    """Bytes kept by a norm and by what follows: its input and output. Written out, also the normalised input, one scale
    per token and, below fp32, the input in fp32, `rms_wide` in place of the input itself; torch's kernel keeps a mean
    and a scale per token, a GPU's in fp32."""
    states = rows * network.width
    if network.norm == "layer":
        return 2 * states * load.width + 2 * rows * (load.width if load.device == "cpu" else FULL)
    if network.norm == "rms_wide":
        return states * (2 * load.width + FULL) + FULL * rows
    return states * (3 * load.width + (FULL if load.width < FULL else 0)) + FULL * rows


def _count_mask_bytes(load: Workload, elements: int) -> int:
    """Dropout's mask: as wide as what it masks on a CPU, a byte per element on a GPU."""
    return elements * (load.width if load.device == "cpu" else 1) if load.dropout else 0


def _count_clamp_bytes(network: Stacks, load: Workload, states: int) -> int:
    """What transformers' clamp of fp16 activations keeps: its input."""
    return states * load.width if load.fp16 and network.clamps_fp16 else 0


def _build_head(network: Stacks, load: Workload) -> Segment:
    """The matrix from states to logits; tied, its gradient waits for the embedding's."""
    rows = _count_head_rows(network, load)
    logits = rows * network.vocab * load.width
    own = 0 if network.tied else network.table
    backward = logits + rows * network.width * load.width
    carried = network.table - own
    return Segment(0, forward=logits, backward=backward, parameters=own, largest=own, carried=carried, logits=True)


def _count_head_rows(network: Stacks, load: Workload) -> int:
    return load.micro * load.tokens(network.stacks[-1].tokens)


def _build_loss(network: Stacks, load: Workload) -> Segment:
    """Cross-entropy in the run's precision, or in fp32: log-probabilities are kept, the logits beside them are dropped,
    and in backward two gradients of their size lie beside them."""
    rows = _count_head_rows(network, load)
    logits = rows * network.vocab
    wide = FULL if network.full_loss else load.width
    both = wide + (load.width if wide > load.width else 0)  # logits in both widths
    return Segment(wide * logits + INDEX * rows, forward=both * logits, backward=2 * wide * logits, logits=True)


def _build_chunked_loss(network: Stacks, load: Workload) -> Segment:
    """Head and loss together (bench.models.modules.chunked_loss): the gradients of states and matrix are made in
    forward, beside one chunk's logits, in the run's precision and in fp32. Backward hands the matrix's on as it is."""
    rows, table = _count_head_rows(network, load), network.table
    chunk = min(load.chunk or rows, rows) * network.vocab
    own = 0 if network.tied else table
    return Segment(
        saved=load.width * (rows * network.width + table), forward=(load.width + FULL) * chunk,
        backward=-load.width * table, parameters=own, largest=own, carried=table - own, logits=True,
    )  # fmt: skip
