"""Rates of the products that models are made of: `linear` of so many tokens with each of their matrices, forward."""

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bench.calibrate.timing import time_call
from bench.machine import Machine, MatmulRate
from bench.spec import Precision
from bench.stacks import Stacks, list_matrices

if TYPE_CHECKING:
    import torch

TOKENS = (128, 512, 2048, 8192, 16384)
"""Rows: from a decoder's few to a large micro-batch."""

_CALLS = 4  # that a shape costs at least: two to warm up, two to time
_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def list_products(networks: Iterable[Stacks]) -> tuple[tuple[int, int], ...]:
    """Return the distinct (k, n) of the weight matrices of models: each maps rows of k numbers to rows of n."""
    return tuple(sorted({matrix for network in networks for matrix in list_matrices(network)}))


def sort_shapes(products: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return every (m, k, n), those of few FLOPs first: where the time ends, the largest are missing."""
    return sorted(((m, k, n) for m in TOKENS for k, n in products), key=lambda shape: (count_flops(*shape), shape))


def count_flops(m: int, k: int, n: int) -> int:
    """Return the FLOPs of an m × k by k × n product: a multiply and an add each."""
    return 2 * m * k * n


def measure(
    machine: Machine, products: Sequence[tuple[int, int]], device: "torch.device", seconds: float
) -> tuple[MatmulRate, ...]:
    """Return the rates of as many shapes as the time allows, an equal part of it for each precision."""
    known = list_precisions(machine, device)
    return tuple(
        rate for precision in known for rate in _measure_rates(precision, products, device, seconds / len(known))
    )


def list_precisions(machine: Machine, device: "torch.device") -> list[Precision]:
    """Return what this device computes in: fp16 is trained in on GPUs alone, and an emulated bf16 is none."""
    import torch

    found: list[Precision] = ["fp32"]
    if device.type == "cuda":
        found.append("fp16")
    if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        found.append("bf16")
    return [precision for precision in found if precision not in machine.unsupported]


def get_dtype(precision: Precision) -> "torch.dtype":
    """Return torch's type of a precision."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _measure_rates(
    precision: Precision, products: Sequence[tuple[int, int]], device: "torch.device", seconds: float
) -> list[MatmulRate]:
    until, room, rates = time.perf_counter() + seconds, _compute_room_bytes(device), list[MatmulRate]()
    for m, k, n in sort_shapes(products):
        if _BYTES[precision] * (m * k + k * n + m * n) > room:
            continue
        if rates and _CALLS * count_flops(m, k, n) / (rates[-1].tflops * 1e12) > until - time.perf_counter():
            break
        rate = count_flops(m, k, n) / _time_product(m, k, n, precision, device)
        rates.append(MatmulRate(precision=precision, m=m, k=k, n=n, tflops=rate / 1e12))
    return rates


def _time_product(m: int, k: int, n: int, precision: Precision, device: "torch.device") -> float:
    """Return the seconds of one product. The matrix is stored n × k, as a layer's weight is; numbers are random, for a
    GPU multiplies zeros faster."""
    import torch

    rows = torch.randn(m, k, device=device, dtype=get_dtype(precision))
    weight = torch.randn(n, k, device=device, dtype=get_dtype(precision))
    with torch.no_grad():
        return time_call(lambda: torch.nn.functional.linear(rows, weight), device)


def _compute_room_bytes(device: "torch.device") -> int:
    """Return what one product may take: half of what is free on a GPU, an eighth of a host's memory."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
