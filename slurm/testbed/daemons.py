"""The testbed's daemons: munged and slurmctld on the controller, a slurmd on every node. `accounting` has two more."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import processes
from errors import Problem
from ledger import Ledger

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLL_S = 0.25
_ANSWER_S = 5.0  # sinfo itself would keep knocking at a dead controller for longer
_MUNGE_S = 10.0
_ORDERLY_S = 10.0  # slurmctld saves the state of its jobs when asked to end
_TAIL_LINES = 15


def _environment(ledger: Ledger) -> dict[str, str]:
    """Return what daemons get, and hand on to jobs; a relative SLURM_CONF would make every scontrol in a job hang."""
    return {"PATH": PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(ledger.slurm_conf)}


def start_munge(ledger: Ledger) -> None:
    """Start a munged of our own, with its own key and socket: it neither needs nor meets the system's.

    As root, like all of Slurm here, and forced: munged would refuse to keep a key where --dir may well be, in a private
    folder. Nothing but this testbed trusts that key.
    """
    folder = ledger.folder / "munge"
    folder.mkdir()
    key, socket = folder / "key", folder / "socket"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--key-file={key}", f"--socket={socket}", f"--pid-file={folder}/pid", f"--seed-file={folder}/seed"]
    start(ledger, "munged", ["munged", "--foreground", "--force", *files])
    wait(ledger, ["munged"], socket.exists, _MUNGE_S, "munged made no socket")


def start_controller(ledger: Ledger) -> None:
    start(ledger, "slurmctld", ["slurmctld", "-D"])


def stop_controller(ledger: Ledger) -> None:
    if "slurmctld" in ledger.processes:
        ledger.processes["slurmctld"].end(grace_s=_ORDERLY_S)


def start_slurmd(ledger: Ledger, node: str) -> None:
    start(ledger, f"slurmd.{node}", ["slurmd", "-D"], node)


def stop_slurmd(ledger: Ledger, node: str) -> None:
    """Kill a node's slurmd, as a crash would: jobs there go on, and nobody is told."""
    if f"slurmd.{node}" in ledger.processes:
        ledger.processes[f"slurmd.{node}"].end()


def running(ledger: Ledger, daemon: str) -> bool:
    return daemon in ledger.processes and ledger.processes[daemon].alive


def start(ledger: Ledger, daemon: str, command: list[str], machine: str | None = None) -> None:
    """Start a daemon on a machine, by default on the controller, unless it runs."""
    if not running(ledger, daemon):
        processes.start(
            processes.inside(machine or ledger.layout.controller, command),
            _environment(ledger),
            _output(ledger, daemon),
            lambda process: ledger.record(daemon, process),
        )


def node_states(ledger: Ledger) -> dict[str, str]:
    """Return Slurm's word for each node, `idle` or `down*`; nothing where the controller does not answer."""
    if not running(ledger, "slurmctld"):
        return {}
    done = call(ledger, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
    return dict(line.split() for line in done.stdout.splitlines()) if done and done.returncode == 0 else {}


def call(ledger: Ledger, command: list[str], limit_s: float = _ANSWER_S) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's programs from this machine; None where it gets no answer."""
    try:
        return subprocess.run(command, env=_environment(ledger), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None


def wait_for_controller(ledger: Ledger, limit_s: float) -> None:
    wait(ledger, ["slurmctld"], lambda: bool(node_states(ledger)), limit_s, "slurmctld does not answer")


def wait_until_idle(ledger: Ledger, nodes: Sequence[str], limit_s: float) -> None:
    def idle() -> bool:
        states = node_states(ledger)
        return all(states.get(node) == "idle" for node in nodes)

    watched = ["munged", "slurmctld", *(f"slurmd.{node}" for node in nodes)]
    wait(ledger, watched, idle, limit_s, "not all nodes became idle")


def wait(ledger: Ledger, watched: Sequence[str], ready: Callable[[], bool], limit_s: float, complaint: str) -> None:
    """Poll until `ready`; raise `Problem` with the end of the logs when a watched daemon ended or the time is up."""
    deadline = time.monotonic() + limit_s
    while True:
        time.sleep(_POLL_S)  # before the first look: a daemon that cannot start ends at once
        dead = [daemon for daemon in watched if not running(ledger, daemon)]
        if not dead and ready():
            return
        if dead or time.monotonic() > deadline:
            what = f"{', '.join(dead)} ended" if dead else f"after {limit_s:g} s"
            raise Problem(what, complaint, "the end of the log is above", detail=_tails(ledger, dead or watched))


def _tails(ledger: Ledger, daemons: Sequence[str]) -> str:
    outputs = [path for daemon in daemons if (path := _output(ledger, daemon)).exists()]
    return "\n".join("\n".join([f"--- {path}", *path.read_text().splitlines()[-_TAIL_LINES:]]) for path in outputs)


def _output(ledger: Ledger, daemon: str) -> Path:
    """Return the file with all that a daemon said, also before it knew its log file."""
    return ledger.folder / "log" / f"{daemon}.out"
