"""What carried the bytes between nodes, as the counters of network interfaces and InfiniBand ports tell it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.core.machine import Machine
from bench.core.record import Link, Network
from bench.measure.failures import WrongTransport

_WORDS = 4  # bytes of what an InfiniBand port counts (sysfs-class-infiniband, port_xmit_data)
_MOST = 0.5  # of the bytes that were sent


def sent_bytes(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes that this host has sent so far, by interface (`eth0`) and InfiniBand port (`mlx5_0/1`)."""
    found = {}
    for counter in sorted((root / "sys/class/net").glob("*/statistics/tx_bytes")):
        found[counter.parent.parent.name] = _number(counter)
    for counter in sorted((root / "sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data")):
        device, _, port = counter.parts[-5:-2]
        found[f"{device}/{port}"] = _WORDS * _number(counter)
    return found


def between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return what was sent between two readings, by interface or port that sent anything."""
    sent = {name: count - before.get(name, count) for name, count in after.items()}
    return {name: count for name, count in sent.items() if count > 0}


def together(hosts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return what all hosts have sent, by name."""
    total: dict[str, int] = {}
    for host in hosts:
        for name, count in host.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def kind(sent: Mapping[str, int], moved_bytes: float) -> str | None:
    """Return what carried `moved_bytes`: `infiniband` or `sockets` where its counters show most of them, else None:
    between devices of a node, or over a network that does not count here. RDMA over Ethernet counts on InfiniBand's
    ports, and perhaps on the interface too."""
    ports = sum(count for name, count in sent.items() if "/" in name)
    interfaces = sum(count for name, count in sent.items() if "/" not in name and name != "lo")
    if ports >= _MOST * moved_bytes > 0:
        return "infiniband"
    return "sockets" if interfaces >= _MOST * moved_bytes > 0 else None


def check(link: Link, network: Network, machine: Machine) -> None:
    """Raise WrongTransport where the site expects another transport than was found, or more of it."""
    if network.expects and link.transport and link.transport != network.expects:
        shown = ", ".join(f"{name} {count / 1e6:.0f} MB" for name, count in (link.sent_bytes or {}).items())
        raise WrongTransport(f"the site expects {network.expects}, and {link.transport} carried the bytes: {shown}")
    known = [rate for rate in (link.ranks_bytes_per_s or link.nodes_bytes_per_s) if rate is not None]
    floor = machine.inter_node_floor_bytes_per_s
    if floor is not None and known and min(known) < floor:
        least, given = min(known) / 1e6, floor / 1e6
        raise WrongTransport(
            f"a pair of ranks on two nodes exchanged {least:.1f} MB/s, and the machine has {given:.1f}"
        )


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0  # an interface that is down, or gone meanwhile
