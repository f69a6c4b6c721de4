"""What the ranks really talk over: a short all-reduce, what carried its bytes, and the bandwidth of every rank."""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.core.record import Link
from bench.core.spec import RunSpec
from bench.measure import transport
from bench.measure.collectives import wait_for
from bench.measure.environment import name_collectives

_PAYLOAD_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_REPEATS = 5

_FIRST_BYTES, _LAST_BYTES, _GROWTH = 2**18, 2**26, 4
_LONG_ENOUGH_S = 0.02  # for an exchange there and back
_EXCHANGES = 3


def measure_link(device: torch.device, spec: RunSpec) -> Link:
    """All-reduce a few times and return the bus bandwidth, 2 (n - 1) / n × payload ÷ median time; and every node's.

    Source of the factor: nccl-tests, doc/PERFORMANCE.md.
    """
    size, world = _PAYLOAD_BYTES[device.type], dist.get_world_size()
    interfaces = os.environ.get("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME")
    link = Link(
        backend=name_collectives() if device.type == "cuda" else "gloo",
        interfaces=tuple(interfaces.split(",")) if interfaces else (),
        payload_bytes=size,
        bus_bytes_per_s=None,
    )
    if world == 1:
        return link
    tensor = torch.ones(size // 4, device=device)
    seconds, fields = [], dict[str, Any]()
    dist.barrier()
    before = transport.sent_bytes()
    for _ in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        tensor.fill_(1.0)
    seconds.pop(0)  # opens the connections
    fields["bus_bytes_per_s"] = 2 * (world - 1) / world * size / statistics.median(seconds)
    if spec.nodes > 1:
        fields |= _carried(before, spec, size)
        ranks = probe_ranks(device, spec)
        fields |= {"ranks_bytes_per_s": ranks, "nodes_bytes_per_s": ranks[:: spec.devices_per_node]}
    return link.model_copy(update=fields)


def _carried(before: dict[str, int], spec: RunSpec, payload_bytes: int) -> dict[str, Any]:
    """Return what the counters of all nodes say of the all-reduces just made. Over a ring, or any better way, they move
    at least the payload from every node once; a node's counters are read by its first rank."""
    sent = transport.between(before, transport.sent_bytes()) if dist.get_rank() % spec.devices_per_node == 0 else {}
    hosts: list[dict[str, int]] = [{} for _ in range(spec.world_size)]
    dist.all_gather_object(hosts, sent)
    total = transport.together(hosts)
    return {"sent_bytes": total, "transport": transport.kind(total, (_REPEATS + 1) * payload_bytes * spec.nodes)}


def pair_in_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the neighbours in a ring of nodes as pairs, in rounds in which no node takes part twice: two pairs of one
    node at once would measure how they share its link."""
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)] if nodes > 2 else [(0, 1)]
    last = pairs[-1:] if nodes % 2 else []  # the ring closes on a node that is busy in both other rounds
    return [found for found in (pairs[: nodes - 1 : 2], pairs[1::2], last) if found]


def compute_node_rates(pairs: Sequence[float]) -> tuple[float, ...]:
    """Return each node's bandwidth, that of the better one of its two pairs; pair n is node n and the next one. So a
    good node beside a slow one is not taken for slow; of two nodes none can be told."""
    return tuple(max(pairs[node], pairs[node - 1]) for node in range(len(pairs)))


def probe_ranks(device: torch.device, spec: RunSpec) -> tuple[float, ...]:
    """Exchange something between neighbouring nodes, over each local rank in turn, since each may have a network card
    of its own; return every rank's bytes per second, on all of them."""
    rates = torch.zeros(spec.world_size, dtype=torch.float64)
    for local_rank in range(spec.devices_per_node):
        members = [node * spec.devices_per_node + local_rank for node in range(spec.nodes)]
        group = dist.new_group(members)  # of its own, so that NCCL's communicators of the pairs can be given back
        if dist.get_rank() in members:
            rates[dist.get_rank()] = _ring(members, device, group)
            dist.destroy_process_group(group)
        dist.barrier()
    dist.all_reduce(rates)
    return tuple(rates.tolist())


def _ring(members: list[int], device: torch.device, group: dist.ProcessGroup) -> float:
    """Exchange something between neighbours among `members`, a rank of each node; return this one's rate."""
    own, pairs = members.index(dist.get_rank()), torch.zeros(len(members), dtype=torch.float64)
    for together in pair_in_rounds(len(members)):
        dist.all_reduce(torch.zeros(1), group=group)  # over gloo, with any device
        for one, other in together:
            if own == one:
                pairs[one] = _exchange(members[other], device, group)
            elif own == other:
                _send_back(members[one], device, group)
    dist.all_reduce(pairs, group=group)
    return compute_node_rates(pairs.tolist())[own]


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


def _send_back(peer: int, device: torch.device, group: dist.ProcessGroup) -> None:
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
