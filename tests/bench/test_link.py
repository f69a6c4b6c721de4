"""Test of the measured bandwidth between nodes. The nodes are network namespaces of this machine, whose links have
known rates."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from started_runs import PATIENCE_S

from bench.core.quantities import find_slow_links
from bench.measure.link import compute_node_rates, pair_in_rounds

NODES = 4
RATES_MBIT = (200, 200, 40, 200)


@pytest.mark.parametrize("nodes", range(2, 12))
def test_neighbours_are_paired_once_and_no_rank_has_two_partners_at_a_time(nodes: int) -> None:
    met = [{one, other} for together in pair_in_rounds(nodes) for one, other in together]
    ring = [{node, (node + 1) % nodes} for node in range(nodes if nodes > 2 else 1)]
    assert len(met) == len(ring) and all(pair in met for pair in ring)
    for together in pair_in_rounds(nodes):
        assert len(set(chain(*together))) == 2 * len(together)
    assert len(pair_in_rounds(nodes)) <= 3, "the time does not grow with the nodes"


def test_bandwidth_of_a_node_is_that_of_its_better_pair() -> None:
    # Rates between pairs of nodes: 9 for nodes 0 and 1, 2 for 1 and 2, 3 for 2 and 3, 8 for 3 and 0. Node 2 is slow.
    assert compute_node_rates([9, 2, 3, 8]) == (9, 9, 3, 8)
    assert compute_node_rates([5, 0]) == (5, 5), "two nodes are one pair, so the slow node is unknown"


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Names of network namespaces, one for each simulated node. A switch connects them.

    The interface `eth0` of each node has its own rate limit, for both directions.
    """
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    switch, *nodes = names = [f"zeroscale-{os.getpid()}-{number}" for number in range(NODES + 1)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        ip(switch, "link add bridge type bridge")
        ip(switch, "link set bridge up")
        for number, node in enumerate(nodes):
            ip(node, f"link add eth0 type veth peer name port{number} netns {switch}")
            ip(node, "link set lo up")
            ip(node, f"address add 10.200.0.{number + 1}/24 dev eth0")
            ip(switch, f"link set port{number} master bridge up")
            for each, device in ((node, "eth0"), (switch, f"port{number}")):
                ip(each, f"link set {device} up")
                shape = f"tbf rate {RATES_MBIT[number]}mbit burst 32k latency 100ms"
                subprocess.run(["tc", "-n", each, "qdisc", "add", "dev", device, "root", *shape.split()], check=True)
        yield nodes
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no such network: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(namespace: str, command: str) -> None:
    subprocess.run(["ip", "-n", namespace, *command.split()], check=True, capture_output=True)


RANK = """
import json, sys, time, torch, torch.distributed as dist
from types import SimpleNamespace
from bench.measure import link
rank, nodes = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method="tcp://10.200.0.1:29500", rank=rank, world_size=nodes)
spec = SimpleNamespace(nodes=nodes, devices_per_node=1, world_size=nodes)
dist.barrier()
began = time.perf_counter()
found = link.probe_ranks(torch.device("cpu"), spec)
took = time.perf_counter() - began
carried = link.measure_link(torch.device("cpu"), SimpleNamespace(nodes=nodes, devices_per_node=1, world_size=nodes))
print(json.dumps([found, took, carried.transport, carried.sent_bytes]))
"""


@pytest.mark.timed
@pytest.mark.processes
def test_slow_link_is_measured_and_only_its_node_is_named(namespaces: list[str]) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = []
    for number, namespace in enumerate(namespaces):
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", RANK, str(number), str(NODES)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()))
    try:
        answers = [json.loads(rank.communicate(timeout=PATIENCE_S)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    rates, seconds, transport, sent = answers[0]
    assert all(found[:1] + found[2:] == [rates, transport, sent] for found in answers)
    assert transport == "sockets" and sent["eth0"] > 6 * NODES * 4 * 2**20, "six all-reduces of 4 MiB"
    in_mbit = [8 * rate / 1e6 for rate in rates]
    assert in_mbit == pytest.approx(RATES_MBIT, rel=0.3)
    assert find_slow_links(rates) == [2]
    assert seconds < 20, "under two on an idle machine; the largest payload takes a minute over the slow link"
