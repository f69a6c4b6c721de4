"""Daemons of a testbed: munged and slurmctld on the controller, and slurmd on every node.

The module `accounting` starts two more daemons.
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import processes
from layout import Problem
from ledger import Ledger

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLL_S = 0.25
# Maximum seconds for one of Slurm's programs. Without this limit, sinfo would retry for much longer if the controller
# does not run.
_ANSWER_S = 5.0
_MUNGE_S = 10.0
# Seconds that slurmctld gets to end. Before it ends, it saves the state of its jobs.
_ORDERLY_S = 10.0
_TAIL_LINES = 15


def _build_environment(ledger: Ledger) -> dict[str, str]:
    """Return the environment variables of the daemons. Jobs inherit these variables.

    SLURM_CONF is an absolute path. With a relative path, scontrol in a job would hang.
    """
    return {"PATH": PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(ledger.slurm_conf)}


def start_munge(ledger: Ledger) -> None:
    """Start a munged with its own key and socket, independent of the system's munged.

    It runs as root, like all daemons of the testbed. Without the option --force, munged refuses a key in a private
    folder, and the user may choose such a folder with --dir. Only this testbed trusts the key.
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


def is_running(ledger: Ledger, daemon: str) -> bool:
    return daemon in ledger.processes and ledger.processes[daemon].alive


def start(ledger: Ledger, daemon: str, command: list[str], machine: str | None = None) -> None:
    """Start a daemon on a machine of the testbed, by default on the controller. Do nothing if it is already running."""
    if not is_running(ledger, daemon):
        processes.start(
            processes.inside(machine or ledger.layout.controller, command),
            _build_environment(ledger),
            _get_output(ledger, daemon),
            lambda process: ledger.record(daemon, process),
        )


def read_node_states(ledger: Ledger) -> dict[str, str]:
    """Return the Slurm state of each node, such as `idle` or `down*`; empty if the controller does not answer."""
    if not is_running(ledger, "slurmctld"):
        return {}
    done = call(ledger, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
    return dict(line.split() for line in done.stdout.splitlines()) if done and done.returncode == 0 else {}


def call(ledger: Ledger, command: list[str], limit_s: float = _ANSWER_S) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's programs on the host of the testbed. Return None if it does not finish within `limit_s`
    seconds."""
    try:
        environment = _build_environment(ledger)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None


def wait_for_controller(ledger: Ledger, limit_s: float) -> None:
    wait(ledger, ["slurmctld"], lambda: bool(read_node_states(ledger)), limit_s, "slurmctld does not answer")


def wait_until_idle(ledger: Ledger, nodes: Sequence[str], limit_s: float) -> None:
    def are_idle() -> bool:
        states = read_node_states(ledger)
        return all(states.get(node) == "idle" for node in nodes)

    watched = ["munged", "slurmctld", *(f"slurmd.{node}" for node in nodes)]
    wait(ledger, watched, are_idle, limit_s, "not all nodes became idle")


def wait(ledger: Ledger, watched: Sequence[str], is_ready: Callable[[], bool], limit_s: float, complaint: str) -> None:
    """Wait until `is_ready` returns True. `watched` are the names of daemons that must stay alive meanwhile.

    Raise `Problem` with the last lines of the logs if a watched daemon ends, or after `limit_s` seconds. `complaint` is
    the message of the error.
    """
    deadline = time.monotonic() + limit_s
    while True:
        # Sleep before the first check. A daemon that cannot start ends within this time, and is then noticed.
        time.sleep(_POLL_S)
        dead = [daemon for daemon in watched if not is_running(ledger, daemon)]
        if not dead and is_ready():
            return
        if dead or time.monotonic() > deadline:
            event = f"{', '.join(dead)} ended" if dead else f"after {limit_s:g} s"
            outputs = [path for daemon in dead or watched if (path := _get_output(ledger, daemon)).exists()]
            tails = ("\n".join([f"--- {path}", *path.read_text().splitlines()[-_TAIL_LINES:]]) for path in outputs)
            raise Problem(event, complaint, "the end of the log is above", detail="\n".join(tails))


def _get_output(ledger: Ledger, daemon: str) -> Path:
    """Return the file with the standard output of a daemon. It contains messages that the daemon prints before it opens
    its log."""
    return ledger.folder / "log" / f"{daemon}.out"
