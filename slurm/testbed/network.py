"""Network of a testbed: a switch in the controller's network namespace, with one virtual cable to every node.

Each cable can have a rate limit. The switch's port for node zs2 is called zs2, and the node's end of the cable is eth0.
One more cable leads to the host, the machine on which the testbed runs. All other cables are inside of network
namespaces, where the host's firewall does not apply.
"""

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from layout import Layout, Problem, RefusedCommand
from ledger import Ledger

# Folders of iproute2. The first contains the names of network namespaces. The second has a folder for each namespace,
# with files that replace files in /etc in this namespace.
_ROOT = Path("/run/netns")
_ETC = Path("/etc/netns")
_SWITCH = "switch"
_UPLINK = "login"
# Longest time that a packet may wait in the queue of a rate-limited link. After that time it is dropped, and TCP slows
# down.
_LATENCY = "50ms"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Problem(" ".join(command), done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def refuse_existing(layout: Layout) -> None:
    """Raise `RefusedCommand` if a network namespace, folder, interface or route of the testbed already exists."""
    used = [f"namespace {name}" for name in layout.machines if (_ROOT / name).exists()]
    used += [f"folder {_ETC / name}" for name in layout.machines if (_ETC / name).exists()]
    if Path("/sys/class/net", layout.login_interface).exists():
        used.append(f"interface {layout.login_interface}")
    if used:
        rule = "exists already, and belongs to no testbed of this folder"
        raise RefusedCommand(", ".join(used), rule, "choose another --name")
    # For `ip route show`, "root" selects routes inside the subnet, and "match" selects routes that contain the subnet.
    for overlap in ("root", "match"):
        for route in json.loads(_run("ip", "-j", "route", "show", overlap, layout.subnet)):
            if route["dst"] != "default":
                rule = f"overlaps {route['dst']} on {route.get('dev')}"
                raise RefusedCommand(f"--subnet {layout.subnet}", rule, "choose another, such as 172.31.77.0/24")


def build(ledger: Ledger) -> None:
    """Create the network of a testbed: the network namespaces with their folders in /etc/netns, the switch, and the
    cables (pairs of interfaces). Before that, write the names of namespaces, interfaces and folders into the ledger."""
    layout = ledger.layout
    ledger.namespaces = layout.machines
    ledger.interfaces = [layout.login_interface]
    ledger.folders = [str(_ETC / name) for name in layout.machines]
    ledger.save()
    for machine in layout.machines:
        _run("ip", "netns", "add", machine)
        _run("ip", "-n", machine, "link", "set", "lo", "up")
        (_ETC / machine).mkdir(parents=True)
        (_ETC / machine / "hosts").write_text(layout.hosts())
    switch = layout.controller
    _run("ip", "-n", switch, "link", "add", _SWITCH, "type", "bridge")
    _address(["-n", switch], _SWITCH, layout.address(switch), layout)
    _run("ip", "link", "add", layout.login_interface, "type", "veth", "peer", "name", _UPLINK, "netns", switch)
    _run("ip", "-n", switch, "link", "set", _UPLINK, "master", _SWITCH, "up")
    _address([], layout.login_interface, layout.login_address, layout)
    for node in layout.workers:
        _run("ip", "link", "add", node, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", node)
        _run("ip", "-n", switch, "link", "set", node, "master", _SWITCH, "up")
        _address(["-n", node], "eth0", layout.address(node), layout)
        shape(layout, node, layout.rate, layout.burst)


def _address(where: list[str], interface: str, address: str, layout: Layout) -> None:
    _run("ip", *where, "addr", "add", f"{address}/{layout.prefix_length}", "dev", interface)
    _run("ip", *where, "link", "set", interface, "up")


def shape(layout: Layout, node: str, rate: str, burst: str) -> None:
    """Limit the rate of a node's link in both directions; the rate `none` removes the limit. The node's end limits what
    the node sends, and the switch's end limits what the node receives."""
    for namespace, interface in ((node, "eth0"), (layout.controller, node)):
        device = ("qdisc", "replace", "dev", interface, "root")
        if rate == "none":
            # The command `del` would fail on a link without a rate limit.
            _run("tc", "-n", namespace, *device, "pfifo")
        else:
            _run("tc", "-n", namespace, *device, "tbf", "rate", rate, "burst", burst, "latency", _LATENCY)


def plug(layout: Layout, node: str, state: str) -> None:
    """Set the switch's port for a node to the state `up` or `down`. The state `down` acts like a disconnected cable:
    packets are lost, and neither end gets an error."""
    _run("ip", "-n", layout.controller, "link", "set", node, state)


def read_links(layout: Layout) -> dict[str, dict[str, Any]]:
    """Return the state of each node's link: `up`, the rate in Mbit/s and the burst size in bytes.

    Rate and burst size are None for a link without a rate limit.
    """
    switch = layout.controller
    ports = {port["ifname"]: port for port in json.loads(_run("ip", "-j", "-n", switch, "link", "show"))}
    shapes = {q["dev"]: q for q in json.loads(_run("tc", "-j", "-n", switch, "qdisc", "show")) if q["kind"] == "tbf"}
    return {
        node: {
            "up": "UP" in ports[node]["flags"],
            "rate_mbit": shapes[node]["options"]["rate"] * 8 / 1e6 if node in shapes else None,
            "burst_bytes": shapes[node]["options"]["burst"] if node in shapes else None,
        }
        for node in layout.workers
    }


def demolish(ledger: Ledger) -> None:
    """Remove all interfaces, network namespaces and folders in the ledger that still exist."""
    for interface in ledger.interfaces:
        if Path("/sys/class/net", interface).exists():
            _run("ip", "link", "delete", interface)
    for namespace in ledger.namespaces:
        if (_ROOT / namespace).exists():
            _run("ip", "netns", "delete", namespace)
    for folder in ledger.folders:
        (Path(folder) / "hosts").unlink(missing_ok=True)
        if Path(folder).exists():
            Path(folder).rmdir()
    # iproute2 creates these folders at the first use and never removes them.
    if _ROOT.is_dir() and not any(_ROOT.iterdir()):
        # The folder is a bind mount of itself.
        subprocess.run(["umount", "--quiet", str(_ROOT)], stderr=subprocess.DEVNULL)
    for root in (_ROOT, _ETC):
        with suppress(OSError):  # the folder is not empty, or missing
            root.rmdir()
