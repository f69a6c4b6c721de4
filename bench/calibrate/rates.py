"""What one rank alone measures: rates of products, of attention and of copies, and what starting an operation costs.

Products are those that models are made of: `linear` of so many tokens with each of their matrices, forward. Attention
is torch's `scaled_dot_product_attention` with an additive mask, as a position bias makes it.
"""

import math
import os
import statistics
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from bench.core.machine import Machine, MatmulRate
from bench.core.network import Stacks, list_matrices
from bench.core.spec import Precision

if TYPE_CHECKING:
    import torch

FILL_S = 0.02  # so long in all at least: a thousand times what the clock and waiting for a device cost
_BATCHES = 5
_LONG_S = 0.5  # in all: what takes so long needs no company


def time_call(work: Callable[[], object], device: "torch.device") -> float:
    """Return the seconds of one call of `work`: median over batches of calls that together fill FILL_S, after calls
    that allocate and choose kernels. Between the calls of a batch nothing is awaited, as in a step."""
    from bench.measure.collectives import wait_for

    def batch(calls: int) -> float:
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        return (time.perf_counter() - begin) / calls

    batch(1)
    single_s = batch(1)
    batches = max(1, min(_BATCHES, math.floor(_LONG_S / single_s)))
    calls = max(1, math.ceil(FILL_S / batches / single_s))
    return statistics.median(batch(calls) for _ in range(batches))


SAMPLES, HEADS, LENGTH, D_KV = 4, 12, 512, 64
"""mT5-base's heads at the usual encoder length."""


def count_attention_flops(samples: int, heads: int, length: int, d_kv: int) -> int:
    """Return the FLOPs of scores and weighted values over the full square, as bench.predict.work counts them."""
    return 2 * 2 * samples * heads * length * length * d_kv


def measure_attention(precision: Precision, device: "torch.device") -> float:
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

    return count_attention_flops(SAMPLES, HEADS, LENGTH, D_KV) / time_call(attend, device) / 1e12


_MEMORY_BYTES = 2**29  # beyond any cache


def measure_memory(device: "torch.device") -> float:
    """Return bytes per second of a copy, those read and those written counted both."""
    import torch

    source = torch.ones(_MEMORY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _MEMORY_BYTES / time_call(lambda: target.copy_(source), device)


_LAUNCH_CALLS = 200  # fewer than a GPU's queue holds: a full one would make the host wait
_LAUNCH_BATCHES = 25


def measure_launches(device: "torch.device") -> float:
    """Return the host's seconds per operation, median over batches: a product of 16 numbers with a weight that wants a
    gradient, through torch's dispatcher and its graph as in a forward pass. On a GPU the work itself is not awaited; on
    a CPU it is too small to count."""
    import torch

    from bench.measure.collectives import wait_for

    numbers = torch.ones(16, device=device)
    weight = torch.ones(16, device=device, requires_grad=True)

    def batch() -> float:
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(_LAUNCH_CALLS):
            numbers * weight
        return (time.perf_counter() - begin) / _LAUNCH_CALLS

    batch()
    return statistics.median(batch() for _ in range(_LAUNCH_BATCHES))


_HOST_LINK_BYTES = 2**28


def measure_host_link(device: "torch.device") -> float:
    """Return bytes per second one way between a GPU and page-locked host memory, of the slower direction."""
    import torch

    there = torch.ones(_HOST_LINK_BYTES // 4, device=device)
    here = torch.ones(_HOST_LINK_BYTES // 4, pin_memory=True)
    up = time_call(lambda: there.copy_(here, non_blocking=True), device)
    down = time_call(lambda: here.copy_(there, non_blocking=True), device)
    return _HOST_LINK_BYTES / max(up, down)


TOKENS = (128, 512, 2048, 8192, 16384)
"""Rows: from a decoder's few to a large micro-batch."""

Shape = tuple[int, int, int]
"""(m, k, n): so many rows, of so many numbers each, to rows of n."""

_CALLS = 4  # that a shape costs at least: two to warm up, two to time
_PART = 0.1  # of the time left is what one shape may cost, as long as others fit
_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def list_products(networks: Iterable[Stacks]) -> tuple[tuple[int, int], ...]:
    """Return the distinct (k, n) of the weight matrices of models: each maps rows of k numbers to rows of n."""
    return tuple(sorted({matrix for network in networks for matrix in list_matrices(network)}))


def sort_shapes(products: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return every (m, k, n), those of few FLOPs first."""
    return sorted(((m, k, n) for m in TOKENS for k, n in products), key=lambda shape: (count_flops(*shape), shape))


def spread(shapes: Sequence[Shape]) -> list[Shape]:
    """Return shapes in an order of which every beginning lies evenly among all: by their numbers' bits from the last to
    the first (van der Corput's sequence). Where the time ends, none is missing without others like it."""
    bits = max(1, (len(shapes) - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [shapes[number] for number in turned if number < len(shapes)]


def measure_within(
    shapes: Sequence[Shape], time_product: Callable[[Shape], float], seconds: float, clock: Callable[[], float]
) -> dict[Shape, float]:
    """Return the FLOP/s of as many shapes as fit in `seconds` of a clock, and of one at least: spread over all, those
    that would take much of the time only when no other is left. What one costs is told by the nearest that is known."""
    until, waiting = clock() + seconds, spread(shapes)
    rates, known = dict[Shape, float](), list[tuple[int, float]]()  # FLOPs with their rate, sorted
    while shape := _choose_next(waiting, known, until - clock()):
        waiting.remove(shape)
        rates[shape] = count_flops(*shape) / time_product(shape)
        insort(known, (count_flops(*shape), rates[shape]))
    return rates


def _choose_next(waiting: Sequence[Shape], known: Sequence[tuple[int, float]], left_s: float) -> Shape | None:
    """Return the first shape that takes a small part of the time left, or else the first that fits; None for none."""
    if not known:
        return waiting[0] if waiting else None
    costs = [(shape, _CALLS * count_flops(*shape) / _guess_rate(shape, known)) for shape in waiting]
    for part in (_PART, 1.0):
        for shape, cost_s in costs:
            if cost_s <= part * left_s:
                return shape
    return None


def _guess_rate(shape: Shape, known: Sequence[tuple[int, float]]) -> float:
    """Return the rate of the shape with the nearest FLOPs, by their ratio."""
    flops = math.log(count_flops(*shape))
    return min(known, key=lambda one: abs(math.log(one[0]) - flops))[1]


def describe_unmeasured(
    products: Sequence[tuple[int, int]], precisions: Sequence[Precision], rates: Sequence[MatmulRate]
) -> str | None:
    """Say which shapes were not measured, for want of time or of memory; None where all were."""
    wanted = sort_shapes(products)
    measured = {(rate.precision, rate.m, rate.k, rate.n) for rate in rates}
    lines = []
    for precision in precisions:
        missing = [count_flops(*shape) for shape in wanted if (precision, *shape) not in measured]
        if missing:
            sizes = f"of {missing[0]:.2g} to {missing[-1]:.2g} FLOP"
            lines.append(f"{len(missing)} of {len(wanted)} matmul shapes in {precision}, {sizes}")
    return "; ".join(lines) or None


def count_flops(m: int, k: int, n: int) -> int:
    """Return the FLOPs of an m × k by k × n product: a multiply and an add each."""
    return 2 * m * k * n


def measure_matmul(
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
    room = _compute_room_bytes(device)
    fitting = [(m, k, n) for m, k, n in sort_shapes(products) if _BYTES[precision] * (m * k + k * n + m * n) <= room]
    rates = measure_within(fitting, lambda shape: _time_product(*shape, precision, device), seconds, time.perf_counter)
    return [
        MatmulRate(precision=precision, m=m, k=k, n=n, tflops=rates[m, k, n] / 1e12)
        for m, k, n in fitting
        if (m, k, n) in rates
    ]


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
