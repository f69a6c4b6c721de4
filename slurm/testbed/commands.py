"""The commands of a testbed, one function each: what was asked for in, exit code out."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Protocol

import cluster
import daemons
import network
import processes
from errors import RefusedCommand
from layout import Layout, check_shape
from ledger import Ledger, locked, read


class Command(Protocol):
    __name__: str

    def __call__(self, args: Namespace) -> int: ...


def up(args: Namespace) -> int:
    layout = Layout(**{option.name: getattr(args, option.name) for option in fields(Layout)})
    ledger = cluster.up(layout, args.dir, args.wait)
    shape = "not shaped" if layout.rate == "none" else f"{layout.rate} with a burst of {layout.burst}"
    print(
        f"testbed {layout.name}: nodes {' '.join(layout.workers)}, {layout.cpus} CPUs each, links {shape}. Try it:\n"
        f"  export SLURM_CONF={ledger.slurm_conf}\n"
        "  sinfo\n"
        f"  sbatch --nodes={min(layout.nodes, 2)} --output=/tmp/names.txt --wrap='srun hostname'"
    )
    return 0


def down(args: Namespace) -> int:
    if not args.dir.exists():
        print(f"testbed: nothing to take down in {args.dir}")
        return 0
    with _opened(args.dir) as ledger:
        cluster.down(ledger)
    return 0


def status(args: Namespace) -> int:
    """Print the state of the controller, nodes and links; exit code 1 when the controller does not answer."""
    found = cluster.status(read(args.dir))
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"testbed {found['name']} in {found['folder']}: controller {'up' if found['controller_up'] else 'DOWN'}")
        print(f"{'node':8}{'address':16}{'state':14}{'slurmd':8}{'cable':8}rate")
        for name, node in found["nodes"].items():
            link = node["link"]
            rate = f"{link['rate_mbit']:g} Mbit/s, burst {link['burst_bytes']}" if link["rate_mbit"] else "not shaped"
            daemon, cable = "up" if node["slurmd"] else "DOWN", "in" if link["up"] else "OUT"
            print(f"{name:8}{node['address']:16}{node['state'] or '?':14}{daemon:8}{cable:8}{rate}")
        print(f"export SLURM_CONF={found['slurm_conf']}")
    return 0 if found["controller_up"] else 1


def link(args: Namespace) -> int:
    with _opened(args.dir) as ledger:
        layout = ledger.layout
        nodes = layout.workers if args.nodes == ["all"] else [_known(node, layout.workers) for node in args.nodes]
        burst = args.burst or layout.burst
        if not (args.rate or args.plug):
            raise RefusedCommand("link", "needs --rate, --down or --up")
        check_shape(args.rate or layout.rate, burst)
        for node in nodes:
            if args.rate:
                network.shape(layout, node, args.rate, burst)
            if args.plug:
                network.plug(layout, node, args.plug)
    return 0


def slurmd(args: Namespace) -> int:
    with _opened(args.dir) as ledger:
        _known(args.node, ledger.layout.workers)
        if args.action == "start":
            daemons.start_slurmd(ledger, args.node)
        elif args.action == "stop":
            daemons.stop_slurmd(ledger, args.node)
        else:
            processes.clear(args.node)
    return 0


def controller(args: Namespace) -> int:
    with _opened(args.dir) as ledger:
        if args.action != "start":
            daemons.stop_controller(ledger)
        if args.action != "stop":
            daemons.start_controller(ledger)
            daemons.wait_for_controller(ledger, args.wait)
    return 0


def exec(args: Namespace) -> int:
    """Become the command, so that its exit code and signals are its own."""
    ledger = read(args.dir)
    command = processes.inside(_known(args.node, ledger.layout.machines), args.words)
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, "SLURM_CONF": str(ledger.slurm_conf)})


@contextmanager
def _opened(folder: Path) -> Iterator[Ledger]:
    """Yield a testbed's ledger with no other command changing it meanwhile."""
    read(folder)  # refuses what is no testbed before it is locked
    with locked(folder):
        yield read(folder)  # as the command before us left it


def _known(node: str, nodes: list[str]) -> str:
    if node not in nodes:
        raise RefusedCommand(node, "no such node", f"choose from {', '.join(nodes)}")
    return node
