"""How long each collective takes, by payload and number of ranks, in groups of real processes.

The calls are those that DeepSpeed and torch make: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`. Gloo
has no reduce-scatter of its own; torch's all-reduces there and keeps a part, and that is what is timed.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.machine import CollectiveKind, CollectiveTime

if TYPE_CHECKING:
    import torch

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


def measure(device: "torch.device", nodes: int, ranks_per_node: int, seconds: float) -> tuple[CollectiveTime, ...]:
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
