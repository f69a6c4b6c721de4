"""Work of one pass over a model on one rank: matrix products, attention, memory traffic, and the number of operations.
This module also computes a model's FLOPs.

Element-wise work is counted from transformers 5's modeling_t5.py, modeling_gpt2.py and modeling_llama.py as written,
without fusion: each operation reads its operands from memory and writes its result. If blocks are compiled, all
element-wise work between two matrix products counts as one operation, which reads its inputs once and writes its
outputs once.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from bench.core.machine import ProductKind
from bench.core.network import Activation, Attention, Mlp, Stack, Stacks, list_named_matrices
from bench.core.spec import FULL, WIDTH, Frozen, Precision, RunSpec
from bench.predict.workload import OWN, Workload, find_live, get_network, is_fused, is_output_reached

RMS_PASSES = 6
"""Number of times that T5LayerNorm reads or writes its whole input tensor in fp32. The norm squares, averages and
scales this tensor."""
LAYER_NORM_PASSES = 3
"""Number of times that torch's layer norm reads or writes its whole tensor. The input is read for mean and deviation,
and read again to be scaled. Then the output is written."""
ROTARY_PASSES = 10
"""Number of reads and writes of queries and keys in a rotary embedding: product with cosines, swap of halves, product
with sines, and sum."""
ACTIVATION_PASSES: dict[Activation, int] = {"gelu_new": 17, "gelu": 2, "silu": 2, "relu": 2}
"""Number of reads and writes of the whole tensor in an activation function. gelu_new consists of a power, three
scalings, two sums, a tanh and a product."""
COMPILED_NORM_PASSES, COMPILED_RESIDUAL_PASSES, COMPILED_SCORES_PASSES = 2, 3, 4
"""Number of reads and writes of the whole tensor in compiled blocks: for a norm, for a residual sum with its dropout,
and for softmax with all work on scores. For the softmax, values of 2 to 6 are plausible. The value 4 was chosen
together with the constant BESIDE in bench.predict.step_time.compute, so that predicted times agree with published ones.
"""
ADAPTER_PASSES, COMPILED_ADAPTER_PASSES = 5, 3
"""Number of times that a low-rank adapter reads or writes a tensor of the size of its output: without compiled blocks,
and with them. Without compilation, scaling the adapter's output takes a read and a write. Adding it to the output of
the frozen matrix takes two reads and a write. Compiled blocks scale and add in one operation, with two reads and a
write."""

_KEPT = 256  # cached results; a study has few networks and lengths, and each run uses them again


class Matmul(NamedTuple):
    """Equal matrix products, each of an m × k matrix and a k × n matrix. The field `times` is the number of these
    products."""

    m: int
    k: int
    n: int
    times: int = 1
    inputs: bool = True  # backward computes the gradient of the first factor
    weights: bool = True  # backward computes the gradient of the second factor
    kind: ProductKind = "forward"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.times

    @property
    def elements(self) -> int:
        """Number of elements read and written."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.times


Products = tuple[Matmul, ...]


class PassWork(NamedTuple):
    """Work of one pass over a model, or over part of a model."""

    matmuls: Products = ()
    attention_flops: int = 0  # for scores and weighted values of all pairs of tokens, masked or not, as in model FLOPs
    traffic_bytes: int = 0  # for element-wise work: every operand read and every result written
    operations: int = 0  # number of operations that the host starts, one after the other
    fused_flops: int = 0  # for a fused attention kernel, which skips the pairs hidden by a causal mask
    batched: Products = ()  # products of each sample and head in an attention that writes its scores to memory
    dequantised_bytes: int = 0  # quantised weights read and their values written, in forward and again in backward
    forward_only: int = 0  # part of `attention_flops` in products without a backward
    forward_only_fused: int = 0  # part of `fused_flops` in kernels without a backward

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written by all work except matrix products."""
        return self.traffic_bytes + self.dequantised_bytes

    def plus(self, other: Self) -> Self:
        """Return the sum of this work and `other`."""
        sums: list[Any] = [operator.add(mine, theirs) for mine, theirs in zip(self, other, strict=True)]
        return type(self)(*sums)

    def times(self, number: int) -> Self:
        """Return this work multiplied by `number`."""
        matmuls, batched = (
            tuple(product._replace(times=product.times * number) for product in products)
            for products in (self.matmuls, self.batched)
        )
        counts = {name: number * value for name, value in self._asdict().items() if isinstance(value, int)}
        return self._replace(matmuls=matmuls, batched=batched, **counts)

    @property
    def matmul_flops(self) -> int:
        return sum(product.flops for product in self.matmuls)


def compute_backward(forward: PassWork) -> PassWork:
    """Return the work of a backward pass.

    Every product of forward has two products of equal size in backward, for the gradients of its two factors. There is
    no product for the gradient of a frozen weight, or of a tensor before the first trained parameter. A fused attention
    kernel has two products in forward and five products in backward, since it recomputes the scores (arXiv 2307.08691,
    section 3.1). Element-wise traffic is twice that of forward, since the gradient of every result is read and the
    gradient of every operand is written. The number of operations doubles.
    """

    def turn(products: Products) -> Products:  # into the two products that give the gradients of both factors
        found: list[Matmul] = []
        for m, k, n, times, inputs, weights, _ in products:
            found += [Matmul(m, n, k, times, kind="inputs")] * inputs
            found += [Matmul(k, m, n, times, kind="weights")] * weights
        return tuple(found)

    return PassWork(
        turn(forward.matmuls),
        2 * (forward.attention_flops - forward.forward_only),
        2 * forward.traffic_bytes,
        2 * forward.operations,
        5 * (forward.fused_flops - forward.forward_only_fused) // 2,
        turn(forward.batched),
        forward.dequantised_bytes,
    )


def compute_forward(network: Stacks, load: Workload) -> PassWork:
    """Return the work of one forward pass including its loss, without recomputation."""
    return compute_blocks(network, load).plus(compute_ends(network, load))


def compute_ends(network: Stacks, load: Workload) -> PassWork:
    """Return the work of a forward pass outside of the blocks: the last norms, the head and the loss."""
    rows = load.micro * sum(load.tokens(stack.tokens) for stack in network.stacks)
    # the norms of all stacks count as one operation
    norms = _compute_norm(network, load._replace(compiled=load.software.fused), rows)
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = (FULL if network.full_loss else load.width) * rows * network.vocab
    # log-softmax reads the logits twice and writes once
    head = Matmul(rows, network.width, network.vocab, weights=network.trains_all)
    return norms.plus(PassWork((head,), 0, 3 * logits, 6))


def compute_recomputed(network: Stacks, load: Workload) -> PassWork:
    """Return the work of recomputing all checkpointed blocks; no work without checkpointing.

    The last matrix product of a block is recomputed only in two cases. In the first, the operation after it (dropout or
    the clamp of fp16) saves a tensor for backward. In the second, the block is compiled, since a compiled graph always
    runs to its end.
    """
    whole = load.compiled or load.dropout or (load.fp16 and network.clamps_fp16)
    return compute_blocks(network, load, whole=whole) if load.checkpointing else PassWork()


def compute_blocks(network: Stacks, load: Workload, *, whole: bool = True) -> PassWork:
    """Return the work of all blocks in one forward pass. If `whole` is False, the last matrix product of each block
    is excluded. Blocks with hand-written fused kernels are assumed to have the memory traffic and operations of
    compiled blocks."""
    if load.software.fused and not load.compiled:
        found = compute_blocks(network, load._replace(compiled=True), whole=whole)
        if load.software.started_unfused:
            started = compute_blocks(network, load._replace(software=OWN), whole=whole).operations
            found = found._replace(operations=started)
        return found
    found = PassWork()
    for stack in network.stacks:
        if network.trains_all:
            found = found.plus(_compute_block(network, stack, load, whole=whole, reached=True).times(stack.layers))
        elif stack.layers:  # the input of the first block needs no gradient
            found = found.plus(_compute_block(network, stack, load, whole=whole, reached=False))
            found = found.plus(_compute_block(network, stack, load, whole=whole, reached=True).times(stack.layers - 1))
    return found


def _compute_block(network: Stacks, stack: Stack, load: Workload, *, whole: bool, reached: bool) -> PassWork:
    """Return the work of one block in a forward pass. If `whole` is False, the block's last matrix product is excluded.
    `reached` says whether backward computes the gradient of the block's input."""
    block, length = PassWork(), load.tokens(stack.tokens)
    for place, part in enumerate(stack.block, 1):
        complete = whole or place < len(stack.block)
        if isinstance(part, Mlp):
            block = block.plus(_compute_mlp(network, part, load, load.micro * length, whole=complete, reached=reached))
        else:
            keys = length if part.over is None else load.tokens(network.named(part.over).tokens)
            block = block.plus(_compute_attention(network, part, load, length, keys, whole=complete, reached=reached))
        reached = is_output_reached(network, part, reached)
    return block


def _compute_attention(
    network: Stacks, part: Attention, load: Workload, queries: int, keys: int, *, whole: bool, reached: bool
) -> PassWork:
    """Return the forward work of an attention sub-layer with its norm; `queries` and `keys` are numbers of tokens per
    sample. If `whole` is False, the sub-layer's last product (the output projection) is excluded. `reached` says
    whether backward computes the gradient of the sub-layer's input."""
    rows, others = load.micro * queries, load.micro * keys
    pairs = load.micro * part.heads * queries * keys
    flops = 2 * 2 * pairs * part.head_width
    biased = bool(part.position_bias) or part.zero_bias
    on_cpu = load.device == "cpu"
    written_out = load.attention == "eager" or (on_cpu and (biased or not is_fused(network, load, part)))
    half = part.causal and not (biased or load.documents)  # a kernel that knows the mask skips half of the pairs
    traffic = int(_count_score_bytes(part, load) * pairs) if written_out else load.width * biased * pairs
    # adds a copy and the residual sum
    traffic += load.width * 2 * rows * part.inner + _count_residual_bytes(network, load, rows)
    operations = 14 + 6 * written_out + load.dropout * (1 + written_out) + 10 * part.rotary
    live = find_live(network, part, reached)
    projections = _compute_projections(network, part, load, rows, others, reached)
    last = _compute_matrices(network, load, list_named_matrices(network, part)[-1:], rows, any(live), whole=whole)
    if load.compiled:
        operations = 6 + written_out + len(part.matrices(network.width)) - (not part.fused)
    else:
        traffic += load.width * ROTARY_PASSES * part.rotary * (rows * part.inner + others * part.key_inner)
    found = PassWork((), flops, traffic, operations, 0 if written_out else flops // (1 + half))
    if written_out:
        number = load.micro * part.heads
        scored = live.queries or live.keys
        scores = Matmul(queries, part.head_width, keys, number, live.queries, live.keys)
        values = Matmul(queries, keys, part.head_width, number, scored, live.values)
        found = found._replace(batched=(scores, values))
    gradients = live.queries + live.keys + live.values + (live.queries or live.keys)  # of four operands
    found = found._replace(
        forward_only=(4 - gradients) * flops // 4, forward_only_fused=found.fused_flops * (not any(live))
    )
    return _compute_norm(network, load, rows).plus(projections).plus(last).plus(found)


def _count_score_bytes(part: Attention, load: Workload) -> float:
    """Return the bytes moved for each pair of a query and a key, in an attention that writes its scores to memory. The
    bytes are moved between the attention's two matrix products (scores and weighted values).

    transformers scales scores, adds a bias, adds a mask if there is one, and takes softmax. Each operation reads and
    writes all scores. Llama's softmax is in fp32, which adds the bytes of converting the scores.
    """
    width, biased = load.width, bool(part.position_bias) or part.zero_bias
    if load.device == "cpu":  # torch's own kernel; its products are not part of calibrated attention
        return 8 * width + load.dropout * (2 * width + 1)
    if load.compiled:
        return (COMPILED_SCORES_PASSES + biased) * width + load.dropout
    masked = part.causal or load.documents
    by_fp32 = 2 * FULL * (part.rotary and width < FULL)
    return (4 + 2 * biased + 2 * masked) * width + by_fp32 + load.dropout * (2 * width + 1)


def _count_residual_bytes(network: Stacks, load: Workload, rows: int) -> int:
    """Return the bytes moved by the residual sum after a sub-layer and by the dropout before it. The dropout mask has
    one byte per element."""
    unfused = load.dropout and not load.compiled
    return rows * network.width * (load.width * (COMPILED_RESIDUAL_PASSES + 2 * unfused) + load.dropout)


def _compute_projections(
    network: Stacks, part: Attention, load: Workload, rows: int, others: int, reached: bool
) -> PassWork:
    """Return the work of the weight matrices of an attention, except for its output projection. `rows` is the number of
    tokens that give queries, and `others` the number of tokens that give keys and values. `reached` says whether
    backward computes the gradient of the attention's input."""
    named, far = list_named_matrices(network, part), part.over is not None
    first, *rest = named[:-1]
    found = _compute_matrices(network, load, [first], rows, reached)
    return found.plus(_compute_matrices(network, load, rest, others, reached or far)) if rest else found


def _compute_matrices(
    network: Stacks, load: Workload, named: Sequence[tuple[str, tuple[int, int]]], rows: int, reached: bool, *,
    whole: bool = True,
) -> PassWork:  # fmt: skip
    """Return the work of the weight matrices in `named`, with their adapters. The matrices have equal shapes and read
    the same input of `rows` tokens. `reached` says whether backward computes the gradient of this input.

    If `whole` is False, the matrix product that runs last is excluded, because a recomputation may end before it. With
    adapters, this is the second product of the adapters; without adapters, it is the product of the matrices.
    """
    (k, n), adapter, number = named[0][1], network.adapter, len(named)
    if adapter is None:
        return PassWork((Matmul(rows, k, n, number),) if whole else ())
    adapted = sum(adapter.adapts(name) for name, _ in named)
    packed = sum(adapter.packed_bytes(name, n, k) + load.width * n * k * adapter.packs(name) for name, _ in named)
    if not adapted:
        frozen = Matmul(rows, k, n, number, reached, weights=False)
        return PassWork((frozen,), dequantised_bytes=packed) if whole else PassWork()
    narrow, wide = Matmul(rows, k, adapter.rank, adapted, reached), Matmul(rows, adapter.rank, n, adapted)
    products = (Matmul(rows, k, n, number, reached, weights=False), narrow, wide)[: 3 if whole else 2]
    # the adapter's output is scaled and added; an adapter's dropout reads, writes and keeps a mask
    passes = COMPILED_ADAPTER_PASSES if load.compiled else ADAPTER_PASSES
    traffic = adapted * load.width * passes * rows * n
    traffic += adapted * rows * k * (1 if load.compiled else 2 * load.width + 1) * adapter.dropout
    operations = adapted * (2 if load.compiled else 4 + adapter.dropout)
    return PassWork(products, 0, traffic, operations, dequantised_bytes=packed)


def _compute_mlp(network: Stacks, part: Mlp, load: Workload, rows: int, *, whole: bool, reached: bool) -> PassWork:
    """Return the forward work of an MLP with its norm; `rows` is the number of tokens in the micro-batch. If `whole` is
    False, the MLP's last matrix product is excluded. `reached` says whether backward computes the gradient of the MLP's
    input."""
    *named, last = list_named_matrices(network, part)
    first = _compute_matrices(network, load, named, rows, reached)
    live = reached or network.adapter is None or any(network.adapter.adapts(name) for name, _ in named)
    products = first.plus(_compute_matrices(network, load, [last], rows, live, whole=whole))
    passes = 2 + part.gated if load.compiled else ACTIVATION_PASSES[part.activation] + 3 * part.gated
    traffic = load.width * passes * rows * part.inner + _count_residual_bytes(network, load, rows)
    operations = 4 + whole + part.gated if load.compiled else 6 + passes // 2 + load.dropout
    if load.dropout and part.inner_dropout:
        traffic += rows * part.inner * (1 if load.compiled else 2 * load.width + 1)
        operations += not load.compiled
    return _compute_norm(network, load, rows).plus(products).plus(PassWork((), 0, traffic, operations))


def _compute_norm(network: Stacks, load: Workload, rows: int) -> PassWork:
    states = rows * network.width
    if load.compiled:
        return PassWork((), 0, states * COMPILED_NORM_PASSES * load.width, 1)
    if network.norm == "layer":
        return PassWork((), 0, states * LAYER_NORM_PASSES * load.width, 1)
    converted = (2 * (load.width + FULL)) if load.width < FULL else 0
    return PassWork((), 0, states * (RMS_PASSES * FULL + 3 * load.width + converted), 6 + 2 * (load.width < FULL))


class StepFlops(Frozen):
    """Matmul FLOPs of one optimizer step over all ranks. Padding tokens count as well."""

    model: int  # model FLOPs: forward and backward
    hardware: int  # executed FLOPs: model FLOPs and recomputation


def compute_flops_per_step(spec: RunSpec) -> StepFlops:
    """Return the exact number of matmul FLOPs of one optimizer step of `spec`, summed over all ranks and micro-steps.

    To get FLOP/s per device, divide the result by the world size and by the step time. Raise UserError for an unknown
    model family, and NoPrediction for a family that does not describe its network.
    """
    network, sample = get_network(spec), spec.sequence
    model = spec.global_batch * compute_training_flops(network, sample)
    if not spec.activation_checkpointing:
        return StepFlops(model=model, hardware=model)
    again = compute_recomputed_flops(
        network, sample, dropout=spec.model.dropout, precision=spec.precision, compiled=spec.model.compile == "blocks"
    )
    return StepFlops(model=model, hardware=model + spec.global_batch * again)


def compute_training_flops(network: Stacks, sample: Mapping[str, int]) -> int:
    """Return the model FLOPs of one sample: matmul FLOPs of forward and backward. `sample` has the sample's number of
    tokens by kind (such as encoder tokens).

    A multiply and an add are two FLOPs. Element-wise work is excluded. Attention counts all pairs of tokens, masked or
    not. Scores count once, although fused kernels recompute them in backward (the convention of PaLM, arXiv 2204.02311,
    appendix B). Backward has two matmuls of equal size for every matmul of forward. There is no matmul for the gradient
    of a frozen weight, or of a tensor before the first trained parameter.
    """
    return _count_sample_flops(network, _build_one_sample(sample)).model


def compute_recomputed_flops(
    network: Stacks,
    sample: Mapping[str, int],
    *,
    dropout: float = 0.0,
    precision: Precision = "bf16",
    compiled: bool = False,
) -> int:
    """Return the matmul FLOPs that activation checkpointing of every block adds for one sample. `sample` has the
    sample's number of tokens by kind (such as encoder tokens).

    torch stops a recomputation at the last tensor that backward needs. This tensor is usually the input of the block's
    last matmul, so the last matmul is not recomputed. There are two exceptions. The first is an operation after the
    last matmul that saves a tensor as well: dropout saves its mask, and the clamp with which transformers guards T5's
    fp16 activations saves its input. The second is a `compiled` block, which is recomputed completely. The function
    assumes that weights have the dtype `precision`, so there is no autocast.
    """
    load = _build_one_sample(sample, dropout=dropout, precision=precision)._replace(compiled=compiled)
    found = _count_sample_flops(network, load)
    return found.hardware - found.model


@functools.lru_cache(maxsize=_KEPT)
def _count_sample_flops(network: Stacks, load: Workload) -> StepFlops:
    forward = compute_forward(network, load)
    model, again = (
        sum(work.matmul_flops + work.attention_flops for work in passes)
        for passes in ((forward, compute_backward(forward)), (compute_recomputed(network, load),))
    )
    return StepFlops(model=model, hardware=model + again)


def _build_one_sample(sample: Mapping[str, int], *, dropout: float = 0.0, precision: Precision = "bf16") -> Workload:
    """Return the workload of one checkpointed sample. Fields without an effect on FLOPs have arbitrary values."""
    lengths, width = tuple(sample.items()), WIDTH[precision]
    return Workload(1, lengths, width, "sdpa", dropout > 0, True, "cuda", precision == "fp16", None)
