"""Rate of attention with a position bias: torch's `scaled_dot_product_attention` with an additive mask."""

from typing import TYPE_CHECKING

from bench.calibrate.matmul import get_dtype
from bench.calibrate.timing import time_call
from bench.spec import Precision

if TYPE_CHECKING:
    import torch

SAMPLES, HEADS, LENGTH, D_KV = 4, 12, 512, 64
"""mT5-base's heads at the usual encoder length."""


def count_flops(samples: int, heads: int, length: int, d_kv: int) -> int:
    """Return the FLOPs of scores and weighted values over the full square, as bench.predict.work counts them."""
    return 2 * 2 * samples * heads * length * length * d_kv


def measure(precision: Precision, device: "torch.device") -> float:
    """Return the forward rate in 10^12 FLOP/s, called as transformers' T5 calls it: unscaled, heads taken out of a
    projection's rows, and a learned bias, which keeps torch from kernels that know no gradient of a mask."""
    import torch

    def heads() -> "torch.Tensor":
        rows = torch.randn(SAMPLES, LENGTH, HEADS, D_KV, device=device, dtype=get_dtype(precision), requires_grad=True)
        return rows.transpose(1, 2)

    query, key, value = heads(), heads(), heads()
    shape = (SAMPLES, HEADS, LENGTH, LENGTH)
    bias = torch.randn(shape, device=device, dtype=get_dtype(precision), requires_grad=True)

    def attend() -> "torch.Tensor":
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)

    return count_flops(SAMPLES, HEADS, LENGTH, D_KV) / time_call(attend, device) / 1e12
