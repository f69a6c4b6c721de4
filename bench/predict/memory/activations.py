"""Bytes of the tensors that a network keeps for backward, and of its temporary tensors, tensor by tensor.

Every term is a tensor that autograd saves in transformers 5's modules (modeling_t5.py, modeling_gpt2.py) or in torch's
own. The tests compare their sum with torch's `saved_tensors_hooks`. Bytes are those of one rank and one micro-batch.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from bench.core.network import Activation, Attention, Mlp, Stack, Stacks, list_named_matrices, list_part_matrices
from bench.core.spec import FULL
from bench.predict.workload import Live, Workload, find_live, is_fused, is_output_reached

INDEX = 8
"""Bytes of one index, an int64: a token id, a position, or a bucket of the position bias."""
RANDOM_STATE = {"cpu": 5056, "cuda": 5056 + 16}
"""Bytes of the state of the random generators that a checkpoint keeps to repeat dropout: torch's Mersenne twister, and
on a GPU also its seed and offset."""
FUSED_QUERIES = 32
"""torch's memory-efficient attention rounds the rows of its log-sum-exp up to a multiple of this."""
ACTIVATION: dict[Activation, tuple[int, int]] = {"gelu_new": (4, 0), "gelu": (1, 0), "silu": (1, 0), "relu": (1, 1)}
"""For each activation function, the number of tensors of an MLP's inner width that it saves. The second value is 1 if
one of these tensors is the function's output, which the next matrix saves anyway. gelu_new consists of Python
operations and keeps x, x/2, tanh and 1 + tanh."""


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
    table = network.table * network.trains_all
    end = Segment(0, parameters=table, largest=table, carried=-table)
    return [RepeatedSegments([end]), *stacks, RepeatedSegments(head)]


def _list_stack_segments(network: Stacks, stack: Stack, load: Workload) -> list[RepeatedSegments]:
    """Return the segments of a stack from its embedding to its last norm.

    A checkpointed block keeps its input and is recomputed before its backward. The position bias of the stack lives
    while its blocks run, or as long as their checkpoints. The gradient of the bias lives from the backward of the last
    block on.
    """
    length, trained = load.tokens(stack.tokens), network.trains_all
    rows = load.micro * length
    embedding = _build_embedding(network, stack, load)
    # the input of the first block needs no gradient if the embedding is frozen
    block, first = (_list_block_segments(network, stack, load, reached=reached) for reached in (True, trained))
    _, heads = stack.bias_table or (0, 0)
    bias = heads * length * length * load.width
    if load.checkpointing:
        embedding = embedding._replace(saved=embedding.saved + bias)
        kept = rows * network.width * load.width + RANDOM_STATE[load.device]
        block, first = _checkpoint_block(block, kept), _checkpoint_block(first, kept)
    else:
        block, first = ([part._replace(forward=part.forward + bias) for part in one] for one in (block, first))
    waiting = bias * trained
    middle = RepeatedSegments([_add_waiting(part, waiting) for part in block], stack.layers - (1 if trained else 2))
    blocks = [middle, RepeatedSegments(block)]
    if not trained:
        blocks = [RepeatedSegments(first), *blocks] if stack.layers > 1 else [RepeatedSegments(first)]
    # the final norm's output is saved by cross-attention or the head, after dropout or scaling if there is one
    mask = _count_mask_bytes(load, rows * network.width) if network.final_dropout else 0
    output = load.width * rows * network.width * _keeps_output(network, stack, load)
    norm_bytes, sizes = _count_norm_bytes(network, load, rows) + output, network.norm_sizes
    norm = Segment(norm_bytes + mask, parameters=sum(sizes) * trained, largest=max(sizes) * trained)
    return [RepeatedSegments([embedding]), *blocks, RepeatedSegments([norm])]


def _keeps_output(network: Stacks, stack: Stack, load: Workload) -> bool:
    """Return True if the output of a stack is kept for backward. The head keeps the output of the last stack if it is
    trained. Cross-attention, or its checkpoints, keep the output of another stack."""
    if stack == network.stacks[-1]:
        return network.trains_all
    readers = [part for one in network.stacks for part in one.block if getattr(part, "over", None) == stack.name]
    names = [name for part in readers for name, _ in list_named_matrices(network, part)[1:-1]]
    return load.checkpointing or _keeps_input(network, names)


def _list_block_segments(network: Stacks, stack: Stack, load: Workload, *, reached: bool) -> list[Segment]:
    """Return the segments of one block. If the block attends to another stack, the gradient of that stack's output is
    kept until the backward of that stack, and every block adds to it. `reached` says whether backward computes the
    gradient of the block's input."""
    lengths = [load.tokens(network.named(name).tokens) for name in stack.attended]
    waiting = load.micro * sum(lengths) * network.width * load.width
    length, parts = load.tokens(stack.tokens), list[Segment]()
    for part in stack.block:
        if isinstance(part, Attention):
            keys = _count_keys(network, stack, part, load)
            parts.append(_build_attention(network, load, part, length, keys, reached))
        else:
            parts.append(_build_mlp(network, load, part, load.micro * length, reached))
        reached = is_output_reached(network, part, reached)
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
        if part.zero_bias and not part.bias_per_layer and (is_fused(network, load, part) or load.checkpointing)
    )
    if not network.trains_all:  # no gradient reaches the embedding
        return Segment(zeros * load.width + rotation + mask)
    dropped = _count_mask_bytes(load, load.micro * length * network.width)
    own = Segment(
        saved=INDEX * indices + dropped + zeros * load.width + rotation + mask,
        parameters=buckets * heads + positions,
        largest=positions,
    )
    if last and not network.tied:
        return own._replace(carried=table)
    return own._replace(backward=table * load.width, transposed=table if last else 0)


def _build_attention(
    network: Stacks, load: Workload, part: Attention, queries: int, keys: int, reached: bool
) -> Segment:
    """Return the segment of an attention sub-layer with its norm; `queries` and `keys` are tokens per sample. `reached`
    says whether backward computes the gradient of its input."""
    rows, others = load.micro * queries, load.micro * keys
    *projections, (last, _) = (name for name in list_named_matrices(network, part))
    names = [name for name, _ in projections]
    own, far = (names, []) if part.over is None else (names[:1], names[1:])
    live = find_live(network, part, reached)
    saved, forward, backward = _count_kernel_bytes(network, load, part, queries, keys, live)
    # with sdpa and a bias, transformers makes a causal mask of booleans in every layer
    mask = queries * keys if part.causal and load.attention == "sdpa" and (part.position_bias or part.zero_bias) else 0
    states = rows * network.width
    bias = indices = 0
    fused, trained = is_fused(network, load, part), network.trains_all
    if part.bias_per_layer:  # the bias lives while scores are made; its indices, or its zeros for a kernel, are kept
        bias = load.width * part.heads * queries * keys
        zeros = bias if fused else 0
        indices = INDEX * queries * keys * trained if part.position_bias else zeros
    # a fused kernel saves its output, which is the input of the last matrix
    attended = rows * part.inner * load.width
    kept = saved + attended * max(fused * any(live), _keeps_input(network, [last]))
    dropped = _count_mask_bytes(load, states) + _count_clamp_bytes(network, load, states)
    kept += mask * trained + indices + dropped * is_output_reached(network, part, reached)
    output = _keeps_input(network, own) * states * load.width
    adapted = _count_adapter_bytes(network, load, own, rows, network.width, reached)
    adapted += _count_adapter_bytes(network, load, far, others, network.width, True)
    adapted += _count_adapter_bytes(network, load, [last], rows, part.inner, any(live))
    segment = Segment(
        saved=_count_norm_bytes(network, load, rows) * reached + output + kept + adapted,
        forward=forward + bias,
        backward=backward + states * load.width + bias * trained,
    )
    return _count_part_parameters(network, load, part, segment)


def _count_kernel_bytes(
    network: Stacks, load: Workload, part: Attention, queries: int, keys: int, live: Live
) -> tuple[int, int, int]:
    """Return three byte counts of the attention kernel that torch chooses: saved for backward without its output,
    temporary in forward, temporary in backward.

    A position bias is a mask that needs a gradient, which no flash kernel supports. With such a bias, sdpa writes
    scores in fp32 on a CPU and uses the memory-efficient kernel on a GPU.
    """
    # keys are kept repeated for each head that shares them, unless the kernel supports groups: none does so with a
    # mask, and a GPU's only below fp32
    fused = is_fused(network, load, part)
    takes_groups = fused and not load.documents and (load.device == "cpu" or load.width < FULL)
    query = load.micro * queries * part.inner
    key = load.micro * keys * (part.key_inner if takes_groups else part.inner)
    scores = load.micro * part.heads * queries * keys
    turned = 2 * query * load.width if part.rotary else 0  # temporary bytes of a rotation in addition to its result
    if fused:
        saved, backward = _count_fused_kernel_bytes(network, load, part, queries, query, key, scores)
        if load.documents:  # the kernel's own form of the mask, in every layer
            saved += load.width * load.micro * queries * keys
        return saved * any(live), turned, backward + turned
    wide = load.width if load.attention == "eager" else FULL
    mask = (wide if load.device == "cpu" else 1) * scores
    scored = live.queries or live.keys  # a factor of a product is kept for the gradient of the other factor
    saved = wide * (query * live.keys + key * live.queries + key * scored)
    if load.dropout:  # softmax's output, the mask, and the weights after dropout
        saved += (wide * scores + mask) * scored + wide * scores * live.values
    else:
        saved += wide * scores * any(live)
    # a second tensor of scores; sdpa scales queries and keys, and compares every score with minus infinity
    forward = wide * (scores + key) + (0 if load.attention == "eager" else scores + wide * query)
    if wide > load.width:  # queries, keys and values exist in both widths
        forward += wide * query + 2 * load.width * key
    # two gradients of scores exist after the output is freed; if scores are few, the peak is earlier
    return saved, forward, max(0, 2 * wide * scores - load.width * query)


def _count_fused_kernel_bytes(
    network: Stacks, load: Workload, part: Attention, queries: int, query: int, key: int, scores: int
) -> tuple[int, int]:
    """Return the bytes that a fused attention kernel saves for backward without its output, and its temporary bytes in
    backward."""
    rounded = -(-queries // FUSED_QUERIES) * FUSED_QUERIES if load.device == "cuda" else queries
    saved = load.width * (query + 2 * key) + FULL * load.micro * part.heads * rounded
    backward = load.width * (query + 2 * key)
    if part.position_bias and load.attention == "sdpa":
        # a contiguous bias is kept for every layer, and its gradient for every sample
        saved += load.width * scores // load.micro
        backward += load.width * scores * network.trains_all
    return saved, backward


def _build_mlp(network: Stacks, load: Workload, part: Mlp, rows: int, reached: bool) -> Segment:
    """Return the segment of an MLP with its norm; `rows` is the tokens of the micro-batch. `reached` says whether
    backward computes the gradient of its input."""
    wide, states = rows * part.inner, rows * network.width
    *first, last = (name for name, _ in list_named_matrices(network, part))
    kept, is_output = ACTIVATION[part.activation]
    # saved: tensors of the gate's product and the input of the last matrix, which is the output of a plain activation
    keeps = _keeps_input(network, [last])
    same = is_output * (not (load.dropout and part.inner_dropout))
    live = [reached or network.adapter is None or network.adapter.adapts(name) for name in first]
    count = kept * live[0] + keeps
    if part.gated:  # a factor of the product is kept for the gradient of the other factor
        count += live[0] + live[1] - (is_output if all(live) else 0)
    else:
        count -= same * keeps * live[0]
    output = is_output_reached(network, part, reached)
    masks = _count_mask_bytes(load, wide * any(live) * part.inner_dropout + states * output)
    # an activation in one kernel has gradients of input and output only after the input of the last matrix is freed
    gradients = 2 if part.gated or kept > 1 or same else 1
    adapted = _count_adapter_bytes(network, load, first, rows, network.width, reached)
    adapted += _count_adapter_bytes(network, load, [last], rows, part.inner, any(live))
    segment = Segment(
        saved=_count_norm_bytes(network, load, rows) * reached
        + _keeps_input(network, first) * states * load.width
        + count * wide * load.width
        + masks
        + adapted
        + _count_clamp_bytes(network, load, states) * output,
        forward=wide * load.width,
        backward=(gradients * wide + states) * load.width,
    )
    return _count_part_parameters(network, load, part, segment)


def _count_part_parameters(network: Stacks, load: Workload, part: Attention | Mlp, segment: Segment) -> Segment:
    """Return the segment of a sub-layer with the elements of its trained parameters. If its matrices are quantised,
    both passes hold one of them at a time in the run's precision."""
    matrices = list_part_matrices(network, part)
    sizes = [matrix.elements for matrix in matrices if matrix.trained]
    dequantised = load.width * max((matrix.elements for matrix in matrices if matrix.packed), default=0)
    return segment._replace(
        parameters=sum(sizes), largest=max(sizes, default=0),
        forward=segment.forward + dequantised, backward=segment.backward + dequantised,
    )  # fmt: skip


def _keeps_input(network: Stacks, names: Sequence[str]) -> bool:
    """Return True if the tensor that matrices of these names read is kept for backward.

    A trained matrix and an adapter need it for their weight's gradient, unless dropout replaces it. bitsandbytes keeps
    the input of an int8 matrix.
    """
    adapter = network.adapter
    if adapter is None:
        return True
    int8 = adapter.quantization == "int8" and any(map(adapter.packs, names))
    return int8 or (not adapter.dropout and any(map(adapter.adapts, names)))


def _count_adapter_bytes(
    network: Stacks, load: Workload, names: Sequence[str], rows: int, width: int, reached: bool
) -> int:
    """Return the bytes that the adapters of matrices with a common input keep: `rank` elements per token, and with
    dropout their own copy of the input and its mask. `width` is the input's elements per token."""
    adapter = network.adapter
    if adapter is None:
        return 0
    mask = load.width if load.device == "cpu" else 1
    copied = rows * width * (load.width + mask * reached) * adapter.dropout
    return sum(map(adapter.adapts, names)) * (rows * adapter.rank * load.width + copied)


def _count_norm_bytes(network: Stacks, load: Workload, rows: int) -> int:
    """Return the bytes saved by a norm: its input and the statistics. Its output is saved by the operation after it.

    torch's kernel also keeps a mean and a scale per token, on a GPU in fp32. A norm of Python operations also keeps a
    scale per token, the normalised input if its own scale is trained and, below fp32, the input in fp32. A norm of the
    kind `rms_wide` keeps the fp32 input in place of the input.
    """
    states = rows * network.width
    if network.norm == "layer":
        return states * load.width + 2 * rows * (load.width if load.device == "cpu" else FULL)
    normalised = states * load.width * network.trains_all
    if network.norm == "rms_wide":
        return normalised + FULL * states + FULL * rows
    return normalised + states * (load.width + (FULL if load.width < FULL else 0)) + FULL * rows


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
    table = network.table * network.trains_all
    own = 0 if network.tied else table
    backward = logits + rows * network.width * load.width
    carried = table - own
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
    rows, table = load.micro * load.tokens(network.stacks[-1].tokens), network.table * network.trains_all
    chunk = min(load.chunk or rows, rows) * network.vocab
    own = 0 if network.tied else table
    return Segment(
        saved=load.width * (rows * network.width + table), forward=(load.width + FULL) * chunk,
        backward=-load.width * table, parameters=own, largest=own, carried=table - own, logits=True,
    )  # fmt: skip
