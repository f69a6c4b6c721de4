"""What transformers' T5 computes in one forward pass of one rank, operation by operation.

Element-wise work is counted from transformers 5's modeling_t5.py as it is written, unfused: each operation reads its
operands from memory and writes its result; the masks of dropout are left out. The products' FLOPs equal
bench.models.t5's closed form.
"""

from bench.models.t5 import Shape
from bench.predict.memory.segments import Workload
from bench.predict.step_time.work import Matmul, Work
from bench.spec import FULL

NORM_PASSES = 6
"""Reads and writes of a tensor in fp32 in T5LayerNorm: squared, averaged, scaled."""
ACTIVATION_PASSES = {"gelu_new": 17, "silu": 2, "relu": 2}
"""Reads and writes of a tensor: gelu_new is written out, with a power, three scalings, two sums, a tanh, a product."""


def forward(s: Shape, w: Workload) -> Work:
    """Return the work of one forward pass, loss included, nothing computed again."""
    ends = _norm(s, w, w.micro * (w.encoder + w.decoder))
    return _blocks(s, w).plus(ends).plus(_head_and_loss(s, w))


def recomputed(s: Shape, w: Workload) -> Work:
    """Return what checkpointing every block computes again: up to its last product, or with it where dropout or fp16's
    clamp behind it keeps a tensor as well."""
    return _blocks(s, w, whole=w.dropout or w.fp16) if w.checkpointing else Work()


def _blocks(s: Shape, w: Workload, *, whole: bool = True) -> Work:
    encoder = _attention(s, w, w.encoder, w.encoder).plus(_feed_forward(s, w, w.encoder, whole))
    own_and_cross = _attention(s, w, w.decoder, w.decoder).plus(_attention(s, w, w.decoder, w.encoder))
    decoder = own_and_cross.plus(_feed_forward(s, w, w.decoder, whole))
    return encoder.times(s.encoder_layers).plus(decoder.times(s.decoder_layers))


def _attention(s: Shape, w: Workload, queries: int, keys: int) -> Work:
    rows, others = w.micro * queries, w.micro * keys
    products = (
        Matmul(rows, s.d_model, s.d_inner),  # queries
        Matmul(others, s.d_model, s.d_inner, 2),  # keys and values
        Matmul(rows, s.d_inner, s.d_model),
    )
    pairs = w.micro * s.heads * queries * keys
    flops = 2 * 2 * pairs * s.d_kv
    written_out = w.attention == "eager" or w.device == "cpu"
    passes = 8 if written_out else 1  # scores, their sum with the bias, softmax, weights; else only the bias is read
    traffic = w.width * (passes * pairs + 2 * rows * s.d_inner + 3 * rows * s.d_model)  # a copy, the residual sum
    return _norm(s, w, rows).plus(Work(products, flops, traffic, 14 + 6 * written_out))


def _feed_forward(s: Shape, w: Workload, length: int, whole: bool) -> Work:
    rows = w.micro * length
    products = (Matmul(rows, s.d_model, s.d_ff, 2 if s.gated else 1), Matmul(rows, s.d_ff, s.d_model))[: 1 + whole]
    passes = ACTIVATION_PASSES[s.activation] + 3 * s.gated
    traffic = w.width * (passes * rows * s.d_ff + 3 * rows * s.d_model)
    return _norm(s, w, rows).plus(Work(products, 0, traffic, 6 + passes // 2))


def _norm(s: Shape, w: Workload, rows: int) -> Work:
    converted = (2 * (w.width + FULL)) if w.width < FULL else 0
    return Work((), 0, rows * s.d_model * (NORM_PASSES * FULL + 3 * w.width + converted), 6 + 2 * (w.width < FULL))


def _head_and_loss(s: Shape, w: Workload) -> Work:
    rows = w.micro * w.decoder
    logits = w.width * rows * s.vocab
    return Work((Matmul(rows, s.d_model, s.vocab),), 0, 3 * logits, 6)  # log-softmax: read twice, written once
