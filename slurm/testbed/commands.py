"""Commands of a testbed. Each function takes the parsed command-line arguments and returns an exit code."""

import dataclasses
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

import daemons
import network
import processes
from layout import Layout, RefusedCommand, check_shape
from ledger import Ledger, create, locked, read

Command = Callable[[Namespace], int]

_HERE = Path(__file__).parent
_PACKAGE = {  # Debian package of each program
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "hostname": "hostname",
}


def up(args: Namespace) -> int:
    """Start a testbed, and wait until all its nodes are idle. If the start fails, everything that was created is
    removed."""
    layout = Layout(**{option.name: getattr(args, option.name) for option in dataclasses.fields(Layout)})
    layout.check()
    needed = _PACKAGE | (daemons.ACCOUNTING_PROGRAMS if layout.accounting else {})
    if missing := sorted({package for program, package in needed.items() if not shutil.which(program)}):
        install = f"apt-get update && apt-get install {' '.join(missing)}"
        raise RefusedCommand(", ".join(missing), "not installed", install)
    ledger = create(args.dir, layout)
    with locked(args.dir):
        try:
            network.refuse_existing(layout)
            network.build(ledger)
            _write_configuration(ledger)
            daemons.start_munge(ledger)
            if layout.accounting:
                daemons.start_accounting(ledger)
            daemons.start_controller(ledger)
            for node in layout.workers:
                daemons.start_slurmd(ledger, node)
            daemons.wait_until_idle(ledger, layout.workers, args.wait)
        except BaseException:
            _take_down(ledger)
            raise
    shape = "not shaped" if layout.rate == "none" else f"{layout.rate} with a burst of {layout.burst}"
    print(
        f"testbed {layout.name}: nodes {' '.join(layout.workers)}, {layout.cpus} CPUs each, links {shape}. Try it:\n"
        f"  export SLURM_CONF={ledger.slurm_conf}\n"
        "  sinfo\n"
        f"  sbatch --nodes={min(layout.nodes, 2)} --output=/tmp/names.txt --wrap='srun hostname'"
    )
    return 0


def down(args: Namespace) -> int:
    """Stop a testbed and remove it, including the processes of its jobs."""
    if not args.dir.exists():
        print(f"testbed: nothing to take down in {args.dir}")
        return 0
    with _opened(args.dir) as ledger:
        _take_down(ledger)
    return 0


def _take_down(ledger: Ledger) -> None:
    """Remove everything of a testbed that still exists: processes, network namespaces, interfaces and folders. The
    ledger lists everything that the testbed has created."""
    for process in ledger.processes.values():
        process.end()
    for machine in ledger.namespaces:
        processes.clear(machine)
    network.demolish(ledger)
    shutil.rmtree(ledger.folder)


def _write_configuration(ledger: Ledger) -> None:
    layout, folder = ledger.layout, ledger.folder
    for name in ("log", "state", "spool"):
        (folder / name).mkdir()
    shutil.copy(_HERE / "cgroup.conf", folder)
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={layout.address(node)} CPUs={layout.cpus} RealMemory={layout.memory_mb}"
        for node in layout.workers
    )
    values = {**dataclasses.asdict(layout), "nodes": nodes, "conf": "\n".join(layout.conf), "folder": folder}
    values |= {"controller": layout.controller, "controller_address": layout.address(layout.controller)}
    lines = (_HERE / "slurm.conf.in").read_text().splitlines()
    if layout.accounting:
        more = (_HERE / "accounting.conf.in").read_text().splitlines()
        lines = _drop_keys(lines, more) + more
    text = "\n".join([*_drop_keys(lines, layout.conf), ""])
    ledger.slurm_conf.write_text(Template(text).substitute(values))


def _drop_keys(lines: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return the configuration `lines` without the lines whose key also occurs in the lines `later`.

    Slurm's programs print a warning if a key occurs twice in a configuration.
    """
    keys = {line.partition("=")[0].lower() for line in later}
    return [line for line in lines if line.partition("=")[0].lower() not in keys]


def status(args: Namespace) -> int:
    """Print the state of the controller, nodes and links. Return 1 if the controller does not answer, otherwise 0."""
    ledger = read(args.dir)
    layout, states, links = ledger.layout, daemons.read_node_states(ledger), network.read_links(ledger.layout)
    found: dict[str, Any] = {
        "name": layout.name,
        "folder": str(ledger.folder),
        "slurm_conf": str(ledger.slurm_conf),
        "completion_log": str(ledger.log("jobcomp")),
        "controller_up": bool(states),
        "layout": dataclasses.asdict(layout),
        "nodes": {
            node: {
                "address": layout.address(node),
                "state": states.get(node),
                "slurmd": daemons.is_running(ledger, f"slurmd.{node}"),
                "link": links[node],
            }
            for node in layout.workers
        },
    }
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"testbed {found['name']} in {found['folder']}: controller {'up' if states else 'DOWN'}")
        print(f"{'node':8}{'address':16}{'state':14}{'slurmd':8}{'cable':8}rate")
        for name, node in found["nodes"].items():
            link = node["link"]
            rate = f"{link['rate_mbit']:g} Mbit/s, burst {link['burst_bytes']}" if link["rate_mbit"] else "not shaped"
            daemon, cable = "up" if node["slurmd"] else "DOWN", "in" if link["up"] else "OUT"
            print(f"{name:8}{node['address']:16}{node['state'] or '?':14}{daemon:8}{cable:8}{rate}")
        print(f"export SLURM_CONF={found['slurm_conf']}")
    return 0 if states else 1


def link(args: Namespace) -> int:
    """Change the rate of network links, or disconnect or reconnect them."""
    with _opened(args.dir) as ledger:
        layout = ledger.layout
        nodes = layout.workers if args.nodes == ["all"] else [_check_node(node, layout.workers) for node in args.nodes]
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
    """Start or kill the slurmd of a node, depending on `args.action`. The action `crash` kills every process of the
    node."""
    with _opened(args.dir) as ledger:
        _check_node(args.node, ledger.layout.workers)
        if args.action == "start":
            daemons.start_slurmd(ledger, args.node)
        elif args.action == "crash":
            processes.clear(args.node)
        elif process := ledger.processes.get(f"slurmd.{args.node}"):
            process.end()
    return 0


def controller(args: Namespace) -> int:
    """Start, stop or restart slurmctld, the controller. A controller that is stopped saves the state of its jobs
    first."""
    with _opened(args.dir) as ledger:
        if args.action != "start" and (process := ledger.processes.get("slurmctld")):
            process.end(grace_s=daemons.ORDERLY_S)
        if args.action != "stop":
            daemons.start_controller(ledger)
            watched, rule = ["slurmctld"], "slurmctld does not answer"
            daemons.wait(ledger, watched, lambda: bool(daemons.read_node_states(ledger)), args.wait, rule)
    return 0


def exec(args: Namespace) -> int:
    """Replace this process with a command on a node of the testbed. So the command determines the exit code, and
    signals to this process reach the command."""
    ledger = read(args.dir)
    command = processes.inside(_check_node(args.node, ledger.layout.machines), args.words)
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, "SLURM_CONF": str(ledger.slurm_conf)})


@contextmanager
def _opened(folder: Path) -> Iterator[Ledger]:
    """Context manager that yields the ledger of a testbed. In this context, the testbed is locked against other
    commands."""
    # Before the lock, refuse a folder that contains no testbed.
    read(folder)
    with locked(folder):
        # Read the ledger again, because another command may have changed it before the lock.
        yield read(folder)


def _check_node(node: str, nodes: list[str]) -> str:
    if node not in nodes:
        raise RefusedCommand(node, "no such node", f"choose from {', '.join(nodes)}")
    return node
