"""Test of the communication link between ranks. It times a short all-reduce, determines whether InfiniBand or sockets
carried its bytes, and measures the bandwidth of every rank.

The transport is determined from the byte counters of network interfaces and InfiniBand ports.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.core.machine import Machine
from bench.core.record import Link, Network
from bench.core.spec import RunSpec
from bench.measure.collectives import wait_for
from bench.measure.environment import name_collectives
from bench.measure.failures import WrongTransport

# Bytes of the all-reduce: enough to make the latency negligible, and few enough to take well under a second.
_PAYLOAD_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_REPEATS = 5
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 2**18, 2**26, 4
# Minimum seconds of a round trip that is used: much more than the clock's resolution and the latency of a link.
_LONG_ENOUGH_S = 0.02
# Timed round trips per pair of nodes. The fastest is used.
_EXCHANGES = 3
# Bytes per word. InfiniBand ports count words (sysfs-class-infiniband, port_xmit_data).
_WORD_BYTES = 4
# A transport carried the bytes if its counters show at least this fraction of them.
_MOST = 0.5


def measure_link(device: torch.device, spec: RunSpec) -> Link:
    """Measure the link between the ranks, and return the bus bandwidth of an all-reduce in bytes per second. With
    several nodes, the result also has the transport (InfiniBand or sockets) and the bandwidth of each rank.

    For n ranks, the bus bandwidth is 2 (n - 1) / n × payload bytes / median time. The source of this factor is
    doc/PERFORMANCE.md of nccl-tests. All ranks must call this function.
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
    before = read_sent_bytes()
    for _ in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        tensor.fill_(1.0)
    seconds.pop(0)  # the first all-reduce opens the connections
    fields["bus_bytes_per_s"] = 2 * (world - 1) / world * size / statistics.median(seconds)
    if spec.nodes > 1:
        # The first rank of each node reads the node's counters.
        is_first = dist.get_rank() % spec.devices_per_node == 0
        hosts: list[dict[str, int]] = [{} for _ in range(spec.world_size)]
        dist.all_gather_object(hosts, subtract_counts(before, read_sent_bytes()) if is_first else {})
        total = add_counts(hosts)
        # In every all-reduce, each node sends at least the payload, with a ring algorithm or a faster algorithm.
        transport = find_transport(total, (_REPEATS + 1) * size * spec.nodes)
        ranks = probe_ranks(device, spec)
        fields |= {"sent_bytes": total, "transport": transport}
        fields |= {"ranks_bytes_per_s": ranks, "nodes_bytes_per_s": ranks[:: spec.devices_per_node]}
    return link.model_copy(update=fields)


def read_sent_bytes(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes that this host has sent so far, by interface (`eth0`) and InfiniBand port (`mlx5_0/1`)."""
    found = {}
    for counter in sorted((root / "sys/class/net").glob("*/statistics/tx_bytes")):
        found[counter.parent.parent.name] = _read_count(counter)
    for counter in sorted((root / "sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data")):
        device, _, port = counter.parts[-5:-2]
        found[f"{device}/{port}"] = _WORD_BYTES * _read_count(counter)
    return found


def _read_count(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        # The interface is down, or has been removed.
        return 0


def subtract_counts(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes sent between two readings, by interface or port. Interfaces without traffic are omitted."""
    return {name: sent for name, count in after.items() if (sent := count - before.get(name, count)) > 0}


def add_counts(hosts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of the bytes sent by all hosts, by interface or port."""
    return dict(sorted(sum(map(Counter, hosts), Counter[str]()).items()))


def find_transport(sent: Mapping[str, int], moved_bytes: float) -> str | None:
    """Return the transport that carried most of `moved_bytes`. `sent` has the bytes sent by interface or port, from the
    byte counters of the hosts. A transport is detected if its counters show at least half of `moved_bytes`.

    Return "infiniband" if InfiniBand is detected; else "sockets" if sockets are detected; else None. The result is None
    if the bytes went between devices of a node, or over a network without these counters. RDMA over Ethernet is counted
    on InfiniBand ports, and on some systems also on the network interface.
    """
    ports = sum(count for name, count in sent.items() if "/" in name)
    interfaces = sum(count for name, count in sent.items() if "/" not in name and name != "lo")
    if ports >= _MOST * moved_bytes > 0:
        return "infiniband"
    return "sockets" if interfaces >= _MOST * moved_bytes > 0 else None


def check_link(link: Link, network: Network, machine: Machine) -> None:
    """Raise WrongTransport if the transport is known and differs from the transport expected in the site file
    (`network`).

    Raise it also if the bandwidth of a rank is below the minimum that the machine file (`machine`) requires.
    """
    if network.expects and link.transport and link.transport != network.expects:
        shown = ", ".join(f"{name} {count / 1e6:.0f} MB" for name, count in (link.sent_bytes or {}).items())
        raise WrongTransport(f"network.expects is {network.expects}, but {link.transport} carried the bytes: {shown}")
    known = [rate for rate in (link.ranks_bytes_per_s or link.nodes_bytes_per_s) if rate is not None]
    floor = machine.inter_node_floor_bytes_per_s
    if floor is not None and known and min(known) < floor:
        rates = f"{min(known) / 1e6:.1f} MB/s, but the machine's minimum is {floor / 1e6:.1f} MB/s"
        raise WrongTransport(f"two ranks on different nodes exchanged {rates}")


def pair_in_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbouring nodes in a ring, grouped into rounds. In each round, a node is in at most one
    pair.

    Two pairs that exchange data with the same node at the same time would share its bandwidth.
    """
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)] if nodes > 2 else [(0, 1)]
    # With an odd number of nodes, the last pair needs its own round, because one of its two nodes is already in a pair
    # of the first round, and the other in a pair of the second round.
    last = pairs[-1:] if nodes % 2 else []
    return [found for found in (pairs[: nodes - 1 : 2], pairs[1::2], last) if found]


def compute_node_rates(pairs: Sequence[float]) -> tuple[float, ...]:
    """Return the bandwidth of each node: the larger of its two bandwidths, each measured with one neighbour in the
    ring.

    `pairs[n]` is the bandwidth between node n and the next node. Because of the maximum, a fast node next to a slow
    node is not reported as slow. With only two nodes, both get the same bandwidth, and a slow node cannot be
    identified.
    """
    return tuple(max(pairs[node], pairs[node - 1]) for node in range(len(pairs)))


def probe_ranks(device: torch.device, spec: RunSpec) -> tuple[float, ...]:
    """Exchange data between neighbouring nodes. Return the bandwidth of every rank in bytes per second, on all ranks.

    Every local rank of a node is measured, because each local rank may have its own network card. The local ranks are
    measured one after another. All ranks must call this function.
    """
    rates = torch.zeros(spec.world_size, dtype=torch.float64)
    for local_rank in range(spec.devices_per_node):
        members = [node * spec.devices_per_node + local_rank for node in range(spec.nodes)]
        # The group is temporary. NCCL creates a communicator for each pair, and they are freed together with the group.
        group = dist.new_group(members)
        if dist.get_rank() in members:
            rates[dist.get_rank()] = _probe_ring(members, device, group)
            dist.destroy_process_group(group)
        dist.barrier()
    dist.all_reduce(rates)
    return tuple(rates.tolist())


def _probe_ring(members: list[int], device: torch.device, group: dist.ProcessGroup) -> float:
    """Exchange data between neighbouring ranks in a ring, and return this rank's bandwidth in bytes per second.

    `members` are the ranks in the ring, one per node.
    """
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
    """Send bytes to a peer and receive them back. Return the bandwidth of one direction in bytes per second.

    The number of bytes is increased until a round trip takes long enough to be measured.
    """

    def time_round_trip(size: int) -> float:
        dist.send(torch.tensor([size]), peer, group)
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        wait_for(device)
        begin = time.perf_counter()
        dist.send(payload, peer, group)
        dist.recv(payload, peer, group)
        wait_for(device)
        return time.perf_counter() - begin

    size = _FIRST_BYTES
    time_round_trip(size)  # opens the connection
    while (took := time_round_trip(size)) < _LONG_ENOUGH_S and size < _LAST_BYTES:
        size *= _GROWTH
    # The fastest round trip is used, because other traffic can only add time.
    fastest = min(took, *(time_round_trip(size) for _ in range(_EXCHANGES - 1)))
    dist.send(torch.tensor([0]), peer, group)  # tells the peer to stop
    return 2 * size / fastest


def _send_back(peer: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Send every received payload back to the peer, until the peer announces the size 0."""
    size = torch.tensor([0])
    while True:
        dist.recv(size, peer, group)
        if not int(size):
            return
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.recv(payload, peer, group)
        dist.send(payload, peer, group)
        wait_for(device)
