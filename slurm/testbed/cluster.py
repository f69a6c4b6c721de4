"""The testbed as a whole: up, down, and what state it is in."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import accounting
import daemons
import network
import processes
from errors import RefusedCommand
from layout import Layout
from ledger import Ledger, create, locked

_HERE = Path(__file__).parent
_PACKAGE = {  # which Debian package has the program
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "hostname": "hostname",
}


def refuse_without_programs(layout: Layout) -> None:
    """Raise `RefusedCommand` naming the Debian packages that are not installed."""
    needed = _PACKAGE | (accounting.PROGRAMS if layout.accounting else {})
    missing = sorted({package for program, package in needed.items() if not shutil.which(program)})
    if missing:
        raise RefusedCommand(
            ", ".join(missing), "not installed", f"apt-get update && apt-get install {' '.join(missing)}"
        )


def up(layout: Layout, folder: Path, wait_s: float) -> Ledger:
    """Bring a testbed up and return when all its nodes are idle; what fails on the way is taken down."""
    layout.check()
    refuse_without_programs(layout)
    ledger = create(folder, layout)
    with locked(folder):
        try:
            network.refuse_existing(layout)
            network.build(ledger)
            _write_configuration(ledger)
            daemons.start_munge(ledger)
            if layout.accounting:
                accounting.start_accounting(ledger)
            daemons.start_controller(ledger)
            for node in layout.workers:
                daemons.start_slurmd(ledger, node)
            daemons.wait_until_idle(ledger, layout.workers, wait_s)
        except BaseException:
            down(ledger)
            raise
    return ledger


def down(ledger: Ledger) -> None:
    """Take down what is on the ledger and still there, the jobs' processes too."""
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
        lines = _leave_out(lines, more) + more
    text = "\n".join([*_leave_out(lines, layout.conf), ""])
    ledger.slurm_conf.write_text(Template(text).substitute(values))


def _leave_out(lines: Sequence[str], said: Sequence[str]) -> list[str]:
    """Return the lines without those whose key is said elsewhere: of one said twice each command complains."""
    keys = {_key(line) for line in said}
    return [line for line in lines if _key(line) not in keys]


def _key(line: str) -> str:
    return line.partition("=")[0].lower()


def status(ledger: Ledger) -> dict[str, Any]:
    """Return what `status --json` prints."""
    states, links = daemons.node_states(ledger), network.links(ledger.layout)
    return {
        "name": ledger.layout.name,
        "folder": str(ledger.folder),
        "slurm_conf": str(ledger.slurm_conf),
        "completion_log": str(ledger.log("jobcomp")),
        "controller_up": bool(states),
        "layout": dataclasses.asdict(ledger.layout),
        "nodes": {
            node: {
                "address": ledger.layout.address(node),
                "state": states.get(node),
                "slurmd": daemons.running(ledger, f"slurmd.{node}"),
                "link": links[node],
            }
            for node in ledger.layout.workers
        },
    }
