"""Tests that the transport of the traffic between nodes (such as InfiniBand) is found from network counters of the
host. The InfiniBand counters follow the kernel's manual, because no real port was available."""

from pathlib import Path

import pytest

from bench.core.machine import Machine
from bench.core.record import Link, Network
from bench.measure.failures import WrongTransport, classify_error
from bench.measure.link import add_counts, check_link, find_transport, read_sent_bytes, subtract_counts

MB = 10**6


def host(root: Path, **counters: int) -> Path:
    """Write files with counters of sent bytes below the folder `root`. Return `root`. The keyword arguments map names
    of network interfaces to values of their counters. The interface `ib` is an InfiniBand port, whose counter has units
    of four bytes."""
    for name, count in counters.items():
        path = root / f"sys/class/net/{name}/statistics/tx_bytes"
        if name == "ib":
            path = root / "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{count}\n")
    return root


def test_traffic_is_the_difference_of_the_hosts_counters(tmp_path: Path) -> None:
    before = read_sent_bytes(host(tmp_path, eth0=1000, lo=5, ib=70))
    assert before == {"eth0": 1000, "lo": 5, "mlx5_0/1": 280}
    after = read_sent_bytes(host(tmp_path, eth0=1500, lo=5, ib=170))
    assert subtract_counts(before, after) == {"eth0": 500, "mlx5_0/1": 400}
    assert add_counts([{"eth0": 1, "ib0": 2}, {"eth0": 3}]) == {"eth0": 4, "ib0": 2}
    assert subtract_counts({}, {"eth1": 9}) == {}, "an interface that came meanwhile"
    assert "lo" in read_sent_bytes(), "every host has it"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"mlx5_0/1": 90 * MB, "eth0": 1 * MB}, "infiniband"),
        ({"mlx5_0/1": 1 * MB, "eth0": 90 * MB}, "sockets"),
        ({"mlx5_0/1": 90 * MB, "eth0": 90 * MB}, "infiniband"),  # RDMA over Ethernet
        ({"lo": 500 * MB, "eth0": 1 * MB}, None),
        ({}, None),
    ],
)
def test_transport_is_the_interface_with_most_of_the_bytes(sent: dict[str, int], expected: str | None) -> None:
    assert find_transport(sent, 100 * MB) == expected


def a_link(transport: str | None, *rates: float | None) -> Link:
    return Link(
        backend="nccl", payload_bytes=1, bus_bytes_per_s=1.0, transport=transport, ranks_bytes_per_s=rates,
        sent_bytes={"eth0": 90 * MB},
    )  # fmt: skip


def test_fallback_to_sockets_is_invalid_if_infiniband_is_expected() -> None:
    check_link(a_link("infiniband"), Network(expects="infiniband"), Machine(name="m"))
    # Without counters the transport is unknown, so no run is refused.
    check_link(a_link(None), Network(expects="infiniband"), Machine(name="m"))
    check_link(a_link("sockets"), Network(), Machine(name="m"))
    with pytest.raises(WrongTransport, match="is infiniband, but sockets carried the bytes: eth0 90 MB") as caught:
        check_link(a_link("sockets"), Network(expects="infiniband"), Machine(name="m"))
    assert classify_error(caught.value) == ("invalid", "type WrongTransport")


def test_link_below_the_minimum_bandwidth_is_invalid() -> None:
    machine = Machine(name="m", inter_node_floor_bytes_per_s=10 * MB)
    check_link(a_link("sockets", 10 * MB, None, 12 * MB), Network(), machine)
    with pytest.raises(WrongTransport, match=r"exchanged 9\.0 MB/s, but the machine's minimum is 10\.0"):
        check_link(a_link("sockets", 10 * MB, 9 * MB), Network(), machine)
