"""Measurements of one rank alone: rates of matrix products, attention and copies, and the host's time to start an
operation.

The matrix products are those of models: for each weight matrix and several numbers of tokens, the forward pass of
`linear` and the gradients of its inputs and of its weights. Attention is torch's `scaled_dot_product_attention` with an
additive mask, as in T5 with its position bias.
"""

import math
import os
import statistics
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.core.machine import Machine, MatmulRate, ProductKind
from bench.core.network import Stacks, list_matrices
from bench.core.spec import WIDTH, Precision

if TYPE_CHECKING:
    import torch

FILL_S = 0.02  # minimum seconds of all timed calls together: a thousand times the cost of clock and device wait
_BATCHES = 5
_LONG_S = 0.5  # if all batches would take longer than this, fewer are timed


def time_call(work: Callable[[], object], device: "torch.device") -> float:
    """Return the seconds of one call of `work`, as the median over batches of calls.

    All batches together take at least FILL_S seconds. Untimed calls before them allocate memory and choose kernels.
    Within a batch the host does not wait for the device between calls, as in a training step.
    """
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
"""Shape of the timed attention: mT5-base's heads at the usual encoder length."""


def count_attention_flops(samples: int, heads: int, length: int, d_kv: int) -> int:
    """Return the forward FLOPs of attention scores and weighted values. All pairs of tokens count, as in
    bench.predict.work."""
    return 2 * 2 * samples * heads * length * length * d_kv


def measure_attention(precision: Precision, device: "torch.device") -> float:
    """Return the rate of an attention's forward pass, in TFLOP/s.

    The kernel is called as transformers' T5 calls it: without scaling, and with heads that are views of a projection's
    rows. The mask requires a gradient, like T5's learned position bias. Therefore torch cannot choose kernels that
    compute no gradient of the mask.
    """
    import torch

    from bench.engines.precision.update import torch_dtype

    dtype = torch_dtype(precision)

    def heads() -> "torch.Tensor":
        rows = torch.randn(SAMPLES, LENGTH, HEADS, D_KV, device=device, dtype=dtype, requires_grad=True)
        return rows.transpose(1, 2)

    query, key, value = heads(), heads(), heads()
    shape = (SAMPLES, HEADS, LENGTH, LENGTH)
    bias = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    def attend() -> "torch.Tensor":
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)

    return count_attention_flops(SAMPLES, HEADS, LENGTH, D_KV) / time_call(attend, device) / 1e12


_MEMORY_BYTES = 2**29  # bytes of a copy, larger than any cache


def measure_memory(device: "torch.device") -> float:
    """Return the bytes/s of a copy within the device's memory. Each byte counts twice, because it is read and
    written."""
    import torch

    source = torch.ones(_MEMORY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _MEMORY_BYTES / time_call(lambda: target.copy_(source), device)


_LAUNCH_CALLS = 200  # fewer than fit in a GPU's queue, since the host would wait for a full queue
_LAUNCH_BATCHES = 25


def measure_launches(device: "torch.device") -> float:
    """Return the seconds that the host needs to start one operation, as the median over batches.

    The operation multiplies 16 numbers by a weight that needs a gradient. It passes through torch's dispatcher and
    autograd graph as in a forward pass. The execution of the operation does not count: on a GPU the host does not wait
    for it, and on a CPU it takes negligible time.
    """
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
    """Return the rate between a GPU and page-locked host memory in bytes/s, for the slower of the two directions."""
    import torch

    there = torch.ones(_HOST_LINK_BYTES // 4, device=device)
    here = torch.ones(_HOST_LINK_BYTES // 4, pin_memory=True)
    up = time_call(lambda: there.copy_(here, non_blocking=True), device)
    down = time_call(lambda: here.copy_(there, non_blocking=True), device)
    return _HOST_LINK_BYTES / max(up, down)


# -- products

TOKENS = (128, 512, 2048, 8192, 16384)
"""Numbers of tokens (m) for which products are measured: from a decoder's few tokens to a large micro-batch."""


class Shape(NamedTuple):
    """Product of an m × k matrix and a k × n matrix, and its role in a layer."""

    m: int
    k: int
    n: int
    kind: ProductKind = "forward"

    @property
    def flops(self) -> int:
        return count_flops(self.m, self.k, self.n)


_CALLS = 4  # minimum number of calls for a shape: two for warm-up, two timed
_PART = 0.1  # a shape may use this share of the remaining time; more only if no other shape fits this limit


def list_products(networks: Iterable[Stacks]) -> tuple[tuple[int, int], ...]:
    """Return the distinct shapes (k, n) of the weight matrices of models. Each maps rows of k numbers to rows of n
    numbers."""
    return tuple(sorted({matrix for network in networks for matrix in list_matrices(network)}))


def sort_shapes(products: Iterable[tuple[int, int]]) -> list[Shape]:
    """Return products, sorted by FLOPs from few to many. `products` holds the shapes (k, n) of weight matrices. Each of
    them is combined with every number of tokens m in TOKENS. In the forward pass, m rows of k numbers become m rows of
    n numbers. The backward pass has two products with as many FLOPs: the gradients of the inputs and of the weights."""
    found = list[Shape]()
    for m in TOKENS:
        for k, n in products:
            found += [Shape(m, k, n), Shape(m, n, k, "inputs"), Shape(k, m, n, "weights")]
    return sorted(found, key=lambda shape: (shape.flops, shape))


def spread(shapes: Sequence[Shape]) -> list[Shape]:
    """Return shapes in an order in which the first n shapes, for any n, are spread evenly over all shapes.

    The shapes are ordered by the reversed bits of their indices (van der Corput's sequence). So even if the time for
    measuring ends early, each shape that was not measured has a measured shape near it.
    """
    bits = max(1, (len(shapes) - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [shapes[number] for number in turned if number < len(shapes)]


def measure_within(
    shapes: Sequence[Shape], time_product: Callable[[Shape], float], seconds: float, clock: Callable[[], float]
) -> dict[Shape, float]:
    """Measure as many shapes as possible in `seconds`, but at least one. Return the FLOP/s of each measured shape.
    `time_product` measures a shape and returns its seconds per product. `clock` returns the current time in seconds.

    The measured shapes are spread evenly over all shapes. A shape that needs much of the remaining time is measured
    only if no cheaper shape is left. The time of a shape is estimated from the measured shape with the nearest number
    of FLOPs.
    """
    until, waiting = clock() + seconds, spread(shapes)
    rates, known = dict[Shape, float](), list[tuple[int, float]]()  # sorted pairs of FLOPs and rate
    while shape := _choose_next(waiting, known, until - clock()):
        waiting.remove(shape)
        rates[shape] = shape.flops / time_product(shape)
        insort(known, (shape.flops, rates[shape]))
    return rates


def _choose_next(waiting: Sequence[Shape], known: Sequence[tuple[int, float]], left_s: float) -> Shape | None:
    """Return the first shape that needs at most 10 % of the remaining time `left_s`. If there is no such shape, return
    the first shape that fits into the remaining time, or None. `known` are pairs of FLOPs and rate of measured shapes.
    """
    if not known:
        return waiting[0] if waiting else None

    def guess_rate(shape: Shape) -> float:  # rate of the measured shape whose FLOPs are nearest in ratio
        flops = math.log(shape.flops)
        return min(known, key=lambda one: abs(math.log(one[0]) - flops))[1]

    costs = [(shape, _CALLS * shape.flops / guess_rate(shape)) for shape in waiting]
    fitting = (shape for part in (_PART, 1.0) for shape, cost_s in costs if cost_s <= part * left_s)
    return next(fitting, None)


def describe_unmeasured(
    products: Sequence[tuple[int, int]], precisions: Sequence[Precision], rates: Sequence[MatmulRate]
) -> str | None:
    """Return a text on the shapes that were not measured, for lack of time or memory: their number and FLOPs in each
    precision. None if all were measured."""
    wanted = sort_shapes(products)
    measured = {(rate.precision, rate.m, rate.k, rate.n, rate.kind) for rate in rates}
    lines = []
    for precision in precisions:
        missing = [shape.flops for shape in wanted if (precision, *shape) not in measured]
        if missing:
            sizes = f"of {missing[0]:.2g} to {missing[-1]:.2g} FLOP"
            lines.append(f"{len(missing)} of {len(wanted)} matmul shapes in {precision}, {sizes}")
    return "; ".join(lines) or None


def count_flops(m: int, k: int, n: int) -> int:
    """Return the FLOPs of an m × k by k × n product. A multiply and an add count as two."""
    return 2 * m * k * n


def measure_matmul(
    machine: Machine, products: Sequence[tuple[int, int]], device: "torch.device", seconds: float
) -> tuple[MatmulRate, ...]:
    """Return the rates of as many shapes as can be measured in `seconds`, with equal time for each precision. Shapes
    that need too much memory are skipped: more than half of a GPU's free memory, or an eighth of the host's memory."""
    import torch

    from bench.engines.precision.update import torch_dtype

    if device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0]) // 2  # half of the free memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8  # an eighth of the host's memory
    found, precisions = list[MatmulRate](), list_precisions(machine, device)
    for precision in precisions:
        width, dtype = WIDTH[precision], torch_dtype(precision)
        fitting = [
            one for one in sort_shapes(products) if width * (one.m * one.k + one.k * one.n + one.m * one.n) <= room
        ]

        def time_product(shape: Shape, dtype: "torch.dtype" = dtype) -> float:
            work = create_product(shape, dtype, device)
            with torch.no_grad():
                return time_call(work, device)

        rates = measure_within(fitting, time_product, seconds / len(precisions), time.perf_counter)
        found += [
            MatmulRate(precision=precision, **shape._asdict(), tflops=rates[shape] / 1e12)
            for shape in fitting
            if shape in rates
        ]
    return tuple(found)


def create_product(shape: Shape, dtype: "torch.dtype", device: "torch.device") -> Callable[[], "torch.Tensor"]:
    """Return a function that computes a product of random matrices, as autograd does for a layer whose weight matrix is
    stored by its outputs. (A GPU multiplies zeros faster than random numbers.)"""
    import torch

    def draw(rows: int, columns: int) -> "torch.Tensor":
        return torch.randn(rows, columns, device=device, dtype=dtype)

    m, k, n, kind = shape
    if kind == "forward":
        inputs, weight = draw(m, k), draw(n, k)
        return lambda: torch.nn.functional.linear(inputs, weight)
    if kind == "inputs":
        gradient, weight = draw(m, k), draw(k, n)
        return lambda: gradient @ weight
    # The product is k × m times m × n. autograd computes its transpose, from operands with a row for each token.
    inputs, gradient = draw(k, m), draw(k, n)
    return lambda: gradient.t() @ inputs


_SUSTAINED = 8192  # rows and columns of both factors; the best rates are reached at about this size


def measure_sustained(
    precisions: Iterable[Precision], device: "torch.device", seconds: float
) -> dict[Precision, float]:
    """Return the rate of a large product that is repeated without a pause, in TFLOP/s, for each precision of 16 bits.

    A GPU lowers its clock rate when it reaches its power limit, after a fraction of a second. So the rate of the second
    half of the calls is returned. The rates of `measure_matmul` are those of short bursts.
    """
    import torch

    from bench.engines.precision.update import torch_dtype
    from bench.measure.collectives import wait_for

    found, halves = dict[Precision, float](), [one for one in precisions if WIDTH[one] == 2]
    for precision in halves:
        work = create_product(Shape(_SUSTAINED, _SUSTAINED, _SUSTAINED), torch_dtype(precision), device)
        with torch.no_grad():
            calls = max(1, round(seconds / len(halves) / 2 / time_call(work, device)))
            for _ in range(2):  # only the second half is used
                begin = time.perf_counter()
                for _ in range(calls):
                    work()
                wait_for(device)
                rate = calls * count_flops(_SUSTAINED, _SUSTAINED, _SUSTAINED) / (time.perf_counter() - begin)
        found[precision] = rate / 1e12
    return found


def list_precisions(machine: Machine, device: "torch.device") -> list[Precision]:
    """Return the precisions that this device supports. fp16 is measured on GPUs only, and bf16 only if it is not
    emulated."""
    import torch

    found: list[Precision] = ["fp32"]
    if device.type == "cuda":
        found.append("fp16")
    if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        found.append("bf16")
    return [precision for precision in found if precision not in machine.unsupported]
