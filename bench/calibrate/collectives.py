"""Measurements that need all ranks: collectives, and contention, which is the slowdown of ranks that share a processor.

Each collective is timed for several payloads and numbers of ranks, in groups of real processes. The calls are those of
DeepSpeed and torch: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`. Gloo has no reduce-scatter of its
own. With gloo, torch runs an all-reduce and keeps a part of the result, so both are timed together.

Ranks that share one processor slow each other down. To measure this, the same work is timed with 1, 2, … processes at
the same time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.calibrate import CalibrationRequest
from bench.core.machine import CollectiveKind, CollectiveTime

if TYPE_CHECKING:
    import torch

    Group = torch.distributed.ProcessGroup

ROUND_S = 0.3
"""Seconds of the work that is timed between two barriers, if a single process works. The work must take much longer
than a few milliseconds, because ranks leave a barrier a few milliseconds apart."""
_MIN_ROUNDS, _MAX_ROUNDS = 5, 15
_TOKENS, _D_MODEL, _D_FF = 512, 256, 768


def _find_most(values: Sequence[float], members: "Group") -> list[float]:
    """Return the maximum of each value over the ranks of a group."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=members)
    found: list[float] = shared.tolist()
    return found


# -- contention


def count_sharers(request: CalibrationRequest) -> int:
    """Return the number of ranks that share a processor: the ranks of one node, or all ranks if the nodes share a
    processor."""
    return request.world_size if request.machine.nodes_share_processor else request.ranks_per_node


def count_rounds(sharers: int, seconds: float) -> int:
    """Return the number of rounds that fit into `seconds` even in the worst case, within fixed bounds. In each round,
    every number of processes from 1 to `sharers` is timed once.

    In the worst case all processes share one core, so n processes take n times as long as a single process. (In the
    best case each process has its own core, and n processes take as long as a single process.)
    """
    at_worst = ROUND_S * sum(range(1, sharers + 1))
    return max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(seconds / at_worst)))


def compute_slowdown(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the slowdown with 1, 2, … processes: the median time divided by the median time of one process. `times`
    has a row for each number of processes, with the time of the slowest process in each round."""
    medians = [statistics.median(of_some) for of_some in times]
    return tuple(median / medians[0] for median in medians)


def measure_contention(request: CalibrationRequest, device: "torch.device", seconds: float) -> tuple[float, ...]:
    """On rank 0, return the slowdown for each number of processes that work at the same time. On other ranks, return an
    empty tuple. All ranks must call this function. `seconds` is the intended length of the measurement."""
    import torch
    import torch.distributed as dist

    work, together = _build_work(device), count_sharers(request)
    loops = _count_loops(work)
    groups = [dist.new_group(list(range(count + 1))) for count in range(together)]
    times: list[list[float]] = [[] for _ in groups]
    # numbers of processes alternate, so that a change of the clock rate affects all of them alike
    for _ in range(count_rounds(together, seconds)):
        for count, members in enumerate(groups):
            if dist.get_rank() <= count:
                dist.all_reduce(torch.zeros(1), group=members)  # barrier
                begin = time.perf_counter()
                for _ in range(loops):
                    work()
                times[count] += _find_most([time.perf_counter() - begin], members)
            dist.all_reduce(torch.zeros(1))
    return compute_slowdown(times) if dist.get_rank() == 0 else ()


def _count_loops(work: Callable[[], object]) -> int:
    """Return the number of calls of `work` that rank 0 makes in ROUND_S seconds while all other ranks wait. Every rank
    gets this number."""
    import torch
    import torch.distributed as dist

    loops = torch.ones(1, dtype=torch.int64)
    work()  # the first call loads code
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
    """Return a function that runs the forward and backward pass of a gated feed-forward layer in fp32, with norm and
    residual. The proportion of matrix products to element-wise work is about the same as in a small T5."""
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


# -- collectives

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
GROWTH = 8
"""Factor from one payload to the next larger payload."""
LARGEST_BYTES = {"cpu": 2**24, "cuda": 2**30}
_NUMBER_BYTES = 4  # fp32
_MIN_CALLS, _MAX_CALLS = 3, 40
_WARM_CALLS = 1  # untimed calls for each payload, since a library may choose another algorithm for it


class RankGroup(NamedTuple):
    """Group of ranks that communicate: the first `ranks` ranks of the job, which are on its first `nodes` nodes."""

    nodes: int
    ranks: int


def list_groups(nodes: int, ranks_per_node: int) -> list[RankGroup]:
    """Return the groups of ranks to measure: first groups within one node, then all ranks of an increasing number of
    nodes."""
    inside = [RankGroup(1, ranks) for ranks in thin_out(ranks_per_node)]
    return inside + [RankGroup(count, count * ranks_per_node) for count in thin_out(nodes) if count > 1]


def thin_out(count: int) -> list[int]:
    """Return the rank or node counts up to `count` that are measured: 1 to 4, powers of two, and `count` itself."""
    return [n for n in range(1, count + 1) if n <= 4 or n == count or n & (n - 1) == 0]


def list_payloads(device: str, ranks: int) -> list[int]:
    """Return the payloads to measure, in bytes, from small to large. Each is rounded up so that every rank has the same
    whole number of fp32 values."""
    found, size, share = [], 8, _NUMBER_BYTES * ranks
    while size <= LARGEST_BYTES[device]:
        found.append(-(-size // share) * share)
        size *= GROWTH
    return list(dict.fromkeys(found))


def count_calls(expected_s: float, left_s: float, *, last: bool) -> int:
    """Return the number of timed calls for a payload; 0 if the minimum number of calls does not fit into the remaining
    time.

    `expected_s` is the longest expected time of one call, and `left_s` is the remaining time, both in seconds. `last`
    is True for the last payload.

    More calls than the minimum are made only if all calls together need at most 1/GROWTH of the remaining time. The
    rest is kept for the next payload, whose calls take up to GROWTH times as long. Exception: the calls for the last
    payload may use all remaining time.
    """
    if expected_s * (_WARM_CALLS + _MIN_CALLS) > left_s:
        return 0
    share = left_s if last else left_s / GROWTH
    return max(_MIN_CALLS, min(_MAX_CALLS, int(share / expected_s) - _WARM_CALLS))


def measure_collectives(
    device: "torch.device", nodes: int, ranks_per_node: int, seconds: float
) -> tuple[CollectiveTime, ...]:
    """Measure collectives for about `seconds`, and return their times. On rank 0 the result is complete. Other ranks
    return only the times of the groups to which they belong. All ranks must call this function."""
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
        dist.all_reduce(torch.zeros(1))  # a barrier over gloo, because a rank that waits in gloo uses no processor
    return tuple(found)


def _measure_group(group: RankGroup, members: "Group", device: "torch.device", seconds: float) -> list[CollectiveTime]:
    """Return the times of every kind of collective and every payload within one group of ranks. `seconds` is the time
    for all of them together. The largest payloads are omitted if they do not fit into this time."""
    rows, until = list[CollectiveTime](), time.perf_counter() + seconds
    for number, kind in enumerate(KINDS):
        sizes = list_payloads(device.type, group.ranks)
        end = time.perf_counter() + (until - time.perf_counter()) / (len(KINDS) - number)
        expected_s = 1e-3  # assumed seconds per call for the smallest payload
        for size in sizes:
            calls = count_calls(expected_s, end - time.perf_counter(), last=size == sizes[-1])
            # at least one payload is measured for every group and kind
            calls = max(calls, _MIN_CALLS) if size == sizes[0] else calls
            # rank 0 decides, because ranks that made different numbers of calls would wait for each other forever
            if not (calls := _broadcast_number(calls, members)):
                break
            call = _build_call(kind, size, group.ranks, device, members)
            s = statistics.median(_time_slowest(call, calls, device, members))
            rows.append(CollectiveTime(kind=kind, nodes=group.nodes, ranks=group.ranks, payload_bytes=size, s=s))
            expected_s = s * GROWTH  # an upper bound, since the time of a small payload is mostly latency
    return rows


def _build_call(
    kind: CollectiveKind, size: int, ranks: int, device: "torch.device", members: "Group"
) -> Callable[[], object]:
    """Return a function that calls one collective. `size` is its payload in bytes, as nccl-tests counts it."""
    import torch
    import torch.distributed as dist

    whole = torch.zeros(size // _NUMBER_BYTES, device=device)
    part = torch.zeros(size // _NUMBER_BYTES // ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=members)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=members)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=members)


def _broadcast_number(number: int, members: "Group") -> int:
    """Return rank 0's `number` on all ranks of a group."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor([number])
    dist.broadcast(shared, 0, group=members)
    return int(shared)


def _time_slowest(call: Callable[[], object], calls: int, device: "torch.device", members: "Group") -> list[float]:
    """Return the seconds of each call on its slowest rank. All ranks start a call together after a barrier, whose
    time is excluded."""
    import torch
    import torch.distributed as dist

    from bench.measure.collectives import wait_for

    seconds = []
    for _ in range(_WARM_CALLS + calls):
        wait_for(device)
        dist.all_reduce(torch.zeros(1), group=members)  # a barrier, over gloo with any device
        begin = time.perf_counter()
        call()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return _find_most(seconds[_WARM_CALLS:], members)
