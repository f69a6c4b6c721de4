"""What the ranks really talk over: a short all-reduce before the window, and the bandwidth of every node."""

import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from bench.measure.collectives import wait_for
from bench.record import Link
from bench.spec import RunSpec

_PAYLOAD_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_REPEATS = 5

_FIRST_BYTES, _LAST_BYTES, _GROWTH = 2**18, 2**26, 4
_LONG_ENOUGH_S = 0.02  # for an exchange there and back
_EXCHANGES = 3


def probe(device: torch.device, spec: RunSpec) -> Link:
    """All-reduce a few times and return the bus bandwidth, 2 (n - 1) / n × payload ÷ median time; and every node's.

    Source of the factor: nccl-tests, doc/PERFORMANCE.md.
    """
    size, world = _PAYLOAD_BYTES[device.type], dist.get_world_size()
    interfaces = os.environ.get("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME")
    link = Link(
        backend="nccl" if device.type == "cuda" else "gloo",
        interfaces=tuple(interfaces.split(",")) if interfaces else (),
        payload_bytes=size,
        bus_bytes_per_s=None,
    )
    if world == 1:
        return link
    tensor = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        tensor.fill_(1.0)
    seconds.pop(0)  # opens the connections
    bus = 2 * (world - 1) / world * size / statistics.median(seconds)
    nodes = probe_nodes(device, spec) if spec.nodes > 1 else ()
    return link.model_copy(update={"bus_bytes_per_s": bus, "nodes_bytes_per_s": nodes})


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the neighbours in a ring of nodes as pairs, in rounds in which no node takes part twice: two pairs of one
    node at once would measure how they share its link."""
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)] if nodes > 2 else [(0, 1)]
    last = pairs[-1:] if nodes % 2 else []  # the ring closes on a node that is busy in both other rounds
    return [found for found in (pairs[: nodes - 1 : 2], pairs[1::2], last) if found]


def by_node(pairs: Sequence[float]) -> tuple[float, ...]:
    """Return each node's bandwidth, that of the better one of its two pairs; pair n is node n and the next one. So a
    good node beside a slow one is not taken for slow; of two nodes none can be told."""
    return tuple(max(pairs[node], pairs[node - 1]) for node in range(len(pairs)))


def probe_nodes(device: torch.device, spec: RunSpec) -> tuple[float, ...]:
    """Exchange something between the first ranks of neighbours; return each node's bytes per second, on those ranks."""
    first = [node * spec.devices_per_node for node in range(spec.nodes)]
    group = dist.new_group(first)  # of its own, so that NCCL's communicators of the pairs can be given back
    if dist.get_rank() not in first:
        return ()
    own, pairs = first.index(dist.get_rank()), torch.zeros(spec.nodes, dtype=torch.float64)
    for together in rounds(spec.nodes):
        dist.all_reduce(torch.zeros(1), group=group)  # over gloo, with any device
        for one, other in together:
            if own == one:
                pairs[one] = _exchange(first[other], device, group)
            elif own == other:
                _answer(first[one], device, group)
    dist.all_reduce(pairs, group=group)
    dist.destroy_process_group(group)
    return by_node(pairs.tolist())


def _exchange(peer: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Send something there and back, more of it as long as that takes no time; return bytes per second one way."""

    def seconds(size: int) -> float:
        dist.send(torch.tensor([size]), peer, group)
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        wait_for(device)
        begin = time.perf_counter()
        dist.send(payload, peer, group)
        dist.recv(payload, peer, group)
        wait_for(device)
        return time.perf_counter() - begin

    size = _FIRST_BYTES
    seconds(size)  # opens the connection
    while (took := seconds(size)) < _LONG_ENOUGH_S and size < _LAST_BYTES:
        size *= _GROWTH
    fastest = min(took, *(seconds(size) for _ in range(_EXCHANGES - 1)))  # somebody else's traffic only slows it down
    dist.send(torch.tensor([0]), peer, group)
    return 2 * size / fastest


def _answer(peer: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Send back what comes, until the other side has seen enough."""
    size = torch.tensor([0])
    while True:
        dist.recv(size, peer, group)
        if not int(size):
            return
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.recv(payload, peer, group)
        dist.send(payload, peer, group)
        wait_for(device)
