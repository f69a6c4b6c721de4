"""FLOPs of a step, counted at the dispatcher: for models whose family does not describe its network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def count_flops(run: Callable[[], object]) -> int:
    """Return the matmul FLOPs of what `run` does on this rank, recomputed activations included.

    Fused attention counts over the full square, and its backward as two matmuls for each of forward although it
    computes scores again, as in bench.predict.work; torch's own counter takes them in, and knows no kernel of a CPU.
    """
    attention = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in _KERNELS}
    backward = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward") for name in _KERNELS}
    formulas = dict.fromkeys(attention.values(), _count_forward_flops) | dict.fromkeys(
        backward.values(), _count_backward_flops
    )
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with counter:
        run()
    return int(counter.get_total_flops())


def _count_forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of scores and weighted values, from shapes (samples, heads, tokens, width of a head)."""
    samples, heads, tokens, width = query
    return 2 * samples * heads * tokens * key[-2] * (width + value[-1])


def _count_backward_flops(gradient: Sequence[int], *forward: Any, **__: Any) -> int:
    return 2 * _count_forward_flops(*forward)
