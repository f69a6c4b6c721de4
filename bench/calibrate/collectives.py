"""What all ranks measure together.

How long each collective takes, by payload and number of ranks, in groups of real processes.

The calls are those that DeepSpeed and torch make: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`. Gloo
has no reduce-scatter of its own; torch's all-reduces there and keeps a part, and that is what is timed.

Ranks that share one processor slow each other down: the same work is timed by one, two, … processes at once.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.calibrate import CalibrationRequest
from bench.core.machine import CollectiveKind, CollectiveTime

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


def measure_contention(request: CalibrationRequest, device: "torch.device", seconds: float) -> tuple[float, ...]:
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


KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
GROWTH = 8
LARGEST_BYTES = {"cpu": 2**24, "cuda": 2**30}
_NUMBER_BYTES = 4  # fp32
_MIN_CALLS, _MAX_CALLS = 3, 40
_WARM_CALLS = 1  # of every payload: a library may choose another algorithm for it


class RankGroup(NamedTuple):
    """Ranks that communicate: the first `ranks` of the job, on its first `nodes`."""

    nodes: int
    ranks: int


def list_groups(nodes: int, ranks_per_node: int) -> list[RankGroup]:
    """Return the groups to be measured: within the first node, then all ranks of ever more nodes."""
    inside = [RankGroup(1, ranks) for ranks in thin_out(ranks_per_node)]
    return inside + [RankGroup(count, count * ranks_per_node) for count in thin_out(nodes) if count > 1]


def thin_out(count: int) -> list[int]:
    """Return the numbers to `count` worth measuring: the first four, powers of two, and `count` itself."""
    return [n for n in range(1, count + 1) if n <= 4 or n == count or n & (n - 1) == 0]


def list_payloads(device: str, ranks: int) -> list[int]:
    """Return the payloads in bytes, each a whole number of fp32 for every rank."""
    found, size, share = [], 8, _NUMBER_BYTES * ranks
    while size <= LARGEST_BYTES[device]:
        found.append(-(-size // share) * share)
        size *= GROWTH
    return list(dict.fromkeys(found))


def count_calls(expected_s: float, left_s: float, *, last: bool) -> int:
    """Return how often to time a payload whose call may take `expected_s`; 0 if not even the fewest calls fit in the
    time left. All but the last leave most of it: the next payload takes up to GROWTH times as long."""
    if expected_s * (_WARM_CALLS + _MIN_CALLS) > left_s:
        return 0
    share = left_s if last else left_s / GROWTH
    return max(_MIN_CALLS, min(_MAX_CALLS, int(share / expected_s) - _WARM_CALLS))


def measure_collectives(
    device: "torch.device", nodes: int, ranks_per_node: int, seconds: float
) -> tuple[CollectiveTime, ...]:
    """Return what was timed in `seconds`, on rank 0; on the others only what they took part in. All ranks call this."""
    import torch
    import torch.distributed as dist

    found: list[CollectiveTime] = []
    groups, until = list_groups(nodes, ranks_per_node), time.perf_counter() + seconds
    for number, group in enumerate(groups):
        members = dist.new_group(list(range(group.ranks)))
        if dist.get_rank() < group.ranks:
            share = (until - time.perf_counter()) / (len(groups) - number)
            found += _measure_group(group, members, device, share)
            dist.destroy_process_group(members)
        dist.all_reduce(torch.zeros(1))  # over gloo, where waiting costs no processor: nobody begins the next before
    return tuple(found)


def _measure_group(
    group: RankGroup, members: "torch.distributed.ProcessGroup", device: "torch.device", seconds: float
) -> list[CollectiveTime]:
    """Time every kind and payload within one group."""
    rows, until = list[CollectiveTime](), time.perf_counter() + seconds
    for number, kind in enumerate(KINDS):
        sizes = list_payloads(device.type, group.ranks)
        end = time.perf_counter() + (until - time.perf_counter()) / (len(KINDS) - number)
        expected_s = 1e-3  # of the smallest payload
        for size in sizes:
            calls = count_calls(expected_s, end - time.perf_counter(), last=size == sizes[-1])
            calls = max(calls, _MIN_CALLS) if size == sizes[0] else calls  # something is told of every group and kind
            if not (calls := _broadcast_number(calls, members)):
                break
            s = statistics.median(
                _time_slowest(_build_call(kind, size, group.ranks, device, members), calls, device, members)
            )
            rows.append(CollectiveTime(kind=kind, nodes=group.nodes, ranks=group.ranks, payload_bytes=size, s=s))
            expected_s = s * GROWTH  # at most: a small one is all latency
    return rows


def _build_call(
    kind: CollectiveKind, size: int, ranks: int, device: "torch.device", members: "torch.distributed.ProcessGroup"
) -> Callable[[], object]:
    """Return one collective with a payload of `size` bytes, as nccl-tests counts it."""
    import torch
    import torch.distributed as dist

    whole = torch.zeros(size // _NUMBER_BYTES, device=device)
    part = torch.zeros(size // _NUMBER_BYTES // ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=members)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=members)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=members)


def _broadcast_number(number: int, members: "torch.distributed.ProcessGroup") -> int:
    """Return rank 0's number: clocks differ, and ranks that disagree would wait for each other for ever."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor([number])
    dist.broadcast(shared, 0, group=members)
    return int(shared)


def _time_slowest(
    call: Callable[[], object], calls: int, device: "torch.device", members: "torch.distributed.ProcessGroup"
) -> Sequence[float]:
    """Return each call's seconds on the rank that took longest. All begin together, off the clock."""
    import torch
    import torch.distributed as dist

    from bench.measure.collectives import wait_for

    together = torch.zeros(1)
    seconds = []
    for _ in range(_WARM_CALLS + calls):
        wait_for(device)
        dist.all_reduce(together, group=members)  # a barrier, over gloo with any device
        begin = time.perf_counter()
        call()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(seconds[_WARM_CALLS:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=members)
    found: list[float] = slowest.tolist()
    return found
