"""Bytes of the tensors that attention keeps for backward, and of its temporary tensors, by the kernel that torch
chooses."""

from bench.core.network import Attention, Stacks
from bench.core.spec import FULL
from bench.predict.workload import Live, Workload, is_fused

FUSED_QUERIES = 32
"""torch's memory-efficient attention keeps a log-sum-exp for each query. It rounds the number of queries up to a
multiple of this constant."""


def count_kernel_bytes(
    network: Stacks, load: Workload, part: Attention, queries: int, keys: int, live: Live
) -> tuple[int, int, int]:
    """Return three byte counts of the attention kernel that torch chooses: bytes saved for backward (its output
    excluded), temporary bytes in forward, and temporary bytes in backward.

    For torch's sdpa, a position bias is an attention mask that needs a gradient. No flash kernel supports such a mask.
    With such a bias, sdpa writes scores in fp32 on a CPU and uses the memory-efficient kernel on a GPU.
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
    mask = (wide if load.device == "cpu" and not load.compiled else 1) * scores
    scored = live.queries or live.keys  # a factor of a product is kept for the gradient of the other factor
    saved = wide * (query * live.keys + key * live.queries + key * scored)
    if load.dropout:  # softmax's output, the mask, and the weights after dropout
        saved += (wide * scores + mask) * scored + wide * scores * live.values
    else:
        # compiled eager attention also keeps the scores before softmax
        saved += wide * scores * any(live) * (2 if load.compiled and load.attention == "eager" else 1)
    # a second tensor of scores; sdpa scales queries and keys, and compares every score with minus infinity
    forward = wide * (scores + key) + (0 if load.attention == "eager" else scores + wide * query)
    if wide > load.width:  # queries, keys and values exist in both widths
        forward += wide * query + 2 * load.width * key
    # two gradients of scores exist after the output is freed; if scores are few, the peak is earlier
    return saved, forward, max(0, 2 * wide * scores - load.width * query)


def _count_fused_kernel_bytes(
    network: Stacks, load: Workload, part: Attention, queries: int, query: int, key: int, scores: int
) -> tuple[int, int]:
    """Return the bytes that a fused attention kernel saves for backward (its output excluded), and its temporary bytes
    in backward. `queries` is the number of queries per sample. `query`, `key` and `scores` are the numbers of elements
    in the tensors of queries, keys and scores of a micro-batch."""
    rounded = -(-queries // FUSED_QUERIES) * FUSED_QUERIES if load.device == "cuda" else queries
    saved = load.width * (query + 2 * key) + FULL * load.micro * part.heads * rounded
    backward = load.width * (query + 2 * key)
    if part.position_bias and load.attention == "sdpa":
        # a contiguous bias is kept for every layer, and its gradient for every sample
        saved += load.width * scores // load.micro
        backward += load.width * scores * network.trains_all
    return saved, backward
