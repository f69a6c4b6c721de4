"""Bytes of the tensors that a network keeps for backward, and of its temporary tensors, tensor by tensor.

Every term of the sums below is a tensor that autograd saves in the modules of transformers 5 (modeling_t5.py,
modeling_gpt2.py) or of torch. The graph of a compiled block saves the inputs of its matrices, norms and attention
kernels, and computes element-wise operations again in backward. The tests compare the sums with the tensors that
torch's `saved_tensors_hooks` sees. Bytes are those of one rank and one micro-batch.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from bench.core.network import Activation, Attention, Mlp, Stack, Stacks, list_named_matrices, list_part_matrices
from bench.core.spec import FULL
from bench.predict.memory.kernels import count_kernel_bytes
from bench.predict.workload import Workload, find_live, is_fused, is_output_reached

INDEX = 8
"""Bytes of one index, an int64: a token id, a position, or a bucket of the position bias."""
RANDOM_STATE = {"cpu": 5056, "cuda": 5056 + 16}
"""Bytes of random generator state that each activation checkpoint keeps, so that recomputation repeats the same
dropout. It is the state of torch's Mersenne twister, and on a GPU also the seed and offset of the GPU's generator."""
ACTIVATION: dict[Activation, tuple[int, int]] = {"gelu_new": (4, 0), "gelu": (1, 0), "silu": (1, 0), "relu": (1, 1)}
"""Two numbers for each activation function. The first is the number of tensors, each as wide as the MLP's inner layer,
that the function saves for backward. The second is 1 if the function's output is one of these tensors, and otherwise 0.
The output is known separately because the next matrix saves it anyway. gelu_new is several Python operations, which
save x, x/2, tanh and 1 + tanh."""


class Segment(NamedTuple):
    """Memory of one part of a forward pass, such as a sub-layer, in its forward and in its backward. Values are bytes
    per rank. Exception: `parameters`, `largest`, `carried` and `transposed` are numbers of elements of parameters or
    gradients."""

    saved: int  # bytes kept from its forward to its backward
    forward: int = 0  # temporary bytes while its forward runs, in addition to `saved`
    backward: int = 0  # temporary bytes of its backward, in addition to all bytes saved up to here
    parameters: int = 0  # elements of parameters whose gradients are complete after its backward
    largest: int = 0  # of the largest of these parameters; its gradient and the bucket into which it is copied coexist
    carried: int = 0  # elements of an incomplete gradient kept from here to the end of backward
    transposed: int = 0  # elements of a gradient not accumulated in place, as by torch's linear
    standing: int = 0  # bytes of `backward` that live for all of it: recomputed tensors and waiting gradients
    logits: bool = False  # True if its tensors are as wide as the vocabulary; they are reported as a separate term


class RepeatedSegments(NamedTuple):
    """A sequence of segments in forward order, such as the sub-layers of one block, and how many times in a row this
    sequence occurs."""

    block: list[Segment]
    times: int = 1


def list_segments(network: Stacks, load: Workload) -> list[RepeatedSegments]:
    """Return the segments of the forward pass (memory of its parts, such as sub-layers) in order, from the embedding of
    the first stack to the loss."""
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

    A checkpointed block keeps only its input, and is recomputed before its backward. The position bias is a tensor that
    all blocks of the stack add to their scores. It is kept while the forward of the blocks runs; with checkpointing it
    is kept until their backward has ended. Every block adds to the gradient of the bias, so that gradient exists from
    the backward of the last block to the backward of the first block.
    """
    length, trained = load.tokens(stack.tokens), network.trains_all
    rows = load.micro * length
    # the input of the first block needs no gradient if the embedding is frozen
    block, first = (_list_block_segments(network, stack, load, reached=reached) for reached in (True, trained))
    load = load._replace(compiled=False)  # only blocks are compiled
    embedding = _build_embedding(network, stack, load)
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
    """Return True if the output of a stack of blocks (encoder or decoder) is kept for backward.

    The output of the last stack is the input of the head, and is kept if the head's matrix is trained. The output of
    any other stack is the input of cross-attention. This output is kept if activation checkpoints hold it, or if the
    gradients of the cross-attention's matrices for keys and values need it.
    """
    if stack == network.stacks[-1]:
        return network.trains_all
    readers = [part for one in network.stacks for part in one.block if getattr(part, "over", None) == stack.name]
    names = [name for part in readers for name, _ in list_named_matrices(network, part)[1:-1]]
    return load.checkpointing or _keeps_input(network, names)


def _list_block_segments(network: Stacks, stack: Stack, load: Workload, *, reached: bool) -> list[Segment]:
    """Return the segments of one block, one for each sub-layer. `reached` says whether backward computes the gradient
    of the block's input.

    A decoder block that attends to the encoder's output also computes a gradient of that output. The gradients of all
    decoder blocks are summed in one buffer, which is kept until the encoder's backward begins. So the memory of each
    segment's backward contains this buffer."""
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
    if load.compiled:
        parts = _hold_gradients(parts, load.width)
    return [_add_waiting(part, waiting) for part in parts]


def _hold_gradients(parts: list[Segment], width: int) -> list[Segment]:
    """Return the segments of a compiled block. Its backward is one function, which returns the gradients of all
    parameters at its end. Until then, the gradients of its later segments are temporary tensors."""
    first, *others = parts
    done = list(itertools.accumulate(part.parameters for part in reversed(others)))[::-1]
    held = [
        part._replace(backward=part.backward + width * count, parameters=0, largest=0)
        for part, count in zip(others, done, strict=True)
    ]
    every, largest = sum(part.parameters for part in parts), max(part.largest for part in parts)
    return [first._replace(parameters=every, largest=largest), *held]


def _count_keys(network: Stacks, stack: Stack, part: Attention, load: Workload) -> int:
    """Return the number of tokens per sample that an attention attends to."""
    return load.tokens(stack.tokens if part.over is None else network.named(part.over).tokens)


def _add_waiting(part: Segment, waiting: int) -> Segment:
    """Return a copy of this segment whose backward holds `waiting` extra bytes from its start to its end."""
    return part._replace(backward=part.backward + waiting, standing=part.standing + waiting)


def _checkpoint_block(block: list[Segment], kept: int) -> list[Segment]:
    """Return the segments of a block with activation checkpointing. The forward of the block keeps only `kept` bytes:
    the block's input and a random state. The whole block is recomputed before its backward. The backward then frees the
    tensors of one segment after the other."""
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
    """Return the segment (memory in forward and backward) of a stack's embedding. The segment includes positions and
    the tensors that are made once for all blocks. These tensors are the bucket indices of the position bias, zeros in
    place of a bias, cosines and sines for rotary positions, and the mask between documents.

    One embedding matrix serves all stacks (encoder and decoder), and the backward of each stack adds to the matrix's
    gradient. The first contribution comes from the embedding of the last stack or, if the head is tied, from the head.
    The last contribution comes from the embedding of the first stack. From the first to the last contribution, the
    incomplete gradient is kept.

    With a tied head, nn.Linear leaves the head's gradient transposed. So torch writes the sum of the head's and the
    embedding's gradient to a third tensor.
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
    """Return the segment (memory in forward and backward) of an attention sub-layer with its norm; `queries` and `keys`
    are numbers of tokens per sample. `reached` says whether backward computes the gradient of the sub-layer's input."""
    rows, others = load.micro * queries, load.micro * keys
    *projections, (last, _) = (name for name in list_named_matrices(network, part))
    names = [name for name, _ in projections]
    own, far = (names, []) if part.over is None else (names[:1], names[1:])
    live = find_live(network, part, reached)
    saved, forward, backward = count_kernel_bytes(network, load, part, queries, keys, live)
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


def _build_mlp(network: Stacks, load: Workload, part: Mlp, rows: int, reached: bool) -> Segment:
    """Return the segment (memory in forward and backward) of an MLP with its norm; `rows` is the number of tokens in
    the micro-batch. `reached` says whether backward computes the gradient of the MLP's input."""
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
    if load.compiled:  # the outputs of the first matrices are kept; a plain relu keeps only their signs, as booleans
        signs = is_output * (not part.gated)
        count = sum(live) - live[0] * signs + keeps
        masks += wide * live[0] * signs
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
    """Return a copy of `segment`, the memory of the sub-layer `part`, with the number of trained elements filled in. If
    the sub-layer's matrices are quantised, the bytes of one dequantised matrix, in the run's precision, are added to
    the temporary bytes of forward and of backward."""
    matrices = list_part_matrices(network, part)
    sizes = [matrix.elements for matrix in matrices if matrix.trained]
    dequantised = load.width * max((matrix.elements for matrix in matrices if matrix.packed), default=0)
    return segment._replace(
        parameters=sum(sizes), largest=max(sizes, default=0),
        forward=segment.forward + dequantised, backward=segment.backward + dequantised,
    )  # fmt: skip


def _keeps_input(network: Stacks, names: Sequence[str]) -> bool:
    """Return True if the common input of the matrices with these names is kept for backward.

    Backward needs the input to compute the gradient of a trained matrix or of an adapter. Exception: an adapter with
    dropout does not need the input, because it keeps the input after dropout as a separate tensor. bitsandbytes always
    keeps the input of an int8 matrix.
    """
    adapter = network.adapter
    if adapter is None:
        return True
    int8 = adapter.quantization == "int8" and any(map(adapter.packs, names))
    return int8 or (not adapter.dropout and any(map(adapter.adapts, names)))


def _count_adapter_bytes(
    network: Stacks, load: Workload, names: Sequence[str], rows: int, width: int, reached: bool
) -> int:
    """Return the bytes that low-rank adapters keep for backward. The adapters belong to the matrices with these
    `names`. All these matrices share one input of `rows` tokens with `width` elements each.

    Each adapter keeps `rank` elements per token. With dropout, each adapter also keeps its own copy of the input. If
    the input needs a gradient (`reached`), an adapter with dropout keeps the dropout mask, too.
    """
    adapter = network.adapter
    if adapter is None:
        return 0
    mask = load.width if load.device == "cpu" and not load.compiled else 1
    copied = rows * width * (load.width + mask * reached) * adapter.dropout
    return sum(map(adapter.adapts, names)) * (rows * adapter.rank * load.width + copied)


def _count_norm_bytes(network: Stacks, load: Workload, rows: int) -> int:
    """Return the bytes that a norm of `rows` tokens saves for backward: its input and statistics per token. The norm's
    output is not counted here, because the next operation saves it.

    torch's layer norm keeps its input and two statistics per token, a mean and a scale. On a GPU, the two statistics
    are in fp32. An RMS norm, written as Python operations, keeps its input and a scale per token. If the RMS norm's
    weight is trained, the normalised input is kept as well. In bf16 and fp16, an RMS norm keeps its input a second time
    in fp32; its variant `rms_wide` keeps only the fp32 tensor. Compiled, each RMS norm keeps only its input and a scale
    per token.
    """
    states = rows * network.width
    if network.norm == "layer":
        return states * load.width + 2 * rows * (load.width if load.device == "cpu" else FULL)
    if load.compiled:
        return states * load.width + FULL * rows
    normalised = states * load.width * network.trains_all
    if network.norm == "rms_wide":
        return normalised + FULL * states + FULL * rows
    return normalised + states * (load.width + (FULL if load.width < FULL else 0)) + FULL * rows


def _count_mask_bytes(load: Workload, elements: int) -> int:
    """Return the bytes of a dropout mask; 0 without dropout. On a CPU the mask has the precision of its tensor. On a
    GPU and in compiled blocks, it has one byte per element."""
    return elements * (load.width if load.device == "cpu" and not load.compiled else 1) if load.dropout else 0


def _count_clamp_bytes(network: Stacks, load: Workload, states: int) -> int:
    """Return the bytes of the tensor that transformers' clamp of fp16 activations saves for backward: the input of the
    clamp. Return 0 if nothing is clamped."""
    return states * load.width if load.fp16 and network.clamps_fp16 else 0


def _build_head(network: Stacks, load: Workload) -> Segment:
    """Return the segment (memory in forward and backward) of the head, the matrix from hidden states to logits. If the
    head's weight is tied to the embedding, the head's gradient is kept until the embedding's gradient is complete."""
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab * load.width
    table = network.table * network.trains_all
    own = 0 if network.tied else table
    backward = logits + rows * network.width * load.width
    carried = table - own
    return Segment(0, forward=logits, backward=backward, parameters=own, largest=own, carried=carried, logits=True)


def _build_loss(network: Stacks, load: Workload) -> Segment:
    """Return the segment of cross-entropy, computed in the run's precision or in fp32. Log-probabilities are kept after
    the logits are freed. Backward holds two gradients at the same time, each as large as the log-probabilities."""
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = rows * network.vocab
    wide = FULL if network.full_loss else load.width
    both = wide + (load.width if wide > load.width else 0)  # logits exist in both widths
    return Segment(wide * logits + INDEX * rows, forward=both * logits, backward=2 * wide * logits, logits=True)


def _build_chunked_loss(network: Stacks, load: Workload) -> Segment:
    """Return the segment of head and loss together, for a loss that is computed in chunks of tokens
    (bench.models.modules.chunked_loss).

    Forward holds one chunk's logits at a time, in the run's precision and in fp32. Forward already computes two
    gradients and saves them: the gradient of the hidden states and the gradient of the head's matrix. Backward scales
    both gradients in place and returns them.

    The returned gradient of the head's matrix is counted as the gradient of a parameter. Its bytes are already counted
    as saved bytes. So the same number of bytes is subtracted from the temporary bytes in backward (field `backward`).
    """
    rows, table = load.micro * load.tokens(network.stacks[-1].tokens), network.table * network.trains_all
    chunk = min(load.chunk or rows, rows) * network.vocab
    own = 0 if network.tied else table
    return Segment(
        saved=load.width * (rows * network.width + table), forward=(load.width + FULL) * chunk,
        backward=-load.width * table, parameters=own, largest=own, carried=table - own, logits=True,
    )  # fmt: skip
