"""What ranks that share one processor cost each other: the same work by one, two, … processes at once."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.calibrate.request import CalibrationRequest

if TYPE_CHECKING:
    import torch

ROUND_S = 0.3
"""Work of one process alone between two barriers: long beside the milliseconds by which they leave a barrier apart."""

_MIN_ROUNDS, _MAX_ROUNDS = 5, 15
_TOKENS, _D_MODEL, _D_FF = 512, 256, 768


def count_sharers(request: CalibrationRequest) -> int:
    """Return how many ranks compute on one processor, the first of all."""
    return request.world_size if request.machine.nodes_share_processor else request.ranks_per_node


def count_rounds(sharers: int, seconds: float) -> int:
    """Return how often each number of processes does its work; two processes on two cores take as long as one, at worst
    all take turns."""
    at_worst = ROUND_S * sum(range(1, sharers + 1))
    return max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(seconds / at_worst)))


def compute_slowdown(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return median time with 1, 2, … processes over that of one; `times` holds each round's slowest process."""
    medians = [statistics.median(of_some) for of_some in times]
    return tuple(median / medians[0] for median in medians)


def measure(request: CalibrationRequest, device: "torch.device", seconds: float) -> tuple[float, ...]:
    """Return the slowdown by number of processes, on rank 0. All ranks call this."""
    import torch
    import torch.distributed as dist

    work, together = _build_work(device), count_sharers(request)
    loops = _count_loops(work)
    groups = [dist.new_group(list(range(count + 1))) for count in range(together)]
    times: list[list[float]] = [[] for _ in groups]
    for _ in range(count_rounds(together, seconds)):  # in turn, so that a processor that slows down does so for all
        for count, members in enumerate(groups):
            if dist.get_rank() <= count:
                times[count].append(_time_round(work, loops, members))
            dist.all_reduce(torch.zeros(1))
    return compute_slowdown(times) if dist.get_rank() == 0 else ()


def _time_round(work: Callable[[], object], loops: int, members: "torch.distributed.ProcessGroup") -> float:
    """Return the seconds in which the slowest process has done its work."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1), group=members)
    begin = time.perf_counter()
    for _ in range(loops):
        work()
    slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=members)
    return float(slowest)


def _count_loops(work: Callable[[], object]) -> int:
    """Return how often rank 0, alone, can do the work in ROUND_S."""
    import torch
    import torch.distributed as dist

    loops = torch.ones(1, dtype=torch.int64)
    work()  # the first loads what torch puts off
    dist.all_reduce(loops)
    if dist.get_rank() == 0:
        done, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + ROUND_S:
            work()
            done += 1
        loops.fill_(max(1, done))
    dist.broadcast(loops, 0)
    return int(loops)


def _build_work(device: "torch.device") -> Callable[[], object]:
    """Return a gated feed-forward layer with its norm and residual, forward and backward in fp32: products and
    element-wise work about as a small T5 mixes them."""
    import torch
    from torch.nn.functional import gelu, linear

    def weight(rows: int, columns: int) -> "torch.Tensor":
        return torch.full((rows, columns), 1e-3, device=device, requires_grad=True)

    first, gate, last = weight(_D_FF, _D_MODEL), weight(_D_FF, _D_MODEL), weight(_D_MODEL, _D_FF)
    tokens = torch.randn(_TOKENS, _D_MODEL, device=device)

    def step() -> object:
        normal = tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + 1e-6)
        out = tokens + linear(gelu(linear(normal, first), approximate="tanh") * linear(normal, gate), last)
        return torch.autograd.grad(out.pow(2).mean(), (first, gate, last))

    return step
