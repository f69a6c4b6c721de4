"""What a network computes in one forward pass of one rank, operation by operation.

Element-wise work is counted from transformers 5's modeling_t5.py and modeling_gpt2.py as they are written, unfused:
each operation reads its operands from memory and writes its result; the masks of dropout are left out.
"""

from bench.predict.work import Matmul, PassWork
from bench.predict.workload import Workload, is_fused
from bench.spec import FULL
from bench.stacks import Activation, Attention, Mlp, Stack, Stacks

RMS_PASSES = 6
"""Reads and writes of a tensor in fp32 in T5LayerNorm: squared, averaged, scaled."""
LAYER_NORM_PASSES = 3
"""Reads and writes of a tensor in torch's layer norm: read for its mean and deviation, and again to be scaled."""
ROTARY_PASSES = 10
"""Reads and writes of queries and keys in a rotation: times cosines, halves turned round, times sines, both added."""
ACTIVATION_PASSES: dict[Activation, int] = {"gelu_new": 17, "gelu": 2, "silu": 2, "relu": 2}
"""Reads and writes of a tensor: gelu_new is written out, with a power, three scalings, two sums, a tanh, a product."""


def compute_forward(network: Stacks, load: Workload) -> PassWork:
    """Return the work of one forward pass, loss included, nothing computed again."""
    rows = load.micro * sum(load.tokens(stack.tokens) for stack in network.stacks)
    ends = _compute_norm(network, load, rows)  # of all stacks, as one operation
    return _compute_blocks(network, load).plus(ends).plus(_compute_head_and_loss(network, load))


def compute_recomputed(network: Stacks, load: Workload) -> PassWork:
    """Return what checkpointing every block computes again: up to its last product, or with it where dropout or fp16's
    clamp behind it keeps a tensor as well, or where the block is compiled, for a graph runs to its end."""
    whole = load.compiled or load.dropout or (load.fp16 and network.clamps_fp16)
    return _compute_blocks(network, load, whole=whole) if load.checkpointing else PassWork()


def _compute_blocks(network: Stacks, load: Workload, *, whole: bool = True) -> PassWork:
    found = PassWork()
    for stack in network.stacks:
        block = PassWork()
        for place, part in enumerate(stack.block, 1):
            last = place == len(stack.block)
            block = block.plus(_compute_sublayer(network, stack, part, load, whole=whole or not last))
        found = found.plus(block.times(stack.layers))
    return found


def _compute_sublayer(network: Stacks, stack: Stack, part: Attention | Mlp, load: Workload, *, whole: bool) -> PassWork:
    """Work of a sub-layer with its norm, without its last product unless it is `whole`."""
    length = load.tokens(stack.tokens)
    if isinstance(part, Mlp):
        return _compute_mlp(network, part, load, load.micro * length, whole=whole)
    keys = length if part.over is None else load.tokens(network.named(part.over).tokens)
    return _compute_attention(network, part, load, length, keys, whole=whole)


def _compute_attention(
    network: Stacks, part: Attention, load: Workload, queries: int, keys: int, *, whole: bool
) -> PassWork:
    rows, others = load.micro * queries, load.micro * keys
    pairs = load.micro * part.heads * queries * keys
    flops = 2 * 2 * pairs * part.head_width
    biased = bool(part.position_bias) or part.zero_bias
    written_out = load.attention == "eager" or (load.device == "cpu" and (biased or not is_fused(load, part)))
    passes = 8 if written_out else biased  # scores, their sum with the bias, softmax, weights; else the bias is read
    traffic = load.width * (passes * pairs + 2 * rows * part.inner + 3 * rows * network.width)  # a copy, the residual
    rotated = part.rotary * (rows * part.inner + others * part.key_inner)
    traffic += load.width * ROTARY_PASSES * rotated
    products = _list_projections(network, part, rows, others)[: None if whole else -1]
    operations = 14 + 6 * written_out + 10 * part.rotary
    return _compute_norm(network, load, rows).plus(PassWork(products, flops, traffic, operations))


def _list_projections(network: Stacks, part: Attention, rows: int, others: int) -> tuple[Matmul, ...]:
    width, inner = network.width, part.inner
    last = Matmul(rows, inner, width)
    if part.fused and part.over is None:
        return Matmul(rows, width, inner + 2 * part.key_inner), last
    key = part.key_inner
    keys_and_values = Matmul(others, width, 2 * key) if part.fused else Matmul(others, width, key, 2)
    return Matmul(rows, width, inner), keys_and_values, last


def _compute_mlp(network: Stacks, part: Mlp, load: Workload, rows: int, *, whole: bool) -> PassWork:
    first = Matmul(rows, network.width, part.inner, 2 if part.gated else 1)
    products = (first, Matmul(rows, part.inner, network.width))[: 1 + whole]
    passes = ACTIVATION_PASSES[part.activation] + 3 * part.gated
    traffic = load.width * (passes * rows * part.inner + 3 * rows * network.width)
    return _compute_norm(network, load, rows).plus(PassWork(products, 0, traffic, 6 + passes // 2))


def _compute_norm(network: Stacks, load: Workload, rows: int) -> PassWork:
    states = rows * network.width
    if network.norm == "layer":
        return PassWork((), 0, states * LAYER_NORM_PASSES * load.width, 1)
    converted = (2 * (load.width + FULL)) if load.width < FULL else 0
    return PassWork((), 0, states * (RMS_PASSES * FULL + 3 * load.width + converted), 6 + 2 * (load.width < FULL))


def _compute_head_and_loss(network: Stacks, load: Workload) -> PassWork:
    rows = load.micro * load.tokens(network.stacks[-1].tokens)
    logits = (FULL if network.full_loss else load.width) * rows * network.vocab
    product = Matmul(rows, network.width, network.vocab)
    return PassWork((product,), 0, 3 * logits, 6)  # log-softmax: read twice, written once
